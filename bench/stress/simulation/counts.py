"""What a simulated device did: kernels, bytes, copies, and waits of the host with where in r3lite they happened."""

import sys
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[3] / "r3lite"


@dataclass(frozen=True)
class Wait:
    """Why the host waited for the device, and the functions of r3lite that ran then, the innermost first."""

    why: str
    where: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.why}, {self.where[0] if self.where else 'outside r3lite'}"


@dataclass
class Counts:
    """What a device did. The difference of two is what it did in between, or what one did more than another."""

    kernels: int = 0
    launches: int = 0  # by the host: of a kernel, or of a graph with all its kernels
    read: int = 0  # bytes, by kernels
    written: int = 0
    operations: int = 0  # of floating-point numbers, in products and attention
    uploads: int = 0  # copies from the host to the device
    upload_bytes: int = 0
    downloads: int = 0
    download_bytes: int = 0
    operators: Counter[str] = field(default_factory=Counter)  # the kernels, by name
    moved: Counter[str] = field(default_factory=Counter)  # bytes read and written, by the kernel's name
    computed: Counter[str] = field(default_factory=Counter)  # operations, likewise
    waits: Counter[Wait] = field(default_factory=Counter)  # of the host for the device

    def __sub__(self, before: "Counts") -> "Counts":
        return Counts(*(_less(getattr(self, f.name), getattr(before, f.name)) for f in fields(self)))

    def kernel(self, name: str, read: int, written: int, operations: int) -> None:
        """Counts a kernel, whoever launched it."""
        self.kernels += 1
        self.read += read
        self.written += written
        self.operations += operations
        self.operators[name] += 1
        self.moved[name] += read + written
        self.computed[name] += operations

    def wait(self, why: str) -> None:
        self.waits[Wait(why, places())] += 1

    def report(self) -> dict:
        """As JSON."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        waits: Counter[str] = Counter()
        for wait, times in self.waits.items():
            waits[str(wait)] += times
        for name in ("operators", "moved", "computed"):
            found[name] = {kernel: number for kernel, number in getattr(self, name).most_common() if number}
        return found | {"waits": dict(waits.most_common())}


def _less(more: Any, fewer: Any) -> Any:
    """The difference of numbers, or of counters, whose figures may be below zero."""
    if not isinstance(more, Counter):
        return more - fewer
    names = dict.fromkeys((*more, *fewer))
    return Counter({name: more[name] - fewer[name] for name in names if more[name] != fewer[name]})


def places() -> tuple[str, ...]:
    """The functions of r3lite that are running, the innermost first, such as `models/lora.py:93 LoraLinear.forward`."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        code = frame.f_code
        if PACKAGE in (path := Path(code.co_filename)).parents:
            found.append(f"{path.relative_to(PACKAGE).as_posix()}:{frame.f_lineno} {code.co_qualname}")
        frame = frame.f_back
    return tuple(found)
