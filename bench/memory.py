"""Peak memory of SFT and RL's algorithms and the time of a step, beside the planner's figures and other trainers.

    python -m bench.memory                              # every case; JSON and a table under bench/results
    python -m bench.memory --only 0.5B --algorithms sft # some of them
    python -m bench.memory --dtype bf16                 # on a processor that has no bf16, too: the budgets are for it
    python -m bench.memory --row                        # one case of your card, as a table row to send us

Each case is the real command in a process of its own: two steps on full-length rows, or a round of rollouts that run
to their limit, with two optimizer steps. On the CPU the peak is that of live tensor bytes, on CUDA that of PyTorch's
allocator; beside it stands the peak of the process's resident memory (VmHWM), with Python and all libraries. Then the
command runs once more, for the seconds of its newest step or round, and of the rollout in it, beside those that are
predicted from the speeds measured just before. On one thread of a CPU they are seconds of the processor, so that other
programs on it do not count. Peers (transformers + peft, and TRL where it is installed) do steps of the same shape.
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

PROMPT = 256  # tokens of a question with its instructions, in RL


@dataclass(frozen=True)
class Case:
    size: str
    algorithm: str  # sft, one of RL, or a peer: peft (with or without activation checkpointing), trl (GRPO), trl sft
    tokens: int  # of a row; in RL sampled after a prompt of 256
    quantize: str = "none"
    budget: str = "4GiB"


CASES = [
    *(Case("0.5B", "sft", tokens, budget=b) for tokens, b in (
        (512, "1250MiB"), (1024, "1300MiB"), (2048, "1400MiB"), (4096, "1650MiB"),
        (512, "4GiB"), (1024, "4GiB"), (2048, "4GiB"), (8192, "4GiB"),
    )),
    *(Case("0.5B", "sft", tokens, "nf4", "1GiB") for tokens in (512, 2048)),
    *(Case("0.5B", "sft", 1024, "nf4", budget) for budget in ("700MiB", "4GiB")),
    *(Case("1.5B", "sft", tokens, budget="4GiB") for tokens in (512, 1024)),
    *(Case("1.5B", "sft", tokens, "nf4", b) for tokens, b in ((512, "1700MiB"), (2048, "1900MiB"), (1024, "4GiB"))),
    Case("3B", "sft", 512, budget="7GiB"),
    *(Case("3B", "sft", tokens, "nf4", b) for tokens, b in ((512, "2700MiB"), (2048, "3050MiB"))),
    *(Case("0.5B", algorithm, 512, budget="1350MiB") for algorithm in ("ppo", "grpo")),
    *(Case("0.5B", algorithm, 64, budget=b) for algorithm, b in (("ppo", "1200MiB"), ("grpo", "4GiB"))),
    Case("0.5B", "grpo", 64, "nf4", "800MiB"),
    Case("1.5B", "grpo", 512, "nf4", "4GiB"),
    Case("1.5B", "ppo", 64, "nf4", "4GiB"),
    Case("3B", "grpo", 64, "nf4", "4GiB"),
    *(Case("0.5B", name, 64, budget="1600MiB" if algorithm.has_teacher else "1200MiB")  # a teacher is loaded in turns
      for name, algorithm in ALGORITHMS.items() if name not in ("ppo", "grpo")),
]  # fmt: skip
GENERATIONS, MINI_BATCH = 8, 4  # rollouts of one prompt, and of one optimizer step and pass
WITHOUT = "peft without checkpointing"
PEERS = [
    *(Case("0.5B", "peft", tokens) for tokens in (512, 1024, 2048)),
    *(Case("0.5B", WITHOUT, tokens) for tokens in (512, 1024)),
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
    """The flags of the command that a case runs."""
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
    if case.algorithm == "dapo":  # random weights are all paid alike: no group would be left to learn from
        flags += ["--refill-limit", "0"]
    if algorithm.has_traces:
        flags += full_trace(folder, where, PROMPT + case.tokens)
    if algorithm.has_teacher:
        flags += ["--teacher", folder]
    # In the second optimizer step the moments are there.
    flags += ["--num-generations", str(GENERATIONS), "--mini-batch-size", str(MINI_BATCH)]
    return [*flags, "--max-new-tokens", str(case.tokens), "--max-length", str(PROMPT + case.tokens)]


def run_peer(case: Case, folder: str, precision: Precision) -> None:
    """Two optimizer steps by another trainer: in the second one the optimizer's moments are there."""
    torch.backends.cuda.enable_cudnn_sdp(True)  # as PyTorch has it by default; r3lite does without
    if case.algorithm == "trl":
        peers.grpo_trainer(folder, PROMPT, case.tokens, GENERATIONS, MINI_BATCH, precision, steps=2).train()
        return
    if case.algorithm == "trl sft":
        peers.sft_trainer(folder, case.tokens, precision, steps=2).train()
        return
    recomputing, keeping = peers.sft(folder, case.tokens, precision)
    for _ in range(2):
        keeping() if case.algorithm == WITHOUT else recomputing()


def run_command(case: Case, folder: str, precision: Precision, more: Sequence[str] = ()) -> tuple[Plan, dict]:
    """Runs the real command, all of whose turns are full; returns its plan and the record of its newest step.

    Random weights never succeed: of the episodes that may be replayed, every second one counts as a success.
    """
    from r3lite import ppo, sft
    from r3lite.assembly import policy, rl_guidance

    plans, announce = [], policy.announce
    successes = itertools.cycle([1.0, 0.0])
    with (
        tempfile.TemporaryDirectory() as where,
        mock.patch.object(policy, "announce", lambda plan: (plans.append(plan), announce(plan))),
        mock.patch.object(Layout, "turn_is_over", FullTurns.turn_is_over),
        mock.patch.object(rl_guidance, "outcome_share", lambda *_: next(successes)),
    ):
        main = sft.main if case.algorithm == "sft" else ppo.main
        assert main([*arguments(case, folder, Path(where), precision), *more]) == 0, "the command failed"
        return plans[0], metrics.read(Path(where) / "run" / run_files.METRICS)[-1]


def times(case: Case, folder: str, precision: Precision) -> dict[str, float]:
    """Seconds of a step or round, and of the rollout in it: measured, and predicted from the device's speeds now."""
    alone = precision.device.type == "cpu" and torch.get_num_threads() == 1
    with mock.patch.object(time, "perf_counter", time.process_time if alone else time.perf_counter):
        speeds = speed.measure(precision.device, linear, [dtype_name(precision.dtype)])
        plan, record = run_command(case, folder, precision)
    predicted = duration.predict(replace(plan.workload, speeds=speeds), plan.memory)
    pairs = {"step": (record["step_time"], predicted.seconds)}
    if "sample" in predicted.phases:
        pairs["sample"] = record["time/rollout"], predicted.phases["sample"]
    found = {}
    for what, (measured, guess) in pairs.items():
        off = 100 * (guess - measured) / measured
        found |= {f"{what}_s": round(measured, 3), f"predicted_{what}_s": round(guess, 3)}
        found[f"{what}_off_percent"] = round(off, 1)
    return found


def measure(case: Case, folder: str, precision: Precision) -> dict:
    """Runs one case in this process: peak, planned and resident MiB, seconds of it all, and those of `times`."""
    counter, start, planned = LiveTensors(), time.perf_counter(), None
    ours = case.algorithm == "sft" or case.algorithm in ALGORITHMS
    with counter if precision.device.type == "cpu" else contextlib.nullcontext():
        if ours:
            planned = run_command(case, folder, precision)[0].allocated / MIB
        else:
            run_peer(case, folder, precision)
    if precision.device.type == "cpu":
        peak, reserved = counter.peak_mib, None
    else:
        peak, reserved = torch.cuda.max_memory_allocated() / MIB, torch.cuda.max_memory_reserved() / MIB
    found = {
        "peak_mib": peak,
        "planned_mib": planned,
        "planned_off_percent": planned and 100 * (planned - peak) / peak,
        "reserved_mib": reserved,
        "resident_mib": peak_memory_mib(torch.device("cpu")),
        "seconds": time.perf_counter() - start,
    }
    found = {name: None if value is None else round(value, 1) for name, value in found.items()}
    return asdict(case) | found | (times(case, folder, precision) if ours else {})


def in_its_own_process(case: Case, flags: argparse.Namespace) -> dict:
    command = [sys.executable, "-m", "bench.memory", "--device", flags.device, "--dtype", flags.dtype]
    command += ["--models", flags.models] if flags.models else []
    done = subprocess.run([*command, "--one", json.dumps(asdict(case))], capture_output=True, text=True)
    if done.returncode:
        return {**asdict(case), "error": (done.stderr.strip().splitlines() or ["?"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def chosen(flags: argparse.Namespace) -> list[Case]:
    if flags.row:
        return [Case("0.5B", "sft", 1024)]
    cases = [c for c in CASES + PEERS if flags.only is None or c.size in flags.only]
    return [c for c in cases if flags.algorithms is None or c.algorithm in flags.algorithms]


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--only", nargs="*", help="model sizes")
    parser.add_argument("--algorithms", nargs="*", help=f'sft, those of RL, peft, "{WITHOUT}", trl, "trl sft"')
    parser.add_argument("--row", action="store_true", help="one case only, as a table row to send us")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    precision = options.precision(flags)
    if flags.one:
        case = Case(**json.loads(flags.one))
        print(json.dumps(measure(case, options.folder(flags, case.size), precision)))
        return
    found: list[dict] = []
    run = {"section": "peak memory", **records.provenance(precision), "note": "", "records": found}
    print(f"{records.conditions(run)}\n\n{records.head(COLUMNS)}")
    for case in chosen(flags):
        found.append(in_its_own_process(case, flags))
        print(records.row(found[-1], COLUMNS) + found[-1].get("error", ""), flush=True)
        if not flags.row:
            records.keep(flags.results, precision.device.type, MEMORY, run)


if __name__ == "__main__":
    main()
