"""`serve` with the tiny checkpoint: several people and adapters at once, its end, and what is refused at the start."""

import json
import signal
import subprocess
import sys
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from r3lite import serve
from r3lite.core import listening
from r3lite.core.config import UsageError
from r3lite.core.files import read_jsonl, shipped
from r3lite.core.invocation import resolve
from r3lite.models import lora, weights
from r3lite.models.projections import PROJECTIONS
from r3lite.models.weights import resolve_folder
from tests.errors import raises, shows

openai = pytest.importorskip("openai", reason="needs the extra test")
pytest.importorskip("fastapi", reason="needs the extra serve")
ROOT = Path(__file__).parent.parent
EXAMPLES = str(shipped("data", "world", "test.jsonl"))
QUESTIONS = [row.text("question") for _, row in zip(range(16), read_jsonl(shipped("data", "world", "test.jsonl")))]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Two adapters of the tiny base with random weights, as `--adapters` takes them."""
    folder = tmp_path_factory.mktemp("adapters")
    return ",".join(f"{name}={write_adapter(folder / name, seed)}" for seed, name in enumerate(("sft", "rl")))


def write_adapter(folder: Path, seed: int, r: int = 4, targets=PROJECTIONS) -> Path:
    """Writes an adapter of the tiny base with random weights; returns its folder."""
    model = weights.load_model(resolve_folder("tiny"), torch.float32, torch.device("cpu"))
    lora.add_adapter(model, folder.name, r=r, alpha=8, targets=targets, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for path, weight in lora.adapter_parameters(model, folder.name).items():
        if ".lora_B." in path:
            weight.data.normal_(0, 0.02, generator=generator)
    lora.save_adapter(model, folder.name, folder, "tiny", weights.fingerprint(resolve_folder("tiny")))
    return folder


@pytest.fixture(scope="module")
def arguments(adapters):
    corpus = str(shipped("data", "world", "corpus.jsonl"))
    small = ["--dtype", "fp32", "--max-new-tokens", "24", "--max-hops", "2"]
    return [
        "--preset",
        "tiny",
        *small,
        "--corpus",
        corpus,
        "--adapters",
        adapters,
        "--port",
        "0",
        "--examples",
        EXAMPLES,
    ]


def started(arguments):
    """A server process, and its address once it answers."""
    command = [sys.executable, "-m", "r3lite.serve", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = [process.stdout.readline() for _ in range(2)]
    assert "http://" in lines[1], process.stderr.read()
    return process, lines[1].split()[0]


@pytest.fixture(scope="module")
def server(arguments):
    process, url = started(arguments)
    yield url
    process.terminate()
    process.communicate(timeout=30)


def completed(client, question, model="search"):
    reply = client.chat.completions.create(model=model, messages=[{"role": "user", "content": question}])
    message = reply.choices[0].message
    return getattr(message, "reasoning_content", None) or message.content


def test_fast_chat_by_an_adapter_that_learned_steps_says_so(server):
    with urllib.request.urlopen(f"{server}/api/health", timeout=5) as reply:
        health = json.load(reply)
    assert health["notes"]["chat"].startswith("The adapter sft is trained on steps, not on chat")
    assert health["notes"]["reasoning"].startswith("The adapter rl has learned to search")
    with urllib.request.urlopen(f"{server}/api/about", timeout=5) as reply:
        about = json.load(reply)
    served = {"model": "tiny", "adapters": ["sft", "rl"], "documents": "corpus.jsonl", "examples": QUESTIONS[:3]}
    assert about == served


def test_sixteen_at_once_get_what_each_gets_alone(server):
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", timeout=60)
    alone = [completed(client, q) for q in QUESTIONS]
    together = [""] * 16

    def ask(i):
        together[i] = completed(client, QUESTIONS[i])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone and len(set(alone)) > 1
    client.close()


def test_a_stream_is_the_answer_piece_by_piece(server):
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", timeout=60)
    full_reply = completed(client, QUESTIONS[0])
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    pieces = [
        getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
        for chunk in client.chat.completions.create(model="search", messages=messages, stream=True)
    ]
    assert "".join(pieces).strip() == full_reply.strip() and len([p for p in pieces if p]) > 10
    client.close()


def test_two_adapters_in_turn_and_at_once_answer_as_they_do_alone(server):
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", timeout=60)
    models = ["chat/sft", "chat/rl", "reasoning/sft", "search/rl"] * 3
    alone = [completed(client, QUESTIONS[0], model) for model in models]
    together = [""] * len(models)

    def ask(i):
        together[i] = completed(client, QUESTIONS[0], models[i])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone and len(set(alone[:4])) > 2
    client.close()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM")
def test_sigterm_lets_answers_end_and_takes_no_more(arguments):
    process, url = started(arguments)
    body = json.dumps({"query": QUESTIONS[0], "mode": "search", "stream": True}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        first = reply.readline()
        process.send_signal(signal.SIGTERM)
        remaining_events = reply.read().decode()
    assert b'"start"' in first and remaining_events.strip().splitlines()[-1].startswith('data: {"type": "done"')
    assert process.wait(timeout=30) == 143
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{url}/api/health", timeout=5)
    assert "Traceback" not in process.stderr.read()


def config(*argv):
    return resolve("serve", serve.ServeConfig(), ["--preset", "tiny", *argv])


def test_which_adapter_answers_in_which_mode():
    from r3lite.assembly.answering_live import adapters_of, modes_of

    def modes(*argv, searches=True):
        c = config(*argv)
        return list(modes_of(c, adapters_of(c), searches).values())

    assert modes() == ["base"] * 2 and modes("--steps", "on") == ["base"] * 3
    assert modes("--adapter", "runs/ppo", "--steps", "off") == ["ppo"] * 2
    assert modes("--adapter", "runs/ppo") == ["ppo"] * 3
    assert modes("--adapters", "runs/a/sft,rl=runs/ppo/adapter") == ["sft", "rl", "rl"]
    assert modes("--adapters", "sft,rl,base", "--chat-adapter", "base") == ["base", "rl", "rl"]
    assert modes("--adapters", "sft,base") == ["sft"] * 3  # the last one has not learned the steps
    assert modes("--adapters", "sft,base", "--reasoning-adapter", "base") == ["sft", "sft"]
    assert modes("--adapters", "one/adapter,two", searches=False) == ["one", "two"]
    assert list(adapters_of(config("--adapters", "sft,q/reinforce++-baseline/adapter"))) == [
        "sft",
        "reinforce-baseline",
    ]
    assert adapters_of(config("--adapters", "x=a,base")) == {"x": "a", "base": None}
    in_sweep = ["--adapter", "lr=1/sft", "--adapters", r"runs/lr=1e-4/adapter,rl=runs/lr=1e-4,w=C:\lr=1\a"]
    assert adapters_of(config(*in_sweep)) == {
        "sft": "lr=1/sft",
        "lr1e-4": "runs/lr=1e-4/adapter",
        "rl": "runs/lr=1e-4",
        "w": r"C:\lr=1\a",
    }
    assert adapters_of(config("--adapter", "base=x")) == {"basex": "base=x"}
    for wrong in (
        ["--adapters", "a=x,a=y"],
        ["--adapters", "++"],
        ["--adapters", "a b=c"],
        ["--adapters", "base=x"],
        ["--adapter", "base"],
    ):
        with pytest.raises(UsageError, match="NAME=FOLDER"):
            adapters_of(config(*wrong))
    with raises(UsageError, "mode-adapter-unknown", "search", "gpt", "sft, rl"):
        modes("--adapters", "sft,rl", "--search-adapter", "gpt")


def test_the_plan_has_room_for_adapters_of_several_shapes(tmp_path):
    """Rank and projections of the first adapter were counted for all."""
    from r3lite.assembly.answering_live import plan_lanes
    from r3lite.memory.planner import standing

    low = write_adapter(tmp_path / "low", 0, r=1, targets=("q_proj",))
    high = write_adapter(tmp_path / "high", 1, r=16, targets=("v_proj", "down_proj"))
    files = sum((folder / "adapter_model.safetensors").stat().st_size for folder in (low, high))
    sizes = []
    for adapters in (f"{low},{high}", f"{high},{low}"):
        plan = plan_lanes(config("--retriever", "none", "--adapters", adapters))
        sizes.append(standing(plan.workload, plan.memory)["adapters"])
    assert sizes[0] == sizes[1] and files < sizes[0] < 4 * files


def test_the_plan_has_a_cache_and_graphs_for_every_adapter(adapters):
    """One row of each adapter at least, and a pool of graphs for each."""
    from r3lite.assembly.answering_live import LiveAnswers, plan_lanes
    from r3lite.memory import planner

    def phase(names, rows):
        plan = plan_lanes(config("--retriever", "none", "--adapters", names, "--rollout-batch-size", rows))
        sampling = planner.phases(replace(plan.workload, on_cuda=True), plan.memory)["sample"]
        return plan.workload.lane_rows(plan.memory.rollout_batch_size), sampling

    one_lane_rows, one_lane = phase(adapters.split(",")[0], "2")
    lane_rows, three_lanes = phase(f"{adapters},base", "8")
    assert (one_lane_rows, lane_rows) == (2, 2)
    assert three_lanes["graph pools"] == 3 * one_lane["graph pools"]
    assert 2.5 * one_lane["KV cache"] < three_lanes["KV cache"] <= 3 * one_lane["KV cache"]
    assert phase(f"{adapters},base", "2")[0] == 1
    argv = ["--retriever", "none", "--adapters", f"{adapters},base", "--dtype", "fp32", "--rollout-batch-size", "2"]
    answering = LiveAnswers(config(*argv), lambda pairs: [[] for _ in pairs])
    assert answering.rows == 1
    answering.close()


def test_passes_over_every_number_of_rows_are_run_before_someone_waits(adapters, monkeypatch):
    """With every adapter: each has graphs of its own."""
    from r3lite.assembly.answering_live import LiveAnswers
    from r3lite.rollout.lanes import LaneEngine

    running = {}

    class WatchedEngine(LaneEngine):
        def _decode(self, scheduler, decoder):
            running.setdefault(id(scheduler), set()).add(len(scheduler.running_rows))
            return super()._decode(scheduler, decoder)

    monkeypatch.setattr("r3lite.assembly.answering_live.LaneEngine", WatchedEngine)
    argv = ["--retriever", "none", "--adapters", f"{adapters},base", "--dtype", "fp32", "--rollout-batch-size", "9"]
    answering = LiveAnswers(config(*argv), lambda pairs: [[] for _ in pairs])
    answering.warm_up()
    assert len(running) == 3
    assert all(counts >= {1, 2, 3} for counts in running.values())
    answering.close()


def test_what_was_said_before_is_given_where_it_is_wanted_and_as_far_as_there_is_room(adapters):
    from r3lite.assembly.answering_live import LiveAnswers
    from r3lite.serving.asks import Ask

    def prompt(answering, ask):
        sequence = answering.prepare(ask, None).transcript
        return answering.engine.layout.tokenizer.decode(sequence.tokens)

    argv = ["--retriever", "none", "--adapters", f"{adapters},base", "--dtype", "fp32", "--max-length", "300"]
    answering = LiveAnswers(config(*argv), lambda pairs: [[] for _ in pairs])
    turns = [("user", "first"), ("assistant", "1st"), ("user", "second"), ("assistant", "2nd")]
    earlier = tuple({"role": r, "content": t} for r, t in [("system", "be brief"), *turns])
    assert answering.modes == {"chat": "sft", "reasoning": "rl"}
    plain = prompt(answering, Ask("third", "chat", "base", earlier))
    assert plain == "system\nbe brief\n" + "".join(f"{r}\n{t}\n" for r, t in turns) + "user\nthird\nassistant\n"
    steps = prompt(answering, Ask("third", "reasoning", "rl", earlier))
    assert "first" not in steps and "be brief" not in steps and "third" in steps
    long = ({"role": "user", "content": "first" + " and so on" * 60}, *earlier[2:])
    cut = prompt(answering, Ask("third", "chat", "base", long))
    assert "first" not in cut and "second\nassistant\n2nd\nuser\nthird" in cut
    # Two questions in a row: what remains begins with a question all the same.
    two_questions = ({"role": "user", "content": "before"}, *long)
    assert prompt(answering, Ask("third", "chat", "base", two_questions)) == cut
    wanted = [Ask("x", "chat", "base", temperature=0.5, top_p=0.9, top_k=k) for k in (7, -1, None)]
    samplers = [answering.prepare(ask, None).transcript.sampler for ask in wanted]
    assert [(s.temperature, s.top_p, s.top_k) for s in samplers] == [(0.5, 0.9, k) for k in (7, 0, 0)]
    answering.close()


@pytest.mark.parametrize(
    ("flags", "learned"),
    [
        ([], ["chat", "search"]),
        (["--retrieving-modes", "reasoning,search"], ["chat", "reasoning", "search"]),
    ],
)
def test_auto_leaves_out_reasoning_without_documents_where_the_model_has_learned_to_search(flags, learned):
    from r3lite.assembly.answering_live import LiveAnswers

    corpus = ["--corpus", str(shipped("data", "world", "corpus.jsonl")), "--dtype", "fp32", "--max-new-tokens", "24"]
    answering = LiveAnswers(config(*corpus, "--steps", "on", *flags), lambda pairs: [[] for _ in pairs])
    assert answering.learned_modes == learned and list(answering.modes) == ["chat", "reasoning", "search"]
    assert ("guesses" in answering.notes.get("reasoning", "")) == ("reasoning" not in learned)
    answering.close()


def test_an_answer_without_numbers_is_given_up_and_the_others_go_on(capsys):
    """A request with a temperature of 1e-38 ended everybody's answer; it is greedy."""
    from r3lite.assembly.answering_live import LiveAnswers
    from r3lite.core.errors import NotFinite
    from r3lite.serving.asks import Ask

    short = ["--retriever", "none", "--dtype", "fp32", "--max-new-tokens", "24", "--max-hops", "1", "--steps", "on"]
    answering = LiveAnswers(config(*short), lambda pairs: [[] for _ in pairs])

    def answers(*asks):
        prepared = [answering.prepare(ask, None) for ask in asks]
        for growing in prepared:
            answering.join(growing)
        broken = prepared[0].transcript
        if asks[0].text == "broken":
            answering.iterate()
            broken.error = NotFinite("question 0: the model's logits are not finite", code="broken")
        completions = []
        while answering.growing:
            completions += answering.iterate()
        by_id = {id(growing): answer for growing, answer in completions}
        return [by_id[id(growing)] for growing in prepared]

    greedy = Ask(QUESTIONS[0], "reasoning", "base", temperature=0.0)
    (alone,) = answers(greedy)
    broken, greedy_answer = answers(Ask("broken", "reasoning", "base"), greedy)
    assert broken is None and greedy_answer == alone
    assert "an answer was given up: question 0: the model's logits" in capsys.readouterr().err
    tiny = replace(greedy, temperature=1e-38, top_k=20, top_p=0.9)
    assert answers(tiny, greedy) == [alone, alone]
    answering.close()


def test_an_answer_that_the_limit_of_its_request_cut_off_says_so():
    """It blamed --max-length, which the person who asks has not set."""
    from r3lite.assembly.answering_live import LiveAnswers
    from r3lite.serving.asks import Ask

    short = ["--retriever", "none", "--dtype", "fp32", "--max-new-tokens", "8", "--max-hops", "1", "--steps", "on"]
    answering = LiveAnswers(config(*short), lambda pairs: [[] for _ in pairs])
    answers = []
    for max_tokens in (3, None):
        answering.join(answering.prepare(Ask(QUESTIONS[0], "reasoning", "base", max_tokens=max_tokens), None))
        while answering.growing:
            completions = answering.iterate()
        answers += [answer for _, answer in completions]
    limited, unlimited = answers
    assert (limited.finish, limited.why) == ("cut_off", "step 1 was not finished within the request's 3 tokens")
    assert unlimited.why and "the request's" not in unlimited.why
    answering.close()


def test_a_procedure_stands_before_the_question_that_it_fits(tmp_path):
    from r3lite.assembly.answering import open_retriever
    from r3lite.assembly.answering_live import LiveAnswers
    from r3lite.serving.asks import Ask

    row = {"name": "Cities", "description": "about cities", "trigger": "city", "steps": [{"action": "Think"}]}
    (tmp_path / "p.json").write_text(json.dumps(row))
    argv = ["--retriever", "none", "--dtype", "fp32", "--procedures", str(tmp_path / "p.json"), "--steps", "on"]
    serve_config = config(*argv, "--procedures-by", "triggers")
    answering = LiveAnswers(serve_config, *open_retriever(serve_config))
    for text, stands in (("Which city?", True), ("Which town?", False)):
        for mode in ("chat", "reasoning"):
            sequence = answering.prepare(Ask(text, mode, "base"), None).transcript
            prompt = answering.engine.layout.tokenizer.decode(sequence.tokens)
            assert ("user\nProcedure: Cities. about cities\n1. Think\n\n" in prompt) == stands and text in prompt
    answering.close()


def test_a_base_that_has_not_learned_the_steps_searches_once_and_does_not_reason():
    from r3lite.assembly.answering_live import LiveAnswers
    from r3lite.core.episode import Document
    from r3lite.serving.asks import Ask

    corpus = ["--corpus", str(shipped("data", "world", "corpus.jsonl")), "--dtype", "fp32", "--max-new-tokens", "24"]
    documents = [Document("7", "Jelsan Janli", "Jelsan Janli is a film.")]
    answering = LiveAnswers(config(*corpus), lambda pairs: [documents for _ in pairs])
    assert answering.modes == {"chat": "base", "search": "base"} and list(answering.missing) == ["reasoning"]
    assert answering.learned_modes == ["chat", "search"]
    assert list(answering.notes) == ["search"] and "Plain RAG" in answering.notes["search"]
    answering.warm_up()
    events = []
    growing = answering.prepare(Ask(QUESTIONS[0], "search", "base"), events.append)
    answering.join(growing)
    while answering.growing:
        completions = answering.iterate()
    ((_, answer),) = completions
    assert answer.search_queries == [QUESTIONS[0]] and [source.title for source in answer.sources] == ["Jelsan Janli"]
    assert answer.final_answer and events[0]["query"] == QUESTIONS[0]
    prompt = answering.engine.layout.tokenizer.decode(growing.transcript.tokens)
    assert "[1] Jelsan Janli: Jelsan Janli is a film." in prompt and "Step 1" not in prompt
    answering.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "::", "example.org"])
def test_a_server_that_others_can_reach_needs_a_token(monkeypatch, host, capsys):
    monkeypatch.delenv(listening.TOKEN, raising=False)
    assert serve.main(["--preset", "tiny", "--retriever", "none", "--host", host]) == 1
    assert "R3LITE_TOKEN is not set" in capsys.readouterr().err
    monkeypatch.setenv(listening.TOKEN, "hunter2")
    assert serve.main(["--preset", "tiny", "--retriever", "none", "--host", host]) == 1
    assert "too short" in (stderr := capsys.readouterr().err) and "hunter2" not in stderr
    monkeypatch.setenv(listening.TOKEN, "k" * 16)
    assert listening.token_of(host) == "k" * 16


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_on_a_loopback_address_it_needs_none(monkeypatch, host):
    monkeypatch.delenv(listening.TOKEN, raising=False)
    assert listening.token_of(host) is None


@pytest.mark.parametrize("package", ["fastapi", "uvicorn"])
def test_without_its_packages_it_names_the_extra(monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert serve.main(["--preset", "tiny", "--retriever", "none"]) == 1
    assert (
        f"needs the package {package}" in (stderr := capsys.readouterr().err)
        and "pip install 'r3lite[serve]'" in stderr
    )


@pytest.mark.parametrize(
    ("argv", "status", "cause"),
    [
        (["--output", "x", "--retriever", "none"], 2, "--output is x, but has no effect"),
        (["--cors-origins", "*"], 2, "--cors-origins is *"),
        (["--port", "99999"], 2, "at most 65535"),
        ([], 2, "--index is missing"),
    ],
)
def test_bad_input_is_refused(argv, status, cause, capsys):
    assert serve.main(["--preset", "tiny", "--port", "0", *argv] if "--port" not in argv else argv) == status
    assert cause in capsys.readouterr().err


def test_a_port_in_use_is_named(capsys):
    with listening.listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert serve.main(["--preset", "tiny", "--retriever", "none", "--port", port]) == 1
    assert shows(capsys.readouterr().err, "cannot-listen", "127.0.0.1", port)


def test_a_dry_run_tells_the_memory(capsys):
    assert serve.main(["--preset", "tiny", "--retriever", "none", "--dry-run"]) == 0
    assert "Memory, for episodes of 1536 tokens" in capsys.readouterr().out
