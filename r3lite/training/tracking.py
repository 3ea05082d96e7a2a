"""The run's log as TensorBoard or Weights & Biases show it: the same metrics, under the names of metrics.jsonl.

metrics.jsonl stays the record of the run; these are copies of it for people who watch many runs in one place.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from r3lite.core.errors import explained
from r3lite.core.files import read_text, write_text

WANDB_ID = "wandb-id.txt"  # a resumed run goes on in the same place


class Tracker:
    """Hands each record on; what is not a number is left out."""

    def __init__(self, write: Callable[[dict[str, float], int], None], close: Callable[[], None]):
        self._write, self.close = write, close

    def write(self, record: dict) -> None:
        numbers = {k: v for k, v in record.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
        self._write({name: value for name, value in numbers.items() if name != "step"}, record["step"])


def build_tracker(settings: dict, output: Path, done: int) -> Tracker | None:
    """The tracker that --track names, for a run that stands at step `done`; None without one.

    Raises R3LiteError if the service cannot be reached or refuses.
    """
    if settings["track"] == "tensorboard":
        return _tensorboard(output, done)
    return _wandb(settings, output, done) if settings["track"] == "wandb" else None


def _tensorboard(output: Path, done: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    # What was written beyond the checkpoint that the run goes on from is hidden.
    writer = SummaryWriter(str(output / "tensorboard"), purge_step=done + 1 if done else None)

    def write(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    print(f"to see the curves: tensorboard --logdir {output / 'tensorboard'}", file=sys.stderr)
    return Tracker(write, writer.close)


def _wandb(settings: dict, output: Path, done: int) -> Tracker:
    import wandb

    path = output / WANDB_ID
    known = read_text(path, "Delete it to start a new Weights & Biases run.").strip() if path.exists() else None
    place = {"project": settings["track_project"], "name": settings["track_name"] or output.name, "dir": str(output)}
    resumed = {"id": known if done else None, "resume": "allow" if known and done else None}
    remedy = "Set WANDB_API_KEY, or WANDB_MODE=offline, or remove --track."
    with explained(wandb.errors.Error, "Weights & Biases cannot be used", remedy):
        run = wandb.init(**place, **resumed, config=settings)
    write_text(path, run.id + "\n")

    def write(numbers: dict[str, float], step: int) -> None:
        run.log(numbers, step=step)

    return Tracker(write, run.finish)
