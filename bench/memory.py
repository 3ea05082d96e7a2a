"""Measures peak memory and step time of SFT and of each RL algorithm, beside the plan's figures and other trainers.

    python -m bench.memory                              # every case; JSON and a table under bench/results
    python -m bench.memory --only 0.5B --algorithms sft # some of them
    python -m bench.memory --dtype bf16                 # also on a processor without bf16: the budgets are for bf16
    python -m bench.memory --row                        # one case of your card, as a table row to send us

Each case runs the real command in a process of its own. SFT takes two steps on full-length rows. RL takes a round of
rollouts of full length, with two optimizer steps; algorithms with replay take two such rounds. The peak is that of live
tensors on a CPU, and that of PyTorch's allocator on CUDA. The peak of the process's resident memory (VmHWM), with
Python and all libraries, is also recorded.

Then the command runs once more for the times: of its last step or round, and of the rollout in it. The predicted times
use device speeds that are measured just before. With one CPU thread, the times are CPU time instead of wall-clock
time, so that other programs do not count. Peers (transformers + peft, and TRL if it is installed) take steps of the
same shape.
"""

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import torch

from bench import options, peers, records
from bench.full_length import FullTurns, full_question, full_rows, full_trace
from r3lite.core import run_files
from r3lite.devices import speed
from r3lite.devices.live_tensors import MIB, LiveTensors
from r3lite.devices.precision import Precision, dtype_name
from r3lite.memory import duration
from r3lite.memory.plan import Plan
from r3lite.models.linear import linear
from r3lite.protocols.layout import Layout
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.training import metrics
from r3lite.training.metrics import peak_memory_mib

PROMPT = 256  # tokens of the prompt in RL: a question with its instructions


@dataclass(frozen=True)
class Case:
    """One run whose memory and time are measured."""

    size: str  # a model's name in `options.HUB`
    # sft, an algorithm of RL, or a peer: peft, PEFT_STORING (without activation checkpointing), trl (GRPO), trl sft
    algorithm: str
    tokens: int  # of a row; in RL the tokens that are sampled after a prompt of PROMPT tokens
    quantize: str = "none"
    budget: str = "4GiB"


CASES = [
    *(Case("0.5B", "sft", tokens, budget=b) for tokens, b in (
        (512, "1250MiB"), (1024, "1300MiB"), (2048, "1400MiB"), (4096, "1650MiB"),
        (512, "4GiB"), (1024, "4GiB"), (2048, "4GiB"), (8192, "4GiB"),
    )),
    *(Case("0.5B", "sft", tokens, quantize="nf4", budget="1GiB") for tokens in (512, 2048)),
    *(Case("0.5B", "sft", 1024, quantize="nf4", budget=budget) for budget in ("700MiB", "4GiB")),
    *(Case("1.5B", "sft", tokens, budget="4GiB") for tokens in (512, 1024)),
    *(Case("1.5B", "sft", tokens, quantize="nf4", budget=b) for tokens, b in (
        (512, "1700MiB"), (2048, "1900MiB"), (1024, "4GiB"),
    )),
    Case("3B", "sft", 512, budget="7GiB"),
    *(Case("3B", "sft", tokens, quantize="nf4", budget=b) for tokens, b in ((512, "2700MiB"), (2048, "3050MiB"))),
    *(Case("0.5B", algorithm, 512, budget="1350MiB") for algorithm in ("ppo", "grpo")),
    *(Case("0.5B", algorithm, 64, budget=b) for algorithm, b in (("ppo", "1200MiB"), ("grpo", "4GiB"))),
    Case("0.5B", "grpo", 64, quantize="nf4", budget="800MiB"),
    Case("1.5B", "grpo", 512, quantize="nf4", budget="4GiB"),
    Case("1.5B", "ppo", 64, quantize="nf4", budget="4GiB"),
    Case("3B", "grpo", 64, quantize="nf4", budget="4GiB"),
    *(Case(options.GEMMA, "sft", tokens, budget=b) for tokens, b in (
        (1024, "4GiB"), (2048, "1100MiB"), (2048, "4GiB"),
    )),
    *(Case(options.GEMMA, algorithm, 64, budget="4GiB") for algorithm in ("grpo", "ppo")),
    # A case with a teacher needs more: the teacher is loaded beside the policy.
    *(Case("0.5B", name, 64, budget="1600MiB" if algorithm.has_teacher else "1200MiB")
      for name, algorithm in ALGORITHMS.items()
      if name not in ("ppo", "grpo") and not algorithm.learns_right_answers),  # which needs documents
]  # fmt: skip
GENERATIONS = 8  # rollouts of one prompt
MINI_BATCH = 4  # rollouts of an optimizer step
STEPS = 2  # optimizer steps of a peer: in the second one the optimizer has its moments
PEFT_STORING = "peft without checkpointing"
PEERS = [
    *(Case("0.5B", "peft", tokens) for tokens in (512, 1024, 2048)),
    *(Case("0.5B", PEFT_STORING, tokens) for tokens in (512, 1024)),
    *(Case("0.5B", "trl sft", tokens) for tokens in (512, 1024, 2048)),
    Case("0.5B", "trl", 64),
]
MEMORY = records.Bench(
    "memory",
    "Peak memory",
    keys=("size", "algorithm", "tokens", "quantize", "budget"),
    figures=(
        *("peak_mib", "planned_mib", "planned_off_percent", "reserved_mib", "resident_mib"),
        *("step_s", "predicted_step_s", "step_off_percent", "sample_s", "predicted_sample_s", "sample_off_percent"),
    ),
)
COLUMNS = [*MEMORY.keys, *MEMORY.figures, "seconds"]


def arguments(case: Case, folder: str, where: Path, precision: Precision) -> list[str]:
    """Returns the flags of the r3lite command that a case runs; writes their files into the folder `where`."""
    flags = ["--model", folder, "--device", precision.device.type, "--dtype", dtype_name(precision.dtype)]
    flags += ["--batch-size", "1", "--output", str(where / "run"), "--vram-budget", case.budget]
    flags += ["--quantize", case.quantize, "--nf4-cache", "none"]
    if case.algorithm == "sft":
        full_rows(folder, case.tokens, where / "data.jsonl")
        flags += ["--data", str(where / "data.jsonl"), "--max-length", str(case.tokens)]
        return [*flags, "--max-steps", "2", "--gradient-accumulation", "1", "--validation-rows", "0"]
    algorithm = ALGORITHMS[case.algorithm]
    flags += [*full_question(folder, where, PROMPT), "--algorithm", case.algorithm]
    flags += ["--max-steps", "2" if algorithm.has_replay else "1"]  # the first round has nothing to replay
    if case.algorithm == "dapo":  # random weights get equal rewards, and dapo replaces groups whose rewards are equal
        flags += ["--refill-limit", "0"]
    if algorithm.has_traces:
        flags += full_trace(folder, where, PROMPT + case.tokens)
    if algorithm.has_teacher:
        flags += ["--teacher", folder]
    # A round has two optimizer steps: in the second one the optimizer has its moments.
    flags += ["--num-generations", str(GENERATIONS), "--mini-batch-size", str(MINI_BATCH)]
    return [*flags, "--max-new-tokens", str(case.tokens), "--max-length", str(PROMPT + case.tokens)]


def run_peer(case: Case, folder: str, precision: Precision) -> None:
    """Takes STEPS optimizer steps with another trainer."""
    torch.backends.cuda.enable_cudnn_sdp(True)  # PyTorch's default; r3lite turns cuDNN attention off
    if case.algorithm == "trl":
        peers.grpo_trainer(folder, PROMPT, case.tokens, GENERATIONS, MINI_BATCH, precision, steps=STEPS).train()
        return
    if case.algorithm == "trl sft":
        peers.sft_trainer(folder, case.tokens, precision, steps=STEPS).train()
        return
    step_with_checkpointing, step_without_checkpointing = peers.sft(folder, case.tokens, precision)
    step = step_without_checkpointing if case.algorithm == PEFT_STORING else step_with_checkpointing
    for _ in range(STEPS):
        step()


def run_command(case: Case, folder: str, precision: Precision, extra_flags: Sequence[str] = ()) -> tuple[Plan, dict]:
    """Runs the r3lite command of a case; returns its plan and the record of its last step.

    Every turn has as many tokens as it may have. Random weights never answer right, so every second episode counts as a
    success where only successes are replayed.
    """
    from r3lite import ppo, sft
    from r3lite.assembly import policy, rl_guidance

    plans: list[Plan] = []
    announce = policy.announce
    successes = itertools.cycle([1.0, 0.0])
    with (
        tempfile.TemporaryDirectory() as temporary,
        mock.patch.object(policy, "announce", lambda plan: (plans.append(plan), announce(plan))),
        mock.patch.object(Layout, "turn_is_over", FullTurns.turn_is_over),
        mock.patch.object(rl_guidance, "outcome_share", lambda *_: next(successes)),
    ):
        main = sft.main if case.algorithm == "sft" else ppo.main
        flags = arguments(case, folder, where=Path(temporary), precision=precision)
        assert main([*flags, *extra_flags]) == 0, "the command failed"
        return plans[0], metrics.read(Path(temporary) / "run" / run_files.METRICS)[-1]


def times(case: Case, folder: str, precision: Precision) -> dict[str, float]:
    """Returns the measured and the predicted seconds of a step or round, and of the rollout in a round.

    The prediction uses the speeds of the device, which are measured just before. With one CPU thread, the times are CPU
    time instead of wall-clock time, so that other programs do not count.
    """
    single_thread = precision.device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if single_thread else time.perf_counter
    with mock.patch.object(time, "perf_counter", clock):
        speeds = speed.measure(precision.device, linear, [dtype_name(precision.dtype)])
        plan, record = run_command(case, folder, precision)
    predicted = duration.predict(replace(plan.workload, speeds=speeds), plan.memory)
    pairs = {"step": (record["step_time"], predicted.seconds)}
    if "sample" in predicted.phases:
        pairs["sample"] = (record["time/rollout"], predicted.phases["sample"])
    figures = {}
    for phase, (measured, predicted_seconds) in pairs.items():
        figures[f"{phase}_s"] = round(measured, 3)
        figures[f"predicted_{phase}_s"] = round(predicted_seconds, 3)
        figures[f"{phase}_off_percent"] = round(100 * (predicted_seconds - measured) / measured, 1)
    return figures


def measure(case: Case, folder: str, precision: Precision) -> dict:
    """Runs one case in this process; returns its record.

    It has the peak, planned, reserved and resident memory in MiB, the seconds of the first run, and the figures of
    `times` if the case is one of r3lite.
    """
    counter = LiveTensors()
    start = time.perf_counter()
    planned = None
    ours = case.algorithm == "sft" or case.algorithm in ALGORITHMS
    with counter if precision.device.type == "cpu" else contextlib.nullcontext():
        if ours:
            planned = run_command(case, folder, precision)[0].allocated / MIB
        else:
            run_peer(case, folder, precision)
    if precision.device.type == "cpu":
        peak = counter.peak_mib
        reserved = None
    else:
        peak = torch.cuda.max_memory_allocated() / MIB
        reserved = torch.cuda.max_memory_reserved() / MIB
    figures = {
        "peak_mib": peak,
        "planned_mib": planned,
        "planned_off_percent": planned and 100 * (planned - peak) / peak,
        "reserved_mib": reserved,
        "resident_mib": peak_memory_mib(torch.device("cpu")),
        "seconds": time.perf_counter() - start,
    }
    rounded = {name: None if value is None else round(value, 1) for name, value in figures.items()}
    return asdict(case) | rounded | (times(case, folder, precision) if ours else {})


def in_its_own_process(case: Case, flags: argparse.Namespace) -> dict:
    """Measures one case in a new process; returns its record, or one with the last line of an error."""
    command = [sys.executable, "-m", "bench.memory", "--device", flags.device, "--dtype", flags.dtype]
    command += ["--models", flags.models] if flags.models else []
    finished = subprocess.run([*command, "--one", json.dumps(asdict(case))], capture_output=True, text=True)
    if finished.returncode:
        return {**asdict(case), "error": (finished.stderr.strip().splitlines() or ["?"])[-1]}
    return json.loads(finished.stdout.strip().splitlines()[-1])


def selected_cases(flags: argparse.Namespace) -> list[Case]:
    """Returns the cases that the flags select."""
    if flags.row:
        return [Case("0.5B", "sft", 1024)]
    cases = [case for case in CASES + PEERS if flags.only is None or case.size in flags.only]
    return [case for case in cases if flags.algorithms is None or case.algorithm in flags.algorithms]


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--only", nargs="*", help="model sizes")
    parser.add_argument("--algorithms", nargs="*", help=f'sft, those of RL, peft, "{PEFT_STORING}", trl, "trl sft"')
    parser.add_argument("--row", action="store_true", help="one case only, as a table row to send us")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    precision = options.precision(flags)
    if flags.one:
        case = Case(**json.loads(flags.one))
        print(json.dumps(measure(case, options.folder(flags, case.size), precision)))
        return
    case_records: list[dict] = []
    run = {"section": "peak memory", **records.provenance(precision), "note": "", "records": case_records}
    print(f"{records.conditions(run)}\n\n{records.head(COLUMNS)}")
    for case in selected_cases(flags):
        record = in_its_own_process(case, flags)
        case_records.append(record)
        print(records.row(record, COLUMNS) + record.get("error", ""), flush=True)
        if not flags.row:
            records.keep(flags.results, precision.device.type, MEMORY, run)


if __name__ == "__main__":
    main()
