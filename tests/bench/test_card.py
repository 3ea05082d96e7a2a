"""RL on a large card as one command: shares of the minutes, what stages leave, and how they follow one another."""

import json
import os
import shlex
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import card, card_settings, card_state
from bench.card import Job, Run, Stage
from bench.card_settings import Settings, end_of_training, reserved
from r3lite.core.files import read_jsonl, write_jsonl
from r3lite.training import checkpoint
from r3lite.training.checkpoint import Checkpoint
from tests.cold_start import WORLD
from tests.commands import argument

# Stands in for the commands: writes what each leaves in --output, and notes that it ran. Of the files beside it, `fail`
# names outputs at which it fails, `endless` those that run until SIGTERM, `deaf` those that do not obey it.
STUB = """
import json, shutil, signal, sys, time
from pathlib import Path
here, (command, *words) = Path(__file__).parent, sys.argv[1:]
output = Path(words[words.index("--output") + 1])
output.mkdir()
def named(file):
    return (here / file).exists() and output.name in (here / file).read_text().split()
def write(name, *rows):
    (output / name).write_text("".join(json.dumps(row) + "\\n" for row in rows))
def save(*_):
    shutil.copytree(here / "checkpoint-1", output / "checkpoint-1")
    sys.exit(143)
if command == "ppo":
    write("metrics.jsonl", {"step": 1, "step_time": 2.0, "reward": 0.25, "kl": 0.5})
    write("episodes.jsonl", {"step": 1, "id": "a"}, {"step": 1, "id": "b"})
    if named("deaf"):
        shutil.copytree(here / "checkpoint-1", output / "checkpoint-1")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, save)
with (here / "ran.jsonl").open("a") as file:
    file.write(json.dumps([command, *words]) + "\\n")
if named("fail"):
    print(f"r3lite.{command} stopped: {output}/x is wrong")
    sys.exit(1)
if named("endless") or named("deaf"):
    time.sleep(60)
em = {"value": 0.25, "low": 0.125, "high": 0.5}
if command == "ppo":
    (output / "adapter").mkdir()
    write("summary.json", {})
elif "--compare" in words:
    over = {"a": 0.25, "b": 0.5, "difference": 0.25, "low": 0.125, "high": 0.5, "p": 0.25}
    write("comparison.json", {"n": 8, "a": "a", "b": "b", "metrics": {"em": over, "f1": over}})
else:
    write("scores.json", {"n": 8, "em": em, "f1": em, "by_hops": {}, "finish": {"answered": 8}})
"""


def settings(**changes) -> Settings:
    defaults = {
        "model": "tiny",
        "encoder": "hashing",
        "adapters": {0: "runs/sft"},
        "questions": ("--data", "train.jsonl"),
        "exclude": (),
        "eval_data": "dev.jsonl",
        "limit": 8,
        "preset": "hotpotqa",
        "minutes": 8.0,
    }
    return Settings(**defaults | changes)


def save_checkpoint(output: Path, step: int) -> Path:
    """A sound checkpoint with an adapter."""
    run = {"step": step, "command": "ppo", "settings": {}, "precision": {}, "data": "", "kept": {}}
    state = run | {"num_tokens": 1, "seconds": 0.5}
    tensors = {group: {"a": torch.zeros(2)} for group in checkpoint.GROUPS}

    def save_adapter(folder: Path) -> None:
        (folder / "adapter_config.json").write_text("{}")

    return checkpoint.write(output, Checkpoint(step, tensors, state), save_adapter)


# Shares of the minutes


def test_what_is_reserved_for_the_last_evaluation():
    assert reserved(480, None) == 120  # a quarter
    assert reserved(480, 40) == 84  # 1.5 * 40 and a twentieth of 480
    assert reserved(480, 400) == 288  # three fifths at most


def test_when_trainings_end():
    assert end_of_training("answer", 480, 120) == 216  # three fifths of 360
    assert end_of_training("episode", 480, 120) == 360


def run_in(folder: Path, elapsed: float = 0.0, **changes) -> Run:
    """A run of 100 seconds, of which some have gone."""
    run = Run(folder, settings(minutes=100 / 60, **changes), {})
    run.start = time.monotonic() - elapsed
    return run


def job(kind: str, label: str, start_time: float, end_time: float | None, status: int | None = 0, **fields) -> Job:
    stage = Stage(f"{kind}-{label}", kind, label, (0,), "evaluate", [])
    return Job(stage, SimpleNamespace(returncode=status), start_time, end_time, **fields)


def test_the_reserve_follows_the_longest_evaluation(tmp_path):
    run = run_in(tmp_path, elapsed=10.0)
    assert run.reserve() == 25.0
    run.jobs["a"] = job("evaluate", "cold", 0.0, None)  # 10 seconds so far: 1.5 * 10 + 5 is less than a quarter
    assert run.reserve() == 25.0
    run.start = time.monotonic() - 20.0
    assert run.reserve() == pytest.approx(35.0, abs=0.1)
    run.jobs["a"] = job("evaluate", "cold", 0.0, 12.0)
    run.jobs["b"] = job("evaluate", "answer", 10.0, 20.0)
    run.jobs["c"] = job("evaluate", "episode", 0.0, 40.0, status=1)  # failed: tells nothing
    assert run.reserve() == 23.0
    assert run.end_of(Stage("x", "train", "answer", (0,), "ppo", [])) == pytest.approx(46.2)
    assert run.end_of(Stage("x", "evaluate", "answer", (0,), "evaluate", [])) == 100


def test_whole_episodes_are_left_out_without_time(tmp_path):
    run = run_in(tmp_path, elapsed=66.0)  # trainings end after 75: 9 seconds are less than a tenth of 100
    assert run.train("episode", 0, "runs/sft") is None and not run.jobs
    assert run_in(tmp_path, elapsed=101.0).evaluate("answer", 0, "runs/sft") is None


def test_the_states_of_a_stage():
    assert job("train", "answer", 0.0, None, status=None).state == "running"
    assert job("train", "answer", 0.0, 5.0).state == "complete"
    assert job("train", "answer", 0.0, 5.0, status=143, terminated=4.0).state == "ended by the clock"
    assert job("train", "answer", 0.0, 5.0, status=-9, terminated=4.0).state == "ended by the clock"
    assert job("train", "answer", 0.0, 5.0, status=1, terminated=4.0).state == "failed"  # as its disk was full
    assert job("train", "answer", 0.0, 5.0, status=143).state == "failed"  # someone else ended it
    assert job("train", "answer", 0.0, 5.0, status=143, interrupted=True).state == "interrupted"


def test_the_budget_and_the_cores_are_shared_out(monkeypatch):
    two = settings(adapters={0: "a", 1: "b"}, vram_budget="76GiB")
    words = two.training("answer", 1, "b", Path("out"))
    assert words[words.index("--vram-budget") + 1] == "19456MiB"  # two trainings, two evaluations
    assert "--vram-budget" not in settings().training("answer", 0, "a", Path("out"))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert two.environment()["OMP_NUM_THREADS"] == "4"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert two.environment()["OMP_NUM_THREADS"] == "3"


# What stages leave


def test_the_adapter_of_a_training_is_that_of_its_newest_sound_checkpoint(tmp_path, capsys):
    assert card_state.adapter_of(tmp_path) is None
    save_checkpoint(tmp_path, 0)
    assert card_state.adapter_of(tmp_path) is None  # nothing was learned by then
    save_checkpoint(tmp_path, 5)
    newest = save_checkpoint(tmp_path, 10)
    assert card_state.adapter_of(tmp_path) == tmp_path / "checkpoint-10" / "adapter"
    (newest / "weights.safetensors").write_bytes(b"half")
    assert card_state.adapter_of(tmp_path) == tmp_path / "checkpoint-5" / "adapter"
    assert "skipping" in capsys.readouterr().err
    (tmp_path / "summary.json").write_text("{}")
    assert card_state.adapter_of(tmp_path) == tmp_path / "adapter"


def test_how_far_a_training_is(tmp_path):
    assert card_state.training_of(tmp_path) == {"rounds": 0, "samples": 0}
    rows = [{"step": 0, "eval/f1": 0.5}]  # a validation before the first round
    for step, reward in enumerate((0.0, 0.25, None, 0.5, 1.0), 1):
        rows.append({"step": step, "reward": reward, "step_time": 2.0, "kl": step / 8, "loss": None})
    write_jsonl(tmp_path / "metrics.jsonl", rows)
    # Four ends a round; those of the sixth are not learned from yet, and one is being written.
    lines = [f'{{"step": {step}, "id": "a"}}\n' for step in (1, 2, 3, 4, 5, 6) for _ in range(4)]
    (tmp_path / "episodes.jsonl").write_text("".join(lines) + '{"step')
    progress = card_state.training_of(tmp_path)
    assert (progress["rounds"], progress["samples"], progress["samples_per_hour"]) == (5, 20, 7200)
    assert progress["reward_thirds"] == [0.125, 0.75]  # two of four rewards each
    assert progress["last"] == {"step": 5, "reward": 1.0, "step_time": 2.0, "kl": 0.625}


def test_a_round_that_was_rolled_back_has_no_step_time(tmp_path):
    """The log has a round that ended with NotFinite without metrics: the state stopped with KeyError: 'step_time'."""
    rolled_back = {"step": 1, "guard/rollbacks": 1, "guard/alarm": "not_finite"}
    lines = [f'{{"step": {step}, "id": "a"}}\n' for step in (1, 2) for _ in range(4)]
    (tmp_path / "episodes.jsonl").write_text("".join(lines))
    write_jsonl(tmp_path / "metrics.jsonl", [{"step": 0, "eval/f1": 0.5}, rolled_back])
    progress = card_state.training_of(tmp_path)
    assert (progress["rounds"], progress["samples"], progress["samples_per_hour"]) == (1, 4, 0)
    write_jsonl(tmp_path / "metrics.jsonl", [rolled_back, {"step": 2, "reward": 0.5, "step_time": 2.0}])
    progress = card_state.training_of(tmp_path)
    assert (progress["rounds"], progress["samples"], progress["samples_per_hour"]) == (2, 8, 14400)
    assert progress["reward_thirds"] == [0.5, 0.5]


def test_the_last_lines_of_a_log(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("".join(f"line {i}\n\n" for i in range(30)) + f"no {tmp_path}/answer-0/x\n", encoding="utf-8")
    lines = card_state.last_lines(log, tmp_path)
    assert len(lines) == 20 and lines[0] == "line 11" and lines[-1] == "no answer-0/x"


# Stages that follow one another


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Runs the bench with the stub; returns the exit status and the names of the outputs that were begun."""
    (tmp_path / "stub.py").write_text(STUB)
    save_checkpoint(tmp_path, 1)
    stub = [sys.executable, str(tmp_path / "stub.py")]
    monkeypatch.setattr(Stage, "words", lambda stage: [*stub, stage.command, *stage.arguments])
    monkeypatch.setattr(card, "POLL", 0.01)
    handler = signal.getsignal(signal.SIGTERM)
    (tmp_path / "train.jsonl").write_text("")
    files = ["--data", str(tmp_path / "train.jsonl"), "--eval-data", "dev.jsonl"]
    places = ["--output", str(tmp_path / "run"), "--results", str(tmp_path / "results")]

    def run(*arguments, adapter="runs/sft"):
        model = ["--model", "tiny", "--encoder", "hashing", "--device", "cpu", "--dtype", "fp32"]
        status = card.main([*files, *places, *model, "--adapter", adapter, *arguments])
        return status, [Path(argument(words, "--output")).name for words in ran(tmp_path)]

    yield run
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def clock(tmp_path, monkeypatch):
    """A clock that goes on, by two seconds a look, only while all that runs waits for it."""
    seconds = 0.0

    def waits(job: Job) -> bool:
        if job.stage.name in named(tmp_path / "endless"):
            return job.terminated is None
        return job.stage.name in named(tmp_path / "deaf")

    def simulated_time(run: Run) -> float:
        nonlocal seconds
        ready = {Path(argument(words, "--output")).name for words in ran(tmp_path)}
        if run.running and all(job.stage.name in ready and waits(job) for job in run.running):
            seconds += 2.0
        return seconds

    monkeypatch.setattr(Run, "now", property(simulated_time))


def ran(folder: Path) -> list[list[str]]:
    path = folder / "ran.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def named(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def stages(folder: Path, name: str = "run/card.json") -> dict[str, dict]:
    state = json.loads((folder / name).read_text())
    rows = state["runs"][-1]["stages"] if "runs" in state else state["stages"]
    return {row["stage"]: row for row in rows}


def test_the_stages_of_a_seed_and_what_is_recorded(bench, tmp_path, capsys):
    flags = ["answer=--batch-size 32", "episode=--top-k 4", "evaluate=--max-hops 2"]
    status, outputs = bench("--flags", *flags, "--exclude", "gold.jsonl")
    assert status == 0
    assert sorted(outputs[:2]) == ["answer-0", "evaluate-cold-0"]
    words = {Path(argument(each, "--output")).name: each for each in ran(tmp_path)}
    assert set(words) == {
        *("evaluate-cold-0", "answer-0", "evaluate-answer-0", "compare-answer-0"),
        *("episode-0", "evaluate-episode-0", "compare-episode-0"),
    }
    folder = tmp_path / "run"
    answer, episode = words["answer-0"], words["episode-0"]
    assert (argument(answer, "--learn"), argument(answer, "--adapter")) == ("answer", "runs/sft")
    assert argument(episode, "--learn") == "episode"
    assert argument(episode, "--adapter") == str(folder / "answer-0/adapter")
    assert argument(answer, "--exclude") == "dev.jsonl,gold.jsonl"
    assert argument(words["evaluate-cold-0"], "--adapter") == "runs/sft"
    assert argument(words["evaluate-episode-0"], "--adapter") == str(folder / "episode-0/adapter")
    assert (argument(answer, "--batch-size"), argument(episode, "--top-k")) == ("32", "4")
    assert "--batch-size" not in episode and argument(words["evaluate-answer-0"], "--max-hops") == "2"
    compared = [str(folder / "evaluate-cold-0"), str(folder / "evaluate-episode-0")]
    assert words["compare-episode-0"][2:4] == compared
    row = stages(tmp_path)["answer-0"]
    assert (row["state"], row["rounds"], row["samples"], row["samples_per_hour"]) == ("complete", 1, 2, 3600)
    assert (row["adapter"], row["last"]["kl"], row["seeds"]) == ("answer-0/adapter", 0.5, [0])
    assert row["command"] == shlex.join(["python", "-m", "r3lite.ppo", *answer[1:]])
    assert "by_hops" not in stages(tmp_path)["evaluate-answer-0"]["scores"]
    results = json.loads((tmp_path / "results" / "card.json").read_text())["runs"]
    assert len(results) == 1 and results[0]["complete"] and results[0]["section"] == "run: tiny, seeds 0"
    assert {"commit", "threads", "precision", "processor", "date", "versions"} <= results[0].keys()
    assert str(tmp_path) not in json.dumps(results)
    stdout = capsys.readouterr().out
    assert "| answer | 0 | complete |" in stdout and "| 1 | 2 | 3600 | 0.250 to 0.250 | 0.5 |" in stdout
    assert "0.250 (0.125 to 0.500)" in stdout and "+0.250 (+0.125 to +0.500)" in stdout


def test_seeds_with_one_adapter_share_its_evaluation_and_have_a_mean(bench, tmp_path, capsys):
    status, outputs = bench("--seeds", "0", "1")
    assert status == 0 and outputs.count("evaluate-cold-0") == 1 and "evaluate-cold-1" not in outputs
    assert stages(tmp_path)["evaluate-cold-0"]["seeds"] == [0, 1]
    means = [words for words in ran(tmp_path) if argument(words, "--output").endswith("compare-answer-0-1")]
    folder = tmp_path / "run"
    sides = [[f"{folder}/evaluate-cold-0"] * 2, [f"{folder}/evaluate-answer-0", f"{folder}/evaluate-answer-1"]]
    assert [words[2:4] for words in means] == [[",".join(side) for side in sides]]
    assert "| answer | 0 / 1 | +0.250 (+0.125 to +0.500) |" in capsys.readouterr().out


def test_a_stage_that_fails_is_recorded_and_does_not_stop_the_other_seed(bench, tmp_path, capsys):
    (tmp_path / "fail").write_text("answer-0 episode-0")
    status, outputs = bench("--seeds", "0", "1", adapter="runs/a,runs/b")
    assert status == 1
    assert {"evaluate-cold-0", "evaluate-cold-1", "compare-answer-1", "compare-episode-1"} <= set(outputs)
    assert not {"evaluate-answer-0", "evaluate-episode-0", "compare-answer-0-1"} & set(outputs)
    row = stages(tmp_path)["answer-0"]
    assert (row["state"], row["status"], row["adapter"]) == ("failed", 1, None)
    assert row["last_lines"] == ["r3lite.ppo stopped: answer-0/x is wrong"]
    assert stages(tmp_path)["episode-0"]["from"] == "runs/a"  # there was nothing else to begin with
    (run,) = json.loads((tmp_path / "results" / "card.json").read_text())["runs"]
    assert (run["complete"], run["missing"]) == (False, ["answer-0", "episode-0"])
    assert "answer-0/x is wrong" in capsys.readouterr().err


def test_the_clock_ends_trainings_and_their_checkpoints_are_evaluated(bench, clock, tmp_path, monkeypatch):
    """The second one does not obey, and is killed."""
    monkeypatch.setattr(Run, "grace", 3.0)
    (tmp_path / "endless").write_text("answer-0")
    (tmp_path / "deaf").write_text("episode-0")
    assert bench()[0] == 0
    rows = stages(tmp_path)
    states = {name: (row["state"], row["status"]) for name, row in rows.items() if row["kind"] == "train"}
    assert states == {"answer-0": ("ended by the clock", 143), "episode-0": ("ended by the clock", -9)}
    assert rows["answer-0"]["adapter"] == "answer-0/checkpoint-1/adapter"
    assert rows["episode-0"]["from"] == str(tmp_path / "run" / "answer-0" / "checkpoint-1" / "adapter")
    assert rows["evaluate-episode-0"]["from"] == str(tmp_path / "run" / "episode-0" / "checkpoint-1" / "adapter")


def test_an_evaluation_that_is_not_done_in_time_is_missing(bench, clock, tmp_path):
    (tmp_path / "endless").write_text("evaluate-cold-0")
    assert bench()[0] == 1
    assert stages(tmp_path)["evaluate-cold-0"]["state"] == "ended by the clock"
    (run,) = json.loads((tmp_path / "results" / "card.json").read_text())["runs"]
    assert "evaluate-cold-0" in run["missing"] and not run["complete"]
    assert 480 < run["seconds"] < 600


def test_a_run_that_is_interrupted_saves_and_is_added(bench, tmp_path):
    (tmp_path / "endless").write_text("answer-0")

    def stop():
        while "answer-0" not in str(ran(tmp_path)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    status, _ = bench()
    thread.join()
    assert status == 143
    row = stages(tmp_path, "results/card.json")["answer-0"]
    assert (row["state"], row["adapter"]) == ("interrupted", "answer-0/checkpoint-1/adapter")
    (run,) = json.loads((tmp_path / "results" / "card.json").read_text())["runs"]
    assert (run["complete"], run["stopped"]) == (False, "interrupted")
    assert json.loads((tmp_path / "run" / "card.json").read_text())["stopped"] == "interrupted"
    assert bench()[0] == 1  # the folder has a run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--flags", "ppo=--top-k 3"], "--flags ppo: write it as KIND=FLAGS"),
        (["--flags", "answer=--batch-sise 3"], "unknown argument --batch-sise"),
        (["--flags", "episode=--temperature 0"], "--temperature is 0"),
        (["--flags", "answer=--algorithm ppo"], "ppo cannot"),
        (["--flags", "answer=--learn episode"], "changes --learn"),
        (["--flags", "episode=--exclude gold.jsonl"], "pass --exclude to the bench"),
        (["--flags", "evaluate=--top-k 0"], "top_k"),
        (["--seeds", "1", "1"], "--seeds has a seed twice"),
        (["--seeds", "0", "1", "2", "--adapter", "a,b"], "one for each of 3 seeds"),
        (["--minutes", "0"], "--minutes is 0"),
        (["--vram-budget", "much"], "--vram-budget much"),
        (["--config", "x.toml"], "not allowed with argument"),
    ],
)
def test_what_would_fail_later_is_refused_at_once(capsys, arguments, message):
    required_flags = ["--adapter", "a", "--data", "train.jsonl", "--eval-data", "dev.jsonl"]
    with pytest.raises(SystemExit) as stop:
        card_settings.parse([*required_flags, *arguments], "")
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_commands_themselves_take_what_they_are_given(cold, tmp_path, monkeypatch):
    """The tiny model. Each query gets the gold paragraphs, as contexts need them. A training's time is over as soon as
    it has a round, however fast the machine is."""

    def has_round(label: str, total: float, reserve: float) -> float:
        log = tmp_path / "run" / f"{label}-0" / "metrics.jsonl"
        return 0.0 if log.exists() and log.read_text() else total

    monkeypatch.setattr(card, "end_of_training", has_round)
    rows = [row.values for row in read_jsonl(WORLD / "train.jsonl")]
    write_jsonl(tmp_path / "train.jsonl", rows[:40])
    write_jsonl(tmp_path / "dev.jsonl", rows[36:44])
    sizes = "--algorithm dr-grpo --retriever golden --batch-size 2 --num-generations 4 --max-new-tokens 64"
    flags = [f"answer={sizes}", f"episode={sizes}", "evaluate=--retriever golden"]
    files = ["--data", str(tmp_path / "train.jsonl"), "--eval-data", str(tmp_path / "dev.jsonl"), "--limit", "6"]
    tiny = ["--preset", "tiny", "--dtype", "fp32", "--device", "cpu", "--adapter", str(cold / "sft")]
    places = ["--output", str(tmp_path / "run"), "--results", str(tmp_path / "results")]
    handler = signal.getsignal(signal.SIGTERM)
    assert card.main([*files, *tiny, "--minutes", "5", "--flags", *flags, *places]) == 0
    signal.signal(signal.SIGTERM, handler)
    (run,) = json.loads((tmp_path / "results" / "card.json").read_text())["runs"]
    assert run["complete"]
    rows = {row["stage"]: row for row in run["stages"]}
    for label in ("answer", "episode"):
        training = rows[f"{label}-0"]
        assert (training["state"], training["status"]) == ("ended by the clock", 143)
        assert training["adapter"] == f"{label}-0/checkpoint-{training['rounds']}/adapter"
        assert rows[f"evaluate-{label}-0"]["scores"]["n"] == 6
        assert "em" in rows[f"compare-{label}-0"]["metrics"]
    assert rows["episode-0"]["samples"] == 8 * rows["episode-0"]["rounds"]  # two questions, four episodes of each
    assert rows["answer-0"]["samples"] >= 4 and "groups/mixed" in rows["answer-0"]["last"]
