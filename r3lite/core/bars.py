"""How progress is shown: by bars of tqdm on a terminal, and by printed lines if stderr is no terminal."""

import sys
import time
from typing import Any

# Arguments of tqdm for a bar within other work: the bar appears after two seconds, and is erased at the end. With
# `disable` None, tqdm draws no bar if stderr is no terminal.
BRIEF = {"delay": 2, "leave": False, "disable": None}
PERIOD = 10.0  # seconds between lines


def named(progress: str | None, otherwise: str) -> dict:
    """Returns the arguments of tqdm for a bar named `progress`. The bar stays at the end, unless it is within another.

    If `progress` is None, returns the arguments of a BRIEF bar named `otherwise`.
    """
    if progress:
        return {"desc": progress, "leave": None, "disable": None}
    return {"desc": otherwise, **BRIEF}


class TimedLines:
    """Moves a bar of tqdm. If the bar is not drawn, prints a line about the progress on stderr every PERIOD seconds.

    A bar is not drawn if stderr is no terminal. `name` is what the lines call the work; if it is None, no line is
    printed. `unit` is what is counted, in the plural.
    """

    def __init__(self, bar: Any, name: str | None, unit: str):
        self.bar = bar
        self.name = name
        self.unit = unit
        self.done = bar.n
        self.start = time.monotonic()
        self.last = self.start

    def update(self, count: int = 1) -> None:
        """Counts `count` more units of work as done, and moves the bar."""
        self.bar.update(count)
        self.done += count
        self.tick()

    def tick(self) -> None:
        """Prints a line if PERIOD seconds have passed since the last one. May be called often, also between updates."""
        now = time.monotonic()
        if self.name is None or not self.bar.disable or now - self.last < PERIOD:
            return
        self.last = now
        seconds = now - self.start
        line = f"{self.name}: {self.done:,} of {self.bar.total:,} {self.unit}, {seconds:.0f} s"
        print(line, file=sys.stderr, flush=True)
