"""What is known of the run that made an adapter, or a model of full fine-tuning, from its run folder."""

import contextlib
from pathlib import Path
from typing import Any

from r3lite.core.config import UsageError
from r3lite.core.errors import R3LiteError
from r3lite.core.invocation import load_toml
from r3lite.training import checkpoint, metrics
from r3lite.training.run_folder import CONFIG


def sft_epochs(adapter: str | Path) -> float | None:
    """Passes over its data that SFT had taken when it wrote an adapter; None if that is not known.

    `adapter` is a run folder, a checkpoint in one, or the `adapter/` of either.
    """
    run, step = _run_and_step(adapter)
    with contextlib.suppress(R3LiteError, UsageError, OSError):
        if "sft" not in load_toml(run / CONFIG):
            return None
        records = metrics.read(run / metrics.FILE)
        epochs = [record.get("epoch") for record in records if step is None or record["step"] == step]
        if epochs and isinstance(epochs[-1], float):
            return epochs[-1]
    return None


def settings_of(adapter: str | Path) -> dict[str, Any]:
    """The settings of the run that wrote an adapter or model, as in its `config.toml`; empty if that is not known."""
    run, _ = _run_and_step(adapter)
    with contextlib.suppress(UsageError):
        for table in load_toml(run / CONFIG).values():
            if isinstance(table, dict):
                return table
    return {}


def made_by_run(model: str, adapter: str | None) -> str | None:
    """The adapter, or the model if it is the `model/` of a run of `sft --no-lora`; None: no run of r3lite is known."""
    return adapter or (model if Path(model).name == checkpoint.MODEL and settings_of(model).get("no_lora") else None)


def _run_and_step(adapter: str | Path) -> tuple[Path, int | None]:
    """The run folder that an adapter or model lies in, and the step of its checkpoint if it is one's."""
    folder = Path(adapter).resolve()
    if folder.name in (checkpoint.ADAPTER, checkpoint.MODEL):
        folder = folder.parent
    name = checkpoint.NAME.fullmatch(folder.name)
    return (folder.parent, int(name[1])) if name else (folder, None)
