"""Facts about the run that wrote an adapter, or a model of full fine-tuning, from its run folder."""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from r3lite.core import run_files
from r3lite.core.answer_match import question_key
from r3lite.core.config import UsageError
from r3lite.core.errors import R3LiteError
from r3lite.core.files import load_toml, read_record
from r3lite.core.inherited import MODEL, run_and_step, settings_of
from r3lite.training import metrics

QUESTIONS_FILE = "questions.json"  # in the folder of a run of SFT: hashes of the questions of its demonstrations
# Optimizer steps of SFT. The shortest SFT whose effect was measured took twice as many: after it, SmolLM2-135M followed
# the format in 85 to 90 % of the steps of its episodes (bench/results/own-documents.json).
FEWEST_STEPS = 30
DIGITS = 16  # hexadecimal digits of a hash: a million questions all have different ones, but for a probability of 3e-8


@dataclass(frozen=True)
class SftLength:
    """Says how long SFT was: its optimizer steps, and the passes over its data."""

    steps: int
    epochs: float

    @property
    def is_short(self) -> bool:
        """True if the model has hardly learned the step format."""
        return self.steps < FEWEST_STEPS


def sft_length(adapter: str | Path) -> SftLength | None:
    """Returns how long SFT had been when it wrote an adapter; None if that is not known.

    The runs of SFT that trained the adapters it started from count, too, back to the first that is not known.
    `adapter` is a run folder, a checkpoint in one, or the `adapter/` of either.
    """
    lengths = []
    for run, step in _lineage(adapter):
        length = _length_of_run(run, step)
        if length is None:
            break
        lengths.append(length)
    if not lengths:
        return None
    return SftLength(steps=sum(length.steps for length in lengths), epochs=sum(length.epochs for length in lengths))


def _length_of_run(run: Path, step: int | None) -> SftLength | None:
    """Returns how long a run of SFT was until a step, or in all; None if that is not known."""
    with contextlib.suppress(R3LiteError, UsageError, OSError):
        if "sft" not in load_toml(run / run_files.CONFIG):
            return None
        records = metrics.read(run / run_files.METRICS)
        if step is not None:
            records = [record for record in records if record["step"] == step]
        if records and isinstance(records[-1].get("epoch"), float):
            return SftLength(steps=records[-1]["step"], epochs=records[-1]["epoch"])
    return None


def question_hash(text: str) -> str:
    """Returns a hash by which a question is recognized; it is equal if only case or punctuation differ."""
    digest = hashlib.sha256(question_key(text).encode()).hexdigest()
    return digest[:DIGITS]


def demonstrated(adapter: str | Path) -> set[str]:
    """Returns the hashes of the questions whose demonstrations an adapter has learned.

    These are the questions of its own run of SFT, and of the runs that trained the adapters it started from. Runs that
    are not known are left out.
    """
    hashes: set[str] = set()
    for run, _ in _lineage(adapter):
        with contextlib.suppress(R3LiteError):
            hashes.update(read_record(run / QUESTIONS_FILE, "").texts("hashes"))
    return hashes


def _lineage(adapter: str | Path) -> Iterator[tuple[Path, int | None]]:
    """Yields the run folder of an adapter or model, then those of the results that it and the others started from.

    With each, the step of the checkpoint that was taken; None: the run's last step.
    """
    visited: set[Path] = set()
    run, step = run_and_step(adapter)
    while run not in visited:
        visited.add(run)
        yield run, step
        settings = settings_of(adapter)
        earlier_adapter = settings.get("adapter")
        if not isinstance(earlier_adapter, str) or earlier_adapter == "none":
            earlier_adapter = None
        earlier = result_of_run(str(settings.get("model")), earlier_adapter)
        if earlier is None:
            return
        adapter = earlier
        run, step = run_and_step(adapter)


def result_of_run(model: str, adapter: str | None) -> str | None:
    """Returns the adapter if there is one, else the model if it is the `model/` of a run of `sft --no-lora`.

    None if there is neither.
    """
    if adapter:
        return adapter
    if Path(model).name == MODEL and settings_of(model).get("no_lora"):
        return model
    return None
