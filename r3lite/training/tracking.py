"""The run's log as TensorBoard or Weights & Biases show it: the same metrics, under the names of metrics.jsonl.

metrics.jsonl stays the record of the run; these are copies of it for people who watch many runs in one place.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from r3lite.core.errors import explained
from r3lite.core.files import read_text, write_text
from r3lite.settings import TrackSettings

WANDB_ID = "wandb-id.txt"  # a resumed run goes on in the same place


class Tracker:
    """Hands each record on; what is not a number is left out."""

    def __init__(
        self,
        write: Callable[[dict[str, float], int], None],
        close: Callable[[], None],
    ):
        """`write` is called with the numbers of a step and the step."""
        self._write = write
        self.close = close

    def write(self, record: dict) -> None:
        """Writes the numbers of a step's record."""
        numbers = {}
        for name, value in record.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_number and name != "step":
                numbers[name] = value
        self._write(numbers, record["step"])


def build_tracker(
    tracking: TrackSettings,
    settings: dict[str, Any],
    output: Path,
    done: int,
) -> Tracker:
    """Returns the tracker that --track names, for a run that stands at step `done`. --track must not be none.

    `settings` are all settings of the run: Weights & Biases shows them. Raises R3LiteError if Weights & Biases cannot
    be reached or refuses.
    """
    if tracking.track == "tensorboard":
        return _tensorboard(output, done)
    return _wandb(tracking, settings, output=output, done=done)


def _tensorboard(output: Path, done: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    # Numbers beyond the checkpoint that the run goes on from are hidden.
    hidden_from = done + 1 if done else None
    writer = SummaryWriter(str(output / "tensorboard"), purge_step=hidden_from)

    def write(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    print(f"to see the curves: tensorboard --logdir {output / 'tensorboard'}", file=sys.stderr)
    return Tracker(write, writer.close)


def _wandb(
    tracking: TrackSettings,
    settings: dict[str, Any],
    output: Path,
    done: int,
) -> Tracker:
    import wandb

    path = output / WANDB_ID
    run_id = None  # of the Weights & Biases run that is continued; None: a new one
    if path.exists():
        saved_id = read_text(path, "Delete it to start a new Weights & Biases run.").strip()
        if done:
            run_id = saved_id
    remedy = "Set WANDB_API_KEY, or WANDB_MODE=offline, or remove --track."
    with explained(wandb.errors.Error, "Weights & Biases cannot be used", remedy, code="wandb-unusable"):
        run = wandb.init(
            project=tracking.track_project,
            name=tracking.track_name or output.name,
            dir=str(output),
            id=run_id,
            resume="allow" if run_id else None,
            config=settings,
        )
    write_text(path, run.id + "\n")

    def write(numbers: dict[str, float], step: int) -> None:
        run.log(numbers, step=step)

    return Tracker(write, run.finish)
