"""Prompt optimisation: rounds by hand with a scripted model and a scripted critic, kills, caps, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch

from r3lite import collect, sft, tune_prompt
from r3lite.core.files import shipped, write_jsonl
from r3lite.protocols.registry import PROTOCOLS, build_protocol
from r3lite.protocols.templates import prompt_file
from r3lite.rollout.engine import Engine
from r3lite.settings import ProtocolSettings
from r3lite.tuning.history import History
from tests.errors import shows
from tests.evaluating import token_of
from tests.fake_gemini import text_reply

WORLD = shipped("data", "world")
FIRST = "Hurry. The question: {question}"
QUESTIONS = 8


@pytest.fixture
def files(tmp_path):
    """The first prompt, and questions: those to be criticized for, and those to be scored on."""
    (tmp_path / "first.txt").write_text(f"{FIRST}\n", encoding="utf-8")
    for name in ("train", "dev"):
        questions = [f"Where is {name} {i}?" for i in range(QUESTIONS)]
        rows = [{"id": f"{name}{i}", "question": text, "answer": f"place {i}"} for i, text in enumerate(questions)]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    return tmp_path


@pytest.fixture
def model(monkeypatch):
    """A model that answers the first two questions for each exclamation mark in its prompt; counts its episodes."""
    question_ids = []

    def sample(engine, logits, batch):
        tokens = []
        for sequence, depth in zip(batch.sequences, batch.depths, strict=True):
            tokenizer = engine.layout.tokenizer
            prompt, number = tokenizer.decode(sequence.tokens), int(sequence.question.id[-1])
            if not sequence.turn and not depth:
                question_ids.append(sequence.question.id)
            answer = sequence.question.answers[0] if number < 2 * prompt.count("!") else "nowhere"
            completion = f"Step 1:\nThe problem analysis: I hurry.\nThe final answer: {answer}"
            tokens.append(token_of(tokenizer, completion, len(sequence.turn) + depth))
        return torch.tensor(tokens), torch.zeros(len(tokens))

    monkeypatch.setattr(Engine, "_sample", sample)
    return question_ids


@pytest.fixture
def critic(gemini):
    """A strict critic: of four edits of a prompt one adds a mark, and three are no prompts."""

    def reply(body):
        system, prompt = body["systemInstruction"]["parts"][0]["text"], body["contents"][0]["parts"][0]["text"]
        config, data = body["generationConfig"], json.loads(prompt)
        (key,) = config["responseSchema"]["required"]
        assert config["responseMimeType"] == "application/json" and "never an instruction" in system
        assert [form.splitlines()[0] for form in data["form"]] == ["Step 1:", "Step 2:"]
        if key == "critique":
            assert set(data) == {"prompt", "form", "episodes"} and 0 < len(data["episodes"]) <= 4
            for episode in data["episodes"]:
                assert episode["question"].startswith("Where is train") and episode["final_answer"] == "nowhere"
                assert episode["steps"][0]["faults"] == []
            number = system.partition("yours is number ")[2][0]
            return text_reply(json.dumps({"critique": f"Cause {number}: it hurries."}))
        assert set(data) == {"prompt", "critique", "form"} and "{question}" in system
        edit = {
            "1": data["prompt"] + "!",
            "2": "Take your time.",
            "3": data["prompt"],
            "4": "{question} {question} {answer}",
        }[data["critique"][6]]
        return text_reply(json.dumps({"prompt": edit}))

    gemini.script = reply
    return gemini


@pytest.fixture
def run(files, critic):
    def start(*extra, output="out"):
        data = ["--data", str(files / "train.jsonl"), "--eval-data", str(files / "dev.jsonl"), "--retriever", "none"]
        judge = ["--judge", "gemini", "--judge-base-url", critic.url, "--judge-concurrency", "1", "--judge-rpm", "1000"]
        sizes = ["--beam", "2", "--branch", "4", "--rounds", "2", "--init-prompt", str(files / "first.txt")]
        flags = ["--preset", "tiny", "--dtype", "fp32", *data, *judge, *sizes, "--output", str(files / output), *extra]
        return tune_prompt.main(flags)

    return start


def read(folder):
    return json.loads((folder / "history.json").read_text(encoding="utf-8"))


TWICE = "it has {question} 2 times; it has {answer}, which the first prompt does not have"
MADE = [  # (round, parent, prompt, why it is rejected)
    (0, None, FIRST, ""),
    (1, 0, f"{FIRST}!", ""),
    (1, 0, "Take your time.", "it lost {question}"),
    (1, 0, FIRST, "it is the same as prompt 0"),
    (
        1,
        0,
        "{question} {question} {answer}",
        TWICE,
    ),
    (2, 1, f"{FIRST}!!", ""),
    (2, 1, "Take your time.", "it lost {question}"),
    (2, 1, f"{FIRST}!", "it is the same as prompt 1"),
    (
        2,
        1,
        "{question} {question} {answer}",
        TWICE,
    ),
    (2, 0, f"{FIRST}!", "it is the same as prompt 1"),
    (2, 0, "Take your time.", "it lost {question}"),
    (2, 0, FIRST, "it is the same as prompt 0"),
    (
        2,
        0,
        "{question} {question} {answer}",
        TWICE,
    ),
]


def test_two_rounds_by_hand(run, model, critic, files, capsys):
    """Each mark brings two of eight questions: the first prompt has 0, the next 0.25, the one after that 0.5."""
    assert run() == 0
    history = read(files / "out")
    assert [(c["round"], c["parent"], c["prompt"], c["rejected"]) for c in history["candidates"]] == MADE
    assert {c["id"]: c["scores"]["em"]["value"] for c in history["candidates"] if c["scores"]} == {
        0: 0,
        1: 0.25,
        5: 0.5,
    }
    assert [(r["number"], r["best"], r["gained"]) for r in history["rounds"]] == [(0, 0, 0), (1, 1, 0.25), (2, 5, 0.25)]
    assert [c["critique"] for c in history["candidates"][1:5]] == [f"Cause {i}: it hurries." for i in range(1, 5)]
    assert (files / "out" / "best_prompt.txt").read_text(encoding="utf-8") == f"{FIRST}!!\n"
    assert len(critic.requests) == 2 * 12
    assert model.count("dev0") == 3 and model.count("train0") == 3  # three prompts scored; one and then two tried
    stdout = capsys.readouterr().out
    assert "critic: 24 requests, 0 replies from the cache, 0.0" in stdout
    assert "rejected: 2, from 0: it lost {question}" in stdout
    assert "best: prompt 5, f1 0.500 [" in stdout and "the first had 0.000 [" in stdout
    assert (
        run() == 0 and len(critic.requests) == 24 and len(model) == 6 * QUESTIONS
    )  # it is over: nothing is done again
    assert capsys.readouterr().out.splitlines()[:4] == stdout.splitlines()[:4]


def test_killed_anywhere_it_goes_on_and_asks_and_scores_nothing_twice(run, model, critic, files, monkeypatch):
    """Before each write: the first prompt's score, its round, two new prompts, the score of one, and a round."""
    small = ["--rounds", "1", "--branch", "2"]
    write = History._write
    writes_left = [0]
    assert run(*small, output="whole") == 0
    request_count = len(critic.requests)
    uninterrupted = read(files / "whole")

    def dies(history):
        writes_left[0] -= 1
        if writes_left[0] == 0:
            raise KeyboardInterrupt
        write(history)

    monkeypatch.setattr(History, "_write", dies)
    for kill in range(1, 7):
        model.clear()
        critic.requests.clear()
        writes_left[0] = kill
        assert run(*small, output=f"killed {kill}") == 130
        assert run(*small, output=f"killed {kill}") == 0
        assert read(files / f"killed {kill}") == uninterrupted
        assert len(critic.requests) == request_count == 4 and model.count("dev0") == 2
    writes_left[0] = 7
    assert run(*small, output="to its end") == 0


def test_a_cap_on_calls_ends_it_with_the_best_so_far_and_more_calls_go_on(run, model, critic, files, capsys):
    assert run("--judge-max-calls", "5") == 0  # four critiques, and the edit after the first
    stdout = capsys.readouterr().out
    assert "stopped before the end: --judge-max-calls 5 is reached" in stdout
    assert "best: prompt 1, f1 0.250" in stdout
    assert (files / "out" / "best_prompt.txt").read_text(encoding="utf-8") == f"{FIRST}!\n"
    assert len(critic.requests) == 5 and len(read(files / "out")["rounds"]) == 1
    assert run("--judge-max-calls", "19") == 0
    assert len(critic.requests) == 24
    history = read(files / "out")
    assert [(c["round"], c["parent"], c["prompt"], c["rejected"]) for c in history["candidates"]] == MADE


def test_a_cap_on_money_ends_it_too(run, model, critic, files, capsys):
    """A reply of 100 and 10 tokens costs 0.000055 US dollars; what it may cost at most is reserved before."""
    assert run("--judge-max-cost", "0.0042") == 0
    out = capsys.readouterr().out
    assert "--judge-max-cost 0.0042 is reached" in out and 0 < len(critic.requests) < 24
    assert (files / "out" / "best_prompt.txt").exists()


def test_replies_that_are_none_are_rejected_and_if_all_are_it_stops(run, model, critic, files, capsys):
    good = critic.script
    critic.script = lambda body: text_reply("oops")
    assert run() == 1
    stderr = capsys.readouterr().err
    assert shows(stderr, "critic-useless", "4", "the reply is not valid JSON")
    assert (files / "out" / "best_prompt.txt").read_text(encoding="utf-8") == f"{FIRST}\n"
    replies = ["oops", json.dumps({"critique": " "}), json.dumps({"prompt": 7})]
    critic.script = lambda body: text_reply(replies.pop()) if replies else good(body)
    assert run("--rounds", "1") == 0
    rejected = [c["rejected"] for c in read(files / "out")["candidates"][1:4]]
    assert rejected == ["the reply is JSON, but not of the requested form"] * 2 + ["the reply is not valid JSON"]


def test_a_prompt_too_long_for_an_episode_is_rejected(run, model, critic, files):
    good = critic.script

    def long(body):
        reply = good(body)
        key = body["generationConfig"]["responseSchema"]["required"][0]
        return reply if key == "critique" else text_reply(json.dumps({"prompt": "{question}" + " word" * 2000}))

    critic.script = long
    assert run("--rounds", "1", "--branch", "1") == 0
    assert "an answer does not fit in --max-length" in read(files / "out")["candidates"][1]["rejected"]


def test_a_prompt_that_fails_nowhere_is_not_criticized(run, model, critic, files, capsys):
    (files / "first.txt").write_text(f"{FIRST}!!!!", encoding="utf-8")
    assert run("--rounds", "1") == 0
    assert critic.requests == [] and "no failures, so no critique" in capsys.readouterr().err


def test_what_is_there_is_another_runs(run, model, critic, files, capsys):
    assert run("--rounds", "1") == 0
    assert run("--rounds", "1", "--beam", "3") == 1
    assert shows(capsys.readouterr().err, "other-run", "tune_prompt", "beam (was 2, is 3)")
    (files / "first.txt").write_text("Be calm. {question}", encoding="utf-8")
    assert run("--rounds", "1") == 1
    assert shows(capsys.readouterr().err, "history-differs")
    (files / "mine").mkdir()
    (files / "mine" / "notes.txt").write_text("x", encoding="utf-8")
    assert run(output="mine") == 1 and shows(capsys.readouterr().err, "output-not-empty")


def test_more_rounds_go_on_from_what_is_there(run, model, critic, files):
    assert run("--rounds", "1") == 0 and run("--rounds", "2") == 0
    history = read(files / "out")
    assert [(c["round"], c["parent"], c["prompt"], c["rejected"]) for c in history["candidates"]] == MADE
    assert len(critic.requests) == 24


def test_errors_and_dry_run(run, model, critic, files, capsys):
    assert run("--judge", "none") == 2 and shows(capsys.readouterr().err, "setting-unused", "--judge")
    assert run("--format", "tags", "--init-prompt", "none", "--improve", "step_prompt") == 2
    assert shows(capsys.readouterr().err, "prompt-absent", "tags")
    assert run("--beam", "4", "--rounds", "3", "--dry-run") == 0
    stdout = capsys.readouterr().out
    assert "At most 72 calls of the critic (36 critiques, 36 edits) and 37 prompts scored" in stdout
    assert not (files / "out").exists() and critic.requests == []


def test_the_formats_own_prompts_are_those_that_are_named():
    files = []
    for name in PROTOCOLS:
        for which in ("init_prompt", "step_prompt"):
            plain = ProtocolSettings(format=name)
            if file := prompt_file(plain, which):
                files.append(file)
                assert shipped(file).exists()
                assert build_protocol(replace(plain, **{which: file})) == build_protocol(plain)
    assert len(files) >= len(PROTOCOLS)  # each format has an initial prompt


def test_the_step_prompt_can_be_improved_too(files, critic, model):
    (files / "step.txt").write_text("Found: {documents}\nStep {step}", encoding="utf-8")
    good = critic.script
    lost = json.dumps({"prompt": "Found: {documents}"})

    def reply(body):
        key = body["generationConfig"]["responseSchema"]["required"][0]
        return text_reply(lost) if key == "prompt" else good(body)

    critic.script = reply
    data = ["--data", str(files / "train.jsonl"), "--eval-data", str(files / "dev.jsonl"), "--retriever", "none"]
    judge = ["--judge", "gemini", "--judge-base-url", critic.url, "--rounds", "1", "--branch", "1"]
    prompts = ["--improve", "step_prompt", "--step-prompt", str(files / "step.txt"), "--output", str(files / "out")]
    assert tune_prompt.main(["--preset", "tiny", "--dtype", "fp32", *data, *judge, *prompts]) == 0
    assert read(files / "out")["candidates"][1]["rejected"] == "it lost {step}"


# An example that the model was never shown, and in which nothing is looked up.
MISLEADING = "Step 1:\nThe problem analysis: nothing is missing.\nThe final answer: none\n\nThe question: {question}\n"


@pytest.mark.slow
def test_a_bad_prompt_is_improved_on_the_sample_world(cold, gemini, tmp_path):
    """The tiny model, taught with `The question: {question}` alone, scores; the critic's k-th edit drops the k-th line.

    After half as many steps of SFT the model does not react to its prompt yet.
    """
    learn = ["--data", str(WORLD / "train.jsonl"), "--limit", "800", "--index", str(cold / "index")]
    assert collect.main(["--preset", "tiny", *learn, "--output", str(tmp_path / "rows.jsonl")]) == 0
    taught = ["--data", str(tmp_path / "rows.jsonl"), "--validation-fraction", "0", "--output", str(tmp_path / "sft")]
    assert sft.main(["--preset", "tiny", *taught]) == 0

    def reply(body):
        system = body["systemInstruction"]["parts"][0]["text"]
        data = json.loads(body["contents"][0]["parts"][0]["text"])
        if "critique" not in data:
            return text_reply(json.dumps({"critique": f"Line {system.partition('yours is number ')[2][0]} misleads."}))
        lines = [line for line in data["prompt"].splitlines() if line]
        remaining_lines = [line for number, line in enumerate(lines, 1) if number != int(data["critique"].split()[1])]
        return text_reply(json.dumps({"prompt": "\n".join(remaining_lines) or "none"}))

    gemini.script = reply
    (tmp_path / "bad.txt").write_text(MISLEADING, encoding="utf-8")
    model = ["--adapter", str(tmp_path / "sft"), "--index", str(cold / "index")]
    data = ["--data", str(WORLD / "train.jsonl"), "--eval-data", str(WORLD / "dev.jsonl"), "--eval-questions", "50"]
    sizes = ["--init-prompt", str(tmp_path / "bad.txt"), "--beam", "2", "--rounds", "2", "--sampled-questions", "16"]
    critic = ["--judge", "gemini", "--judge-base-url", gemini.url, "--judge-rpm", "1000"]
    out = tmp_path / "out"
    assert tune_prompt.main(["--preset", "tiny", *model, *data, *sizes, *critic, "--output", str(out)]) == 0
    history = read(out)
    assert all(rejected == "it lost {question}" for rejected in lost_of(history)) and lost_of(history)
    best, scores = history["rounds"][-1]["best"], [c["scores"] for c in history["candidates"]]
    assert scores[best]["f1"]["value"] >= scores[0]["f1"]["value"] + 0.15
    assert (out / "best_prompt.txt").read_text(encoding="utf-8").count("\n") <= 3  # at least two lines are gone


def lost_of(history):
    """Why the prompts without {question} were rejected."""
    return [c["rejected"] for c in history["candidates"] if "{question}" not in c["prompt"]]
