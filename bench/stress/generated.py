"""What the generators of hostile inputs have in common: odd JSON, odd bytes, examples of a strategy, and outcomes.

Needs hypothesis (extra bench). Examples follow from a seed: the same version of hypothesis gives the same ones.
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
SECONDS = 20.0  # in which each is refused or answered, also on a busy machine
MEMORY = 64  # MiB by which the peak may grow
LONGEST = 2000  # characters of an error
# Values that a field may be replaced by. RAW ones are texts of JSON that json.dumps does not write.
RAW = ("NaN", "-Infinity", "1e999", "-1e999", "9" * 5000, '"\\ud800"', "[" * 300 + "]" * 300, "01", "'x'", '"\t"')
ODD = (
    None, True, False, 0, -1, 1 << 31, 1 << 63, 1 << 64, 10**300, 0.5, -0.0, 1e308, "", " ", "0", "none", "../x",
    "x" * 5000, "\0", "\x1b]0;x\x07", "\u202e", "<|im_end|>", "\U0001f600", [], [[]], [None], [0] * 3000, {}, {"": {}},
    *(f"@RAW{number}@" for number in range(len(RAW))),
)  # fmt: skip


@dataclass(frozen=True)
class Example:
    """Something to send or to read; `name` says how it differs from a sound one."""

    name: str
    content: Any


@dataclass(frozen=True)
class Outcome:
    """What came of an example: it was REFUSED or ANSWERED, and held unless there is a problem."""

    way: str
    problem: str = ""


def examples(strategy: st.SearchStrategy[Example], count: int) -> list[Example]:
    """Returns the first `count` different examples of a strategy."""
    drawn: dict[str, Example] = {}

    @seed(0)
    @settings(
        max_examples=4 * count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def draw(example: Example) -> None:
        if len(drawn) < count:
            drawn.setdefault(example.name, example)

    draw()
    return list(drawn.values())


def refusal(text: str, *names: str) -> Outcome:
    """Returns the outcome of an error: it must name what it is about, and not be long."""
    missing = [name for name in names if name not in text]
    problem = ""
    if missing:
        problem = f"the error does not name {missing[0]}: {text[:300]}"
    elif len(text) > LONGEST:
        problem = f"the error has {len(text):,} characters"
    return Outcome(REFUSED, problem)


def watched(judge: Callable[[Example], Outcome], example: Example) -> Outcome:
    """Returns the outcome of an example; an exception, a long time or much memory is a problem."""
    start = time.monotonic()
    peak = peak_mib()
    try:
        outcome = judge(example)
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return Outcome(REFUSED, f"{type(error).__name__}: {error}"[:400])
    seconds = time.monotonic() - start
    growth = peak_mib() - peak
    if seconds > SECONDS:
        return Outcome(outcome.way, f"it took {seconds:.0f} s")
    if growth > MEMORY:
        return Outcome(outcome.way, f"it took {growth:.0f} MiB")
    return outcome


def peak_mib() -> float:
    """Returns the most memory that this process has had, in MiB (Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Returns the paths to a JSON value and all in it; of a long list only some."""
    paths = [path]
    keys: list = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = sorted({0, 1, len(value) // 2, len(value) - 1} & set(range(len(value))))
    for key in keys:
        paths += places(value[key], (*path, key))
    return paths


def inside(value: Any, path: tuple) -> Any:
    """Returns what a path leads to."""
    for key in path:
        value = value[key]
    return value


@st.composite
def changed_value(draw: st.DrawFn, sound: Any) -> tuple[str, Any]:
    """Draws a JSON value that differs from a sound one at one place or two, and what is different."""
    root = {"": copy.deepcopy(sound)}
    names = []
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from([path for path in places(root) if path]))
        parent = inside(root, path[:-1])
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
            parent[key] = copy.deepcopy(inside(root, draw(st.sampled_from(places(root)))))
        else:
            parent[key] = draw(st.sampled_from(ODD))
        new = parent[key] if change != "absent" else "absent"
        names.append(f"{'.'.join(map(str, path[1:])) or 'all'} {change}: {shown(new)}")
        if not root:
            root = {"": None}
    return "; ".join(names), root[""]


def encoded(value: Any) -> bytes:
    """Returns a drawn value as JSON."""
    text = json.dumps(value)
    for number, raw in enumerate(RAW):
        text = text.replace(f'"@RAW{number}@"', raw)
    return text.encode()


@st.composite
def changed_bytes(draw: st.DrawFn, content: bytes) -> tuple[str, bytes]:
    """Draws bytes that differ from others at one place."""
    at = draw(st.integers(0, max(0, len(content) - 1)))
    change = draw(st.sampled_from(("cut", "replaced", "inserted", "removed", "doubled", "first", "last")))
    piece = draw(st.sampled_from((b"\0", b"\xff", b"\xff" * 8, b"{", b'"', b"\xef\xbb\xbf", b"\n", b"9" * 40)))
    width = draw(st.sampled_from((1, 4, 8, 40)))
    new = {
        "cut": content[:at],
        "replaced": content[:at] + piece + content[at + len(piece) :],
        "inserted": content[:at] + piece + content[at:],
        "removed": content[:at] + content[at + width :],
        "doubled": content[: at + width] + content[at:],
        "first": piece + content,
        "last": content + piece,
    }[change]
    return f"byte {at} {change} {piece[:8]!r} {width}", new


@st.composite
def changed_json(draw: st.DrawFn, sound: Any) -> tuple[str, bytes]:
    """Draws a JSON text that differs from that of a sound value, mostly in its values and sometimes in its bytes."""
    if draw(st.integers(0, 5)) == 0:
        return draw(changed_bytes(json.dumps(sound).encode()))
    name, value = draw(changed_value(sound))
    return name, encoded(value)


def is_json(content: bytes) -> bool:
    """Returns whether Python takes bytes for JSON without NaN and Infinity."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    with suppress(ValueError, RecursionError):
        json.loads(content.decode(), parse_constant=refuse)
        return True
    return False
