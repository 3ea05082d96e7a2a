"""What happens when a rank fails, is killed, runs out of memory or is not like the others; and going on from there."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from r3lite.core import run_files
from r3lite.training import checkpoint, metrics
from tests.cold_start import assert_same_runs
from tests.ddp.conftest import ROOT, differences, environment, free_port, rl, sft

WITHIN = 30  # seconds in which all processes end
DROPOUT = ["--lora-dropout", "0.2"]


class Torchrun:
    """`torchrun --nproc-per-node 2`, or with `agent=False` the same two processes without its agent, as under srun."""

    def __init__(self, command: str, arguments: list[str], folder: Path, restarts: int = 0, agent: bool = True):
        self.log, module = folder / "output.txt", ["-m", f"r3lite.{command}", *arguments]
        with open(self.log, "w") as log:
            go = {"stdout": log, "stderr": log, "cwd": ROOT}
            if agent:
                options = ["--nproc-per-node", "2", "--max-restarts", str(restarts), "--master-port", str(free_port())]
                ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
                line = [sys.executable, "-m", "torch.distributed.run", *options, *module]
                self.started = [subprocess.Popen(line, env=os.environ | ours, **go)]
            else:
                port = free_port()
                self.started = [
                    subprocess.Popen([sys.executable, *module], env=environment(rank, 2, port), **go)
                    for rank in range(2)
                ]
        self.agent = agent

    def ranks(self) -> list[int]:
        """The process ids of the ranks that live, in their order."""
        if not self.agent:
            return [process.pid for process in self.started]
        agent = self.started[0].pid
        pid_by_rank = {}
        for child in map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split()):
            names = dict(x.split("=", 1) for x in Path(f"/proc/{child}/environ").read_text().split("\0") if "=" in x)
            pid_by_rank[names.get("RANK")] = child
        return [pid_by_rank[rank] for rank in ("0", "1")]

    def wait_for_step(self, output: Path, step: int) -> None:
        end = time.monotonic() + 120
        while not (
            (output / run_files.METRICS).exists() and len((output / run_files.METRICS).read_text().splitlines()) >= step
        ):
            assert all(process.poll() is None for process in self.started) and time.monotonic() < end, self.output()
            time.sleep(0.02)

    def end(self) -> list[int]:
        """The exit statuses, of processes that end by themselves."""
        return [process.wait(120) for process in self.started]

    def output(self) -> str:
        return self.log.read_text()


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def seconds_until_over(pids: list[int]) -> float:
    start_time = time.monotonic()
    while any(map(lives, pids)):
        time.sleep(0.02)
        assert time.monotonic() - start_time < 2 * WITHIN
    return time.monotonic() - start_time


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes in /proc")


def run_uninterrupted(processes, arguments) -> None:
    assert processes(2).run(*arguments) == [0, 0]


@needs_proc
def test_torchrun_goes_on_from_the_last_checkpoint_after_a_kill(processes, toy, tmp_path):
    """With dropout, whose masks belong to steps and ranks."""
    arguments = [*DROPOUT, "--max-steps", "30", "--save-every", "4"]
    run_uninterrupted(processes, ("sft", sft(toy, tmp_path / "whole", *arguments)))
    run = Torchrun("sft", sft(toy, tmp_path / "run", *arguments, "--resume", "auto"), tmp_path, restarts=1)
    run.wait_for_step(tmp_path / "run", 6)
    ranks = run.ranks()
    os.kill(ranks[0], signal.SIGKILL)
    assert seconds_until_over(ranks) < WITHIN
    assert run.end() == [0], run.output()
    assert f"continuing from {tmp_path / 'run' / 'checkpoint-'}" in run.output()  # and not from the beginning
    assert_same_runs(tmp_path / "run", tmp_path / "whole", 30)


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize(("command", "kills", "steps"), [("sft", 12, 200), ("ppo", 8, 60)])
def test_twenty_random_kills(processes, toy, tmp_path, command, kills, steps):
    draw = random.Random(command)
    flags = ["--max-steps", str(steps), "--save-every", "3"]
    arguments = sft(toy, tmp_path / "whole", *DROPOUT, *flags)
    if command == "ppo":
        arguments = rl(toy, tmp_path / "whole", "ppo", "--format-reward", "0.5", *flags)
    run_uninterrupted(processes, (command, arguments))
    arguments = [str(tmp_path / "run") if x == str(tmp_path / "whole") else x for x in arguments]
    run = Torchrun(command, [*arguments, "--resume", "auto"], tmp_path, restarts=kills)
    times, step = [], 0
    for kill in range(kills):
        step = max(step, 1) + draw.randrange(1, steps // kills)
        run.wait_for_step(tmp_path / "run", min(step, steps - kills + kill))
        time.sleep(draw.random() / 5)
        ranks = run.ranks()
        os.kill(draw.choice(ranks), signal.SIGKILL)
        times.append(seconds_until_over(ranks))
    assert run.end() == [0], run.output()
    print(f"{command}: {kills} kills, all processes over after {max(times):.1f} s at most")
    assert run.output().count("continuing from ") > kills / 2  # a kill may come before the first checkpoint
    assert max(times) < WITHIN
    assert_same_runs(tmp_path / "run", tmp_path / "whole", steps)


@pytest.mark.parametrize("command", ["sft", "ppo"])
@pytest.mark.parametrize(("first_size", "resumed_size"), [(2, 1), (1, 2)])
def test_a_checkpoint_resumes_at_another_world_size(processes, toy, tmp_path, command, first_size, resumed_size):
    def arguments(name, *flags):
        return sft(toy, tmp_path / name, *flags) if command == "sft" else rl(toy, tmp_path / name, "grpo", *flags)

    assert processes(1).run(command, arguments("whole"), "paid") == [0]
    assert processes(first_size).run(command, arguments("run", "--stop-after", "2"), "paid") == [0] * first_size
    resumed = processes(resumed_size)
    assert resumed.run(command, arguments("run", "--resume", "auto"), "paid") == [0] * resumed_size
    assert f"continuing from {tmp_path / 'run' / 'checkpoint-2'}\n" in resumed.stderr_of(0)
    weights, of_metrics = differences(tmp_path / "whole", tmp_path / "run")
    assert weights <= 1e-6 and of_metrics <= 1e-5


@pytest.mark.parametrize("command", ["sft", "ppo"])
def test_out_of_memory_on_one_rank_shrinks_all(processes, toy, tmp_path, command):
    def arguments(name):
        return sft(toy, tmp_path / name) if command == "sft" else rl(toy, tmp_path / name, "grpo")

    assert processes(1).run(command, arguments("whole"), "paid") == [0]
    together = processes(2)
    assert together.run(command, arguments("run"), "paid", "last_rank_runs_out_of_memory") == [0, 0]
    assert (
        together.stderr_of(0).count("warning: out of memory; the step is repeated with micro_batch_tokens 8192 ->") == 1
    )
    weights, of_metrics = differences(tmp_path / "whole", tmp_path / "run")
    assert weights <= 1e-6 and of_metrics <= 1e-5


@pytest.mark.parametrize(
    ("change", "of_last", "difference"),
    [
        ("another_version_on_the_last_rank", [], "the version of r3lite (rank 0: 0.1.0, rank 1: 9.9)"),
        ("other_data_on_the_last_rank", [], "the data (rank 0: "),
        ("another_base_on_the_last_rank", [], "the base model (rank 0: "),
        ("other_weights_on_the_last_rank", [], "the weights (rank 0: "),
        ("paid", ["--learning-rate", "0.5"], "--learning-rate (rank 0: 0.0005, rank 1: 0.5)"),
    ],
)
def test_ranks_that_differ_are_refused(processes, toy, tmp_path, change, of_last, difference):
    together = processes(2)
    assert together.run("sft", sft(toy, tmp_path / "run"), change, of_last=of_last) == [1, 1]
    for rank, place in ((0, ""), (1, "[rank 1] ")):
        stderr = together.stderr_of(rank)
        assert f"{place}r3lite.sft stopped: the processes of this run differ in {difference}" in stderr
        assert "same arguments, r3lite version and files on all machines" in stderr
    assert not (tmp_path / "run").exists()


def test_a_rank_that_fails_at_start_ends_the_others_with_its_reason(processes, toy, tmp_path):
    together = processes(2)
    start_time = time.monotonic()
    assert together.run("sft", sft(toy, tmp_path / "run"), "bad_data_on_the_last_rank") == [1, 1]
    assert time.monotonic() - start_time < WITHIN
    assert "r3lite.sft stopped: rank 1 has ended: rows.jsonl, line 3: no messages\n" in together.stderr_of(0)
    assert together.stderr_of(1) == "[rank 1] r3lite.sft stopped: rows.jsonl, line 3: no messages\n  Mend the line.\n"


def test_dropout_differs_from_rank_to_rank(processes, toy, tmp_path):
    together = processes(2)
    assert together.run("sft", sft(toy, tmp_path / "run", *DROPOUT), "masks_are_noted") == [0, 0]
    drawn = [line for rank in range(2) for line in together.stderr_of(rank).splitlines() if " draws " in line]
    assert len({line.partition(" draws ")[2] for line in drawn}) == len(drawn) == 6


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize(
    ("victim", "number", "agent", "status"),
    [
        (1, signal.SIGKILL, False, [1, -9]),
        (1, signal.SIGTERM, False, [1, 143]),
        (0, signal.SIGKILL, False, [-9, 1]),
        (None, signal.SIGTERM, True, None),
        (None, signal.SIGINT, True, None),
    ],
)
def test_all_end_and_the_step_before_is_saved(processes, toy, tmp_path, victim, number, agent, status):
    """Without torchrun's agent, too; `victim` None: the agent itself is asked to end."""
    flags = ["--max-steps", "60", "--save-every", "50"]
    run = Torchrun("sft", sft(toy, tmp_path / "run", *flags), tmp_path, agent=agent)
    run.wait_for_step(tmp_path / "run", 3)
    ranks = run.ranks()
    os.kill(run.started[0].pid if victim is None else ranks[victim], number)
    assert seconds_until_over(ranks) < WITHIN
    statuses = run.end()
    log = run.output()
    assert "Traceback (most recent call last)" not in log.partition("torch.distributed.elastic")[0] or agent
    if status:
        assert statuses == status, log
    if victim == 0:
        assert "[rank 1] r3lite.sft stopped: " in log and "has ended" in log
        return
    if number == signal.SIGKILL:
        assert "r3lite.sft stopped: another process of this run has ended" in log
        assert "without one, it was killed" in log
    elif not agent:
        assert "r3lite.sft stopped: rank 1 has ended: Terminated" in log
    (step,) = checkpoint.folders_by_step(tmp_path / "run")
    assert f"saved step {step}; continue with: " in log
    assert len(metrics.read(tmp_path / "run" / run_files.METRICS)) == step
    run_uninterrupted(processes, ("sft", sft(toy, tmp_path / "whole", *flags)))
    run_uninterrupted(processes, ("sft", sft(toy, tmp_path / "run", *flags, "--resume", "auto")))
    assert f"checkpoint-{step}\n" in processes(2).stderr_of(0)
    assert_same_runs(tmp_path / "run", tmp_path / "whole", 60)


@pytest.mark.slow
@needs_proc
def test_a_rank_that_gives_no_sign_of_life_ends_the_others(toy, tmp_path):
    """As of a machine whose plug was pulled: its connections stay open."""
    run = Torchrun("sft", sft(toy, tmp_path / "run", "--max-steps", "2000"), tmp_path, agent=False)
    run.wait_for_step(tmp_path / "run", 3)
    first, last = run.ranks()
    os.kill(last, signal.SIGSTOP)
    try:
        assert seconds_until_over([first]) < WITHIN
    finally:
        os.kill(last, signal.SIGKILL)
    run.end()
    assert "r3lite.sft stopped: rank 1 has not responded for 18 s" in run.output()


def test_other_commands_are_refused_and_a_dry_run_prints_once(processes, toy, tmp_path):
    together = processes(2)
    assert together.run("evaluate", ["--data", "x.jsonl"]) == [2, 2]
    message = "torchrun has started 2 processes, but evaluate runs in one: python -m r3lite.evaluate"
    message += ". Only sft and ppo can run in several"
    assert together.stderr_of(0) == f"r3lite.evaluate: {message}\n"
    assert together.stderr_of(1) == f"[rank 1] r3lite.evaluate: {message}\n"
    assert together.run("sft", [*sft(toy, tmp_path / "run"), "--dry-run"]) == [0, 0]
    assert "3 steps of 6 rows" in together.stderr_of(0) and together.stderr_of(1) == ""


def test_the_first_alone_writes(processes, toy, tmp_path):
    """Each rank with an output of its own, as on machines without a common disk."""
    together = processes(2)
    last_output = ["--output", str(tmp_path / "other")]
    assert together.run("ppo", rl(toy, tmp_path / "run", "grpo"), "paid", of_last=last_output) == [0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert len(json.loads((tmp_path / "run" / "summary.json").read_text())) > 5
