"""Checks of whole runs of SFT on the shipped model: the losses, the memory that a run takes, and resuming."""

import contextlib
import dataclasses
import gc
import json
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from r3lite.assembly import supervised
from r3lite.checks.finding import Finding, judged, largest, skipped
from r3lite.checks.sample import CPU, questions, sentences, whole_card
from r3lite.core import command, run_files
from r3lite.core.exit_status import check_status
from r3lite.core.files import write_jsonl
from r3lite.core.grant import Memory
from r3lite.core.invocation import resolve
from r3lite.datasets.sources import read_data
from r3lite.devices.live_tensors import MIB, LiveTensors
from r3lite.devices.precision import Precision, dtype_name
from r3lite.devices.ranks import ALONE
from r3lite.memory.cuda_parts import THREADS
from r3lite.memory.plan import Plan, enforce
from r3lite.models.weights import resolve_folder
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.settings import SftConfig
from r3lite.training import metrics

STEPS = 4  # steps of each run of the check `training`
# The largest difference of a step's loss from the CPU's in fp32. Measured on a CPU: 0.002 in fp16, 0.026 in bf16.
LOSS_BOUNDS = {torch.float32: 0.005, torch.float16: 0.02, torch.bfloat16: 0.1}
# The largest error of a planned peak, as a share of it. It is larger than for other runs, because what the planner's
# formulas leave out is a larger share of so small a run.
PLAN_BOUND = 0.08
# Tokens of each row in the check `memory`: 3,500 on a card (True), 1,500 elsewhere (False).
TOKENS = {False: 1500, True: 3500}
SPARE = 64 * MIB  # added to the budget on a card, whose allocator takes pieces that are large for so small a run


def sft_flags(folder: Path, precision: Precision, *further: str) -> list[str]:
    """Returns flags of `sft` for the shipped model and the rows of a `training_folder`, followed by `further`."""
    flags = ["--preset", "tiny"]
    flags += ["--device", precision.device.type]
    flags += ["--dtype", dtype_name(precision.dtype)]
    flags += ["--quantize", "none"]
    flags += ["--data", str(folder / "rows.jsonl")]
    flags += ["--validation-rows", "0", "--warmup", "0", "--save-every", "0"]
    return [*flags, *further]


@contextlib.contextmanager
def training_folder(precision: Precision) -> Iterator[Path]:
    """Yields a temporary folder with 16 short rows to train on, in rows.jsonl; lifts limits on the card at the end."""
    rows = [conversation(q.text, f"The answer is {q.answers[0]}.") for q in questions(16)]
    with tempfile.TemporaryDirectory(prefix="r3lite-doctor-") as name, whole_card(precision.device):
        write_jsonl(Path(name) / "rows.jsonl", rows)
        yield Path(name)


def train(output: Path, flags: list[str]) -> list[dict]:
    """Runs SFT in this process and returns its metrics, a record per step.

    If the run fails, raises R3LiteError. The error of the run itself is in the output of the check.
    """
    sft = command.Command("sft", SftConfig(), partial(supervised.train, ranks=ALONE))
    check_status(sft([*flags, "--output", str(output)]), "the run failed")
    return metrics.read(output / run_files.METRICS)


def training(precision: Precision) -> Finding:
    """Compares a few steps of SFT in a dtype on the device with the same steps on the CPU in fp32."""
    if precision.device.type == "cpu" and precision.dtype == torch.float32:
        return skipped("the CPU in fp32 is the reference")
    steps = ["--max-steps", str(STEPS), "--batch-size", "4", "--learning-rate", "2e-3"]
    with training_folder(precision) as folder:
        exact = Precision(torch.float32, CPU)
        reference = train(folder / "cpu", sft_flags(folder, exact, *steps))
        records = train(folder / "device", sft_flags(folder, precision, *steps))
    losses = _losses(records)
    expected = _losses(reference)
    difference = largest(abs(a - b) for a, b in zip(losses, expected, strict=True))
    skips = records[-1].get("skipped_steps", 0)
    bound = LOSS_BOUNDS[precision.dtype]
    losses_in_words = ", ".join(f"{loss:.3f}" for loss in losses)
    message = f"losses {losses_in_words}, off by {difference:.2g}, {bound:g} allowed"
    if skips:
        message += f"; {skips} steps skipped"
    return judged(difference <= bound, message, loss_off=difference, skipped_steps=skips)


def training_in_fp16(precision: Precision) -> Finding:
    """Runs the check `training` in fp16, whatever dtype doctor checks: cards before Ampere train in fp16."""
    if precision.dtype == torch.float16:
        return skipped("same as the check above")
    return training(Precision(torch.float16, precision.device))


def memory(precision: Precision) -> Finding:
    """Compares the peak memory of a short run with its plan. The budget forces the plan to recompute some layers.

    On a card the budget is enforced.
    """
    on_card = precision.device.type == "cuda"
    if precision.device.type == "cpu" and precision.dtype == torch.float16:
        precision = Precision(torch.bfloat16, CPU)  # the same sizes; a CPU's products in fp16 take minutes
    with training_folder(precision) as folder:
        long_rows = [long_row(start, TOKENS[on_card]) for start in (0, 400)]
        write_jsonl(folder / "rows.jsonl", long_rows)
        # "none" does not set --recompute-layers, which a preset may have set: the plan chooses it.
        flags = sft_flags(folder, precision, "--batch-size", "1", "--max-length", "4096", "--recompute-layers", "none")
        unlimited, _ = _run(flags, steps=0)
        budget = unlimited.peak - 0.3 * unlimited.allocated  # too little to keep all activations
        if on_card:
            budget += SPARE
        # CUDA's allocator reports its peak. On a CPU, and on the card that tests simulate, LiveTensors counts.
        allocator_counts = on_card and torch.cuda.max_memory_allocated() > 0
        counter = LiveTensors()
        occupied = _freed_card() if on_card else 0
        counting = contextlib.nullcontext() if allocator_counts else counter
        with counting:
            plan, memory_at_end = _run([*flags, "--vram-budget", f"{int(budget / MIB)}MiB"], occupied=occupied)
    planned = plan.allocated
    peak = counter.peak
    measured = {"budget_mib": plan.budget / MIB}
    if allocator_counts:
        peak = torch.cuda.max_memory_allocated() - occupied
        measured["fragmentation"] = torch.cuda.max_memory_reserved() / torch.cuda.max_memory_allocated() - 1
    elif on_card:  # LiveTensors does not count cuBLAS workspaces
        planned -= THREADS * plan.workload.beside.workspace
    if memory_at_end != plan.memory:  # memory ran out, and the run made its passes smaller
        message = f"out of memory within the planned budget of {plan.budget / MIB:,.0f} MiB"
        return judged(False, message, "Close other programs that use the GPU; else report it with doctor.json.")
    off = peak / planned - 1
    measured |= {"planned_mib": planned / MIB, "measured_mib": peak / MIB, "off": off}
    message = f"{peak / MIB:,.0f} MiB of tensors, {planned / MIB:,.0f} planned ({off:+.1%}, {PLAN_BOUND:.0%} allowed)"
    message += f", {plan.memory.recompute_layers} layers recomputed for a budget of {plan.budget / MIB:,.0f}"
    remedy = "Plans are off by as much here: pass a lower --vram-budget, and report it with doctor.json."
    return judged(abs(off) <= PLAN_BOUND, message, remedy, **measured)


def _freed_card() -> int:
    """Frees what earlier checks left on the card, such as workspaces of cuBLAS, and returns the bytes that stay.

    Also resets the allocator's peak.
    """
    gc.collect()
    if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _run(flags: list[str], steps: int = 2, occupied: int = 0) -> tuple[Plan, Memory]:
    """Takes the first steps of an SFT and saves nothing. Returns its plan, and its memory figures after the steps.

    The figures are those of the plan, unless memory ran out. `occupied` bytes of the card are in use already; the limit
    that is enforced is higher by them, and the plan does not count them.
    """
    config = resolve("sft", SftConfig(), flags)
    trainer = supervised.build_trainer(config, *read_data(config))
    plan = trainer.policy.plan
    limit = dataclasses.replace(plan, budget=plan.budget + occupied)
    enforce(limit, trainer.policy.precision.device)
    for number in range(1, steps + 1):
        trainer.step(number)
    return plan, trainer.policy.grant.memory


def conversation(question: str, answer: str) -> dict:
    """Returns a row to train on."""
    user = {"role": "user", "content": question}
    assistant = {"role": "assistant", "content": answer}
    return {"messages": [user, assistant]}


def long_row(start: int, tokens: int) -> dict:
    """Returns a row whose answer is `tokens` tokens of the text of `sentences`, from the token `start` on."""
    all_tokens = list(chain.from_iterable(sentences(30)))
    answer_tokens = all_tokens[start : start + tokens]
    assert len(answer_tokens) == tokens
    text = Tokenizer.load(resolve_folder("tiny")).decode(answer_tokens)
    return conversation("What is in the encyclopedia?", text)


def resume(precision: Precision) -> Finding:
    """Checks that a run that is stopped after two of four steps and resumed equals an uninterrupted one, to the bit.

    If they differ, the uninterrupted run is repeated. If the repetition differs as well, by at least a tenth of the
    resumed run's difference, the device does not repeat runs exactly, and the check does not apply.
    """
    with training_folder(precision) as folder:
        flags = sft_flags(folder, precision, "--max-steps", "4", "--batch-size", "4", "--lora-dropout", "0.1")
        unbroken = train(folder / "whole", flags)
        train(folder / "parted", [*flags, "--stop-after", "2"])
        resumed = train(folder / "parted", [*flags, "--resume", "auto"])
        if _same_tensors(folder / "whole", folder / "parted") and _repeatable(unbroken) == _repeatable(resumed):
            return judged(True, "weights, optimizer, random streams and metrics are equal to the bit")
        repeated = train(folder / "again", flags)
        is_exact_device = _same_tensors(folder / "whole", folder / "again")
        is_exact_device = is_exact_device and _repeatable(unbroken) == _repeatable(repeated)
    off = _largest_difference(unbroken, resumed)
    noise = _largest_difference(unbroken, repeated)
    if not is_exact_device and off <= 10 * noise:
        differ = f"losses of two equal runs differ by {noise:.2g}, of a resumed run by {off:.2g}"
        return skipped(f"this device does not repeat runs exactly: {differ}")
    return judged(False, f"losses of the resumed run differ by {off:.2g}, of equal runs by {noise:.2g}", loss_off=off)


def _largest_difference(records_a: list[dict], records_b: list[dict]) -> float:
    """Returns the largest difference between the losses of two runs."""
    return largest(abs(a - b) for a, b in zip(_losses(records_a), _losses(records_b)))


def _losses(records: list[dict]) -> list[float]:
    """Returns the loss of each step. A loss of nan or infinity, which the metrics store as null, becomes nan."""
    return [float("nan") if record["loss"] is None else record["loss"] for record in records]


def _same_tensors(run_a: Path, run_b: Path) -> bool:
    """Returns whether the last checkpoints of two runs, at step 4, hold the same tensors, to the bit."""
    for name in ("weights", "optimizer", "random"):
        file = f"checkpoint-4/{name}.safetensors"
        if (run_a / file).read_bytes() != (run_b / file).read_bytes():
            return False
    return True


def _repeatable(records: list[dict]) -> str:
    """Returns, as JSON, the metrics of a run that are equal when the run is repeated: not times, for example."""
    return json.dumps([metrics.repeatable(record) for record in records])
