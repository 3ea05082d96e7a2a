"""What the generators of hostile inputs share: odd JSON, odd bytes, drawing examples, and judging their outcomes.

Needs hypothesis (extra bench). The seed is fixed: the same version of hypothesis draws the same examples.
"""

import copy
import json
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from r3lite.core.records import shown

REFUSED = "refused"
ANSWERED = "answered"
TIME_LIMIT = 20.0  # seconds in which an input must be refused or answered, also on a busy machine
MEMORY_LIMIT = 64  # MiB by which the peak memory may grow
ERROR_LIMIT = 2000  # characters of an error
# JSON texts that json.dumps does not write. The value "@RAW3@" stands for RAW[3] until `encoded` puts that in.
RAW = ("NaN", "-Infinity", "1e999", "-1e999", "9" * 5000, '"\\ud800"', "[" * 300 + "]" * 300, "01", "'x'", '"\t"')
# Values that replace those of a sound input.
ODD = (
    None, True, False, 0, -1, 1 << 31, 1 << 63, 1 << 64, 10**300, 0.5, -0.0, 1e308, "", " ", "0", "none", "../x",
    "x" * 5000, "\0", "\x1b]0;x\x07", "\u202e", "<|im_end|>", "\U0001f600", [], [[]], [None], [0] * 3000, {}, {"": {}},
    *(f"@RAW{number}@" for number in range(len(RAW))),
)  # fmt: skip


@dataclass(frozen=True)
class Example:
    """A hostile input: a message, a request or a file."""

    name: str  # says how it differs from a sound input
    content: Any  # in a form that its judge takes


@dataclass(frozen=True)
class Outcome:
    """How the program under test handled an example."""

    way: str  # REFUSED or ANSWERED
    problem: str = ""  # what was wrong about that; "" if nothing was


def examples(strategy: st.SearchStrategy[Example], count: int) -> list[Example]:
    """Returns the first `count` examples of a strategy that have different names."""
    by_name: dict[str, Example] = {}

    @seed(0)
    @settings(
        max_examples=4 * count,  # some have the same name
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def draw(example: Example) -> None:
        if len(by_name) < count:
            by_name.setdefault(example.name, example)

    draw()
    return list(by_name.values())


def refusal(text: str, *names: str) -> Outcome:
    """Returns the outcome of an error message: it must contain the names, and not be too long."""
    missing = [name for name in names if name not in text]
    problem = ""
    if missing:
        problem = f"the error does not name {missing[0]}: {text[:300]}"
    elif len(text) > ERROR_LIMIT:
        problem = f"the error has {len(text):,} characters"
    return Outcome(REFUSED, problem)


def judge_within_limits(judge: Callable[[Example], Outcome], example: Example) -> Outcome:
    """Returns the outcome of an example; an exception, too much time or too much memory is a problem."""
    start = time.monotonic()
    peak_before = peak_mib()
    try:
        outcome = judge(example)
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return Outcome(REFUSED, f"{type(error).__name__}: {error}"[:400])
    seconds = time.monotonic() - start
    growth = peak_mib() - peak_before
    if seconds > TIME_LIMIT:
        return Outcome(outcome.way, f"it took {seconds:.0f} s")
    if growth > MEMORY_LIMIT:
        return Outcome(outcome.way, f"it took {growth:.0f} MiB")
    return outcome


def peak_mib() -> float:
    """Returns the peak resident memory of this process so far, in MiB (Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def paths_in(value: Any, path: tuple = ()) -> list[tuple]:
    """Returns the paths (keys and indices) of a JSON value and all values in it; of a list only up to four items."""
    paths = [path]
    keys: list = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = sorted({0, 1, len(value) // 2, len(value) - 1} & set(range(len(value))))
    for key in keys:
        paths += paths_in(value[key], (*path, key))
    return paths


def value_at(value: Any, path: tuple) -> Any:
    """Returns the value inside a JSON value at a path."""
    for key in path:
        value = value[key]
    return value


@st.composite
def changed_value(draw: st.DrawFn, sound: Any) -> tuple[str, Any]:
    """Draws one or two changes of a sound JSON value; returns a text about the changes, and the changed value."""
    root = {"": copy.deepcopy(sound)}  # so that the whole value has a parent, too, and can be replaced
    names = []
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from([path for path in paths_in(root) if path]))
        parent = value_at(root, path[:-1])
        key = path[-1]
        value = parent[key]
        change = draw(st.sampled_from(("odd", "odd", "odd", "absent", "other", "order", "longer", "near")))
        if change == "absent":
            del parent[key]
        elif change == "order" and isinstance(value, list) and len(value) > 1:
            parent[key] = value[1:] + value[:1]
        elif change == "longer" and isinstance(value, (list, str)) and value:
            parent[key] = value + value[-1:] * draw(st.sampled_from((1, 7, 2000)))
        elif change == "near" and type(value) in (int, float):
            parent[key] = value + draw(st.sampled_from((-1, 1, 0.5, 100)))
        elif change == "other":
            parent[key] = copy.deepcopy(value_at(root, draw(st.sampled_from(paths_in(root)))))
        else:
            parent[key] = draw(st.sampled_from(ODD))
        new_value = parent[key] if change != "absent" else "absent"
        names.append(f"{'.'.join(map(str, path[1:])) or 'all'} {change}: {shown(new_value)}")
        if not root:  # the whole value was removed
            root = {"": None}
    return "; ".join(names), root[""]


def encoded(value: Any) -> bytes:
    """Returns a drawn value as JSON, with the texts of RAW in their places."""
    text = json.dumps(value)
    for number, raw in enumerate(RAW):
        text = text.replace(f'"@RAW{number}@"', raw)
    return text.encode()


@st.composite
def changed_bytes(draw: st.DrawFn, content: bytes) -> tuple[str, bytes]:
    """Draws one change of bytes; returns a text about the change, and the changed bytes."""
    position = draw(st.integers(0, max(0, len(content) - 1)))
    change = draw(st.sampled_from(("cut", "replaced", "inserted", "removed", "doubled", "first", "last")))
    piece = draw(st.sampled_from((b"\0", b"\xff", b"\xff" * 8, b"{", b'"', b"\xef\xbb\xbf", b"\n", b"9" * 40)))
    width = draw(st.sampled_from((1, 4, 8, 40)))
    changed = {
        "cut": content[:position],
        "replaced": content[:position] + piece + content[position + len(piece) :],
        "inserted": content[:position] + piece + content[position:],
        "removed": content[:position] + content[position + width :],
        "doubled": content[: position + width] + content[position:],
        "first": piece + content,
        "last": content + piece,
    }[change]
    return f"byte {position} {change} {piece[:8]!r} {width}", changed


@st.composite
def changed_json(draw: st.DrawFn, sound: Any) -> tuple[str, bytes]:
    """Draws a change of a sound JSON value or of its bytes; returns a text about the change, and the JSON text."""
    if draw(st.integers(0, 5)) == 0:  # one in six changes the bytes
        return draw(changed_bytes(json.dumps(sound).encode()))
    name, value = draw(changed_value(sound))
    return name, encoded(value)


def is_json(content: bytes) -> bool:
    """Returns whether Python reads bytes as JSON. NaN and Infinity are no JSON, though Python reads them by default."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    with suppress(ValueError, RecursionError):
        json.loads(content.decode(), parse_constant=refuse)
        return True
    return False
