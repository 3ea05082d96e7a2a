"""Facts about the run that wrote an adapter, or a model of full fine-tuning, from its run folder."""

import contextlib
import hashlib
from pathlib import Path

from r3lite.core.answer_match import question_key
from r3lite.core.config import UsageError
from r3lite.core.errors import R3LiteError
from r3lite.core.files import load_toml, read_record
from r3lite.core.inherited import CONFIG, MODEL, run_and_step, settings_of
from r3lite.training import metrics

QUESTIONS = "questions.json"  # in the folder of a run of SFT: hashes of the questions of its demonstrations
DIGITS = 16  # of a hash, hexadecimal: of a million questions two are alike with a probability of 3e-8


def sft_epochs(adapter: str | Path) -> float | None:
    """Returns the passes over its data that SFT had taken when it wrote an adapter; None if that is not known.

    `adapter` is a run folder, a checkpoint in one, or the `adapter/` of either.
    """
    run, step = run_and_step(adapter)
    with contextlib.suppress(R3LiteError, UsageError, OSError):
        if "sft" not in load_toml(run / CONFIG):
            return None
        records = metrics.read(run / metrics.FILE)
        if step is not None:
            records = [record for record in records if record["step"] == step]
        epochs = [record.get("epoch") for record in records]
        if epochs and isinstance(epochs[-1], float):
            return epochs[-1]
    return None


def question_hash(text: str) -> str:
    """Returns a hash by which a question is recognized; it is equal if only case or punctuation differ."""
    digest = hashlib.sha256(question_key(text).encode()).hexdigest()
    return digest[:DIGITS]


def demonstrated(adapter: str | Path) -> set[str]:
    """Returns the hashes of the questions whose demonstrations an adapter has learned.

    These are the questions of its run of SFT and of those of the adapters that it was trained on from; runs that are
    not known are left out.
    """
    hashes: set[str] = set()
    visited: set[Path] = set()
    run, _ = run_and_step(adapter)
    while run not in visited:
        visited.add(run)
        with contextlib.suppress(R3LiteError):
            hashes.update(read_record(run / QUESTIONS, "").texts("hashes"))
        earlier = settings_of(adapter).get("adapter")
        if isinstance(earlier, str) and earlier != "none":
            adapter = earlier
            run, _ = run_and_step(adapter)
    return hashes


def result_of_run(model: str, adapter: str | None) -> str | None:
    """Returns the adapter, or the model if it is the `model/` of a run of `sft --no-lora`.

    None: no run of r3lite is known that made them.
    """
    if adapter:
        return adapter
    if Path(model).name == MODEL and settings_of(model).get("no_lora"):
        return model
    return None
