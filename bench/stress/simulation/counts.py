"""Counts of what a simulated device did: kernels, bytes, copies, and waits of the host with the code that waited."""

import sys
from collections import Counter
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[3] / "r3lite"


@dataclass(frozen=True)
class Wait:
    """A reason why the host waited for the device, and the functions of r3lite that were running, innermost first."""

    why: str
    functions: tuple[str, ...]  # as `running_functions` returns them

    def __str__(self) -> str:
        return f"{self.why}, {self.functions[0] if self.functions else 'outside r3lite'}"


@dataclass
class Counts:
    """Totals of what a device did.

    Subtract earlier counts from later ones for what the device did in between. Subtract the counts of one run from
    those of another for how much more the other did.
    """

    kernels: int = 0
    launches: int = 0  # by the host: a graph with all its kernels is one launch
    read: int = 0  # bytes that kernels read
    written: int = 0  # bytes that kernels wrote
    operations: int = 0  # floating-point operations of matrix products and attention
    uploads: int = 0  # copies from the host to the device
    upload_bytes: int = 0
    downloads: int = 0  # copies from the device to the host
    download_bytes: int = 0
    operators: Counter[str] = field(default_factory=Counter)  # by operator: its kernels
    moved: Counter[str] = field(default_factory=Counter)  # by operator: bytes that its kernels read and wrote
    computed: Counter[str] = field(default_factory=Counter)  # by operator: floating-point operations
    waits: Counter[Wait] = field(default_factory=Counter)  # how often the host waited for the device

    def __sub__(self, subtrahend: "Counts") -> "Counts":
        names = [each_field.name for each_field in fields(self)]
        return Counts(**{name: _difference(getattr(self, name), getattr(subtrahend, name)) for name in names})

    def kernel(self, name: str, bytes_read: int, bytes_written: int, operations: int) -> None:
        """Counts a kernel of the operator `name`, but no launch: within a graph, kernels are not launched one by one.

        `bytes_read` and `bytes_written` are bytes, `operations` floating-point operations.
        """
        self.kernels += 1
        self.read += bytes_read
        self.written += bytes_written
        self.operations += operations
        self.operators[name] += 1
        self.moved[name] += bytes_read + bytes_written
        self.computed[name] += operations

    def wait(self, why: str) -> None:
        """Counts a wait of the host, with its reason and the functions of r3lite that are running."""
        self.waits[Wait(why, running_functions())] += 1

    def report(self) -> dict:
        """Returns the counts in a form that JSON can hold; per operator and per wait the largest counts come first."""
        report = {each_field.name: getattr(self, each_field.name) for each_field in fields(self)}
        for name in ("operators", "moved", "computed"):
            report[name] = {operator: count for operator, count in getattr(self, name).most_common() if count}
        waits: Counter[str] = Counter()
        for wait, count in self.waits.items():
            waits[str(wait)] += count
        report["waits"] = dict(waits.most_common())
        return report


def _difference(minuend: Any, subtrahend: Any) -> Any:
    """Returns the difference of two numbers or of two counters.

    The difference of counters has no entries that are zero, but it keeps negative ones, unlike `-` of Counter.
    """
    if not isinstance(minuend, Counter):
        return minuend - subtrahend
    keys = dict.fromkeys((*minuend, *subtrahend))
    return Counter({key: minuend[key] - subtrahend[key] for key in keys if minuend[key] != subtrahend[key]})


def running_functions() -> tuple[str, ...]:
    """Returns the functions of r3lite on the call stack, innermost first.

    Each has its file, line and name, such as `models/lora.py:93 LoraLinear.forward`.
    """
    functions = []
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        file = _file_in_package(code.co_filename)
        if file:
            functions.append(f"{file}:{frame.f_lineno} {code.co_qualname}")
        frame = frame.f_back
    return tuple(functions)


@cache  # a wait looks at the whole call stack
def _file_in_package(file: str) -> str | None:
    """Returns the path of a file of r3lite within the package, None for any other file."""
    path = Path(file)
    if PACKAGE not in path.parents:
        return None
    return path.relative_to(PACKAGE).as_posix()
