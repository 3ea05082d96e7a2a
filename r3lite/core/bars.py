"""How progress is shown: as arguments of tqdm, whose bars are for a terminal, and in lines where stderr is none."""

import sys
import time
from typing import Any

# A bar within other work: it appears after two seconds, and leaves nothing behind.
BRIEF = {"delay": 2, "leave": False, "disable": None}
PERIOD = 10.0  # seconds between lines


def named(progress: str | None, otherwise: str) -> dict:
    """Returns the arguments of a bar named `progress`, which stays unless it is within another bar.

    Without a name they are those of a brief bar named `otherwise`.
    """
    if progress:
        return {"desc": progress, "leave": None, "disable": None}
    return {"desc": otherwise, **BRIEF}


class TimedLines:
    """Tells on stderr how far some work is, every PERIOD seconds, if its bar is not drawn as stderr is no terminal.

    `bar` is the bar of tqdm, which `update` moves. `name` is what the work is called; without a name nothing is told.
    """

    def __init__(self, bar: Any, name: str | None, unit: str):
        self.bar = bar
        self.name = name
        self.unit = unit
        self.done = bar.n
        self.start = time.monotonic()
        self.last = self.start

    def update(self, count: int = 1) -> None:
        """Counts work that is done."""
        self.bar.update(count)
        self.done += count
        self.tick()

    def tick(self) -> None:
        """Prints a line if it is time for one; called often, also while nothing is done."""
        now = time.monotonic()
        if self.name is None or not self.bar.disable or now - self.last < PERIOD:
            return
        self.last = now
        seconds = now - self.start
        line = f"{self.name}: {self.done:,} of {self.bar.total:,} {self.unit}, {seconds:.0f} s"
        print(line, file=sys.stderr, flush=True)
