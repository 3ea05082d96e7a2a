"""Spans (named, nested time intervals) of the parts of a run, for `--track-spans`, and the seconds of a step's stages.

Code that records spans gets `Spans`, or NO_SPANS, which records none.
"""

import secrets
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

MAIN = "run"  # the track of spans that enclose others

Attributes = dict[str, int | float | str]


@dataclass(frozen=True)
class Span:
    """Holds a time interval. Spans of one track either enclose each other or do not overlap."""

    name: str
    track: str
    start: int  # nanoseconds since 1970
    end: int
    trace: str  # 32 hexadecimal digits, as in OpenTelemetry; the same for spans that belong together
    id: str  # 16 hexadecimal digits
    parent: str | None  # id of the span around it
    attributes: Attributes = field(default_factory=dict)


class Spans:
    """Records the spans of one process.

    One thread opens and closes the spans of `MAIN`, nested in each other. The parent of a span of another track is the
    innermost open span of `MAIN`.
    """

    def __init__(self):
        # The wall clock is read once, because it may be changed during a run.
        self._origin = time.time_ns() - time.perf_counter_ns()
        self._open: list[tuple[str, str]] = []  # trace and id of each open span of MAIN, the outermost first
        self._finished: list[Span] = []

    def now(self) -> int:
        """Returns the nanoseconds since 1970."""
        return self._origin + time.perf_counter_ns()

    @contextmanager
    def span(self, name: str, **attributes: int | float | str) -> Iterator[Attributes]:
        """Records the block; yields the span's attributes, which the block may extend."""
        if self._open:
            trace, parent = self._open[-1]
        else:
            trace = secrets.token_hex(16)
            parent = None
        start = self.now()
        id = secrets.token_hex(8)
        self._open.append((trace, id))
        try:
            yield attributes
        finally:
            self._open.pop()
            span = Span(
                name=name,
                track=MAIN,
                start=start,
                end=self.now(),
                trace=trace,
                id=id,
                parent=parent,
                attributes=attributes,
            )
            self._finished.append(span)

    def add(self, name: str, track: str, start: int, **attributes: int | float | str) -> None:
        """Records a span from `start` (nanoseconds since 1970) until now, on another track than MAIN.

        A span of MAIN must be open. Any thread may call this.
        """
        trace, parent = self._open[-1]
        span = Span(
            name=name,
            track=track,
            start=start,
            end=self.now(),
            trace=trace,
            id=secrets.token_hex(8),
            parent=parent,
            attributes=attributes,
        )
        self._finished.append(span)

    def take(self) -> list[Span]:
        """Returns the spans that ended since the last call of `take`, in the order of their ends."""
        finished = self._finished
        self._finished = []
        return finished


class NoSpans(Spans):
    """Records nothing. A run without --track-spans has this recorder, and so has every rank but the first."""

    def now(self) -> int:
        return 0

    def span(self, name: str, **attributes: int | float | str) -> AbstractContextManager[Attributes]:
        return nullcontext(attributes)

    def add(self, name: str, track: str, start: int, **attributes: int | float | str) -> None:
        pass


NO_SPANS = NoSpans()


def build_spans(track_spans: str) -> Spans:
    """Returns the recorder for --track-spans."""
    return NO_SPANS if track_spans == "none" else Spans()


@dataclass
class Stopwatch:
    """Measures the seconds of each stage of a step. Each stage is also a span, if spans are recorded."""

    spans: Spans = NO_SPANS
    laps: dict[str, float] = field(default_factory=dict)  # seconds, by `time/<stage>`

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measures the block; a block that raises has no lap."""
        start = time.perf_counter()
        with self.spans.span(name):
            yield
        self.laps[f"time/{name}"] = time.perf_counter() - start
