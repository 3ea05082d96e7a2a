"""The spans of a run as a file: a Chrome trace, or OpenTelemetry's JSON.

Each step is a trace of its own, so that an interrupted run leaves whole traces. A line has one span (Chrome) or all
spans of a step (OpenTelemetry), and the number of the step. A resumed run removes the lines of the steps that it takes
again, as in metrics.jsonl.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from r3lite.core.files import read_text, write_text
from r3lite.core.spans import MAIN, NO_SPANS, Span, Spans
from r3lite.settings import TrackSettings
from r3lite.training.metrics import writing

CHROME = "trace.json"
OPENTELEMETRY = "spans.jsonl"
REMEDY = "Move it away, or remove --track-spans."
SERVICE = "r3lite"
INTERNAL = 1  # OpenTelemetry's kind of a span that calls no other service
CLOSED = "\n]\n"


class ChromeTrace:
    """`trace.json`, one event a line, which chrome://tracing and ui.perfetto.dev open.

    It is complete JSON after each step. A kill may cut off the bracket at its end; both programs read it all the same.
    """

    def __init__(self, path: Path, command: str, done: int):
        """Writes the file anew, with the events of an earlier start up to step `done`."""
        self.path = path
        events = _events(path, done)
        self._tracks = {}  # the number ("tid") of each track, by its name
        for event in events:
            if event["name"] == "thread_name":
                self._tracks[event["args"]["name"]] = event["tid"]
        if not events:
            run = f"{SERVICE} {command}: {path.absolute().parent.name}"
            events = [_naming_event("process_name", tid=1, name=run)]
        lines = ",\n".join(json.dumps(event) for event in events)
        write_text(path, "[\n" + lines + CLOSED)

    def write(self, step: int, spans: list[Span]) -> None:
        """Appends the spans of a step."""
        events = []
        new_tracks = {span.track for span in spans} - self._tracks.keys()
        for track in sorted(new_tracks, key=_track_order):
            self._tracks[track] = len(self._tracks) + 1
            events.append(_naming_event("thread_name", tid=self._tracks[track], name=track))
        events += [_for_chrome(step, self._tracks[span.track], span) for span in spans]
        lines = "".join(",\n" + json.dumps(event) for event in events)
        with writing(self.path), open(self.path, "rb+") as file:
            file.seek(-len(CLOSED), os.SEEK_END)
            file.write(lines.encode() + CLOSED.encode())


class OpenTelemetryLines:
    """`spans.jsonl`, JSON lines as OpenTelemetry's file exporter writes and its collector reads them; a line a step."""

    def __init__(self, path: Path, command: str, done: int):
        """Writes the file anew, with the lines of an earlier start up to step `done`."""
        self.path = path
        run = {
            "service.name": SERVICE,
            "r3lite.command": command,
            "r3lite.run": path.absolute().parent.name,
        }
        self._resource = {"attributes": _attributes(run)}
        lines = []
        if done:
            lines = [line + "\n" for line, step in _lines(path) if step <= done]
        write_text(path, "".join(lines))

    def write(self, step: int, spans: list[Span]) -> None:
        """Appends the spans of a step."""
        described = [_for_opentelemetry(step, span) for span in spans]
        scope = {"scope": {"name": SERVICE}, "spans": described}
        line = {"resourceSpans": [{"resource": self._resource, "scopeSpans": [scope]}]}
        with writing(self.path), open(self.path, "a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


LAYOUTS = {"chrome": (CHROME, ChromeTrace), "opentelemetry": (OPENTELEMETRY, OpenTelemetryLines)}


class SpanLog:
    """Writes the spans of a run, step by step."""

    def __init__(self, spans: Spans, file: ChromeTrace | OpenTelemetryLines):
        self._spans = spans
        self._file = file

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Records a step, and writes its spans when it is over, also if it is left early."""
        try:
            with self._spans.span("step"):
                yield
        finally:
            self.write(number)

    def write(self, number: int) -> None:
        """Writes the spans that were recorded since the last call, as those of step `number`."""
        self._file.write(number, self._spans.take())


class NoSpanLog:
    """The log of a run without --track-spans."""

    def step(self, number: int) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def write(self, number: int) -> None:
        pass


def open_span_log(
    spans: Spans,
    tracking: TrackSettings,
    output: Path,
    command: str,
    done: int,
) -> SpanLog | NoSpanLog:
    """Opens the file that --track-spans names, in the folder of a run of `command` that stands at step `done`."""
    if spans is NO_SPANS:
        return NoSpanLog()
    name, layout = LAYOUTS[tracking.track_spans]
    return SpanLog(spans, layout(output / name, command, done))


def _track_order(track: str) -> tuple[bool, int, str]:
    """Returns a sort key: the run's own track comes first, then episodes, and episode 9 before episode 10."""
    return track != MAIN, len(track), track


def _events(path: Path, done: int) -> list[dict]:
    """Returns the events of a trace up to step `done`. Events without a step, which name tracks, are among them.

    A line that a kill cut off is left out.
    """
    if not done or not path.exists():
        return []
    events = []
    for line in read_text(path, REMEDY).splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line.rstrip(","))
            if isinstance(event, dict) and event["args"].get("step", 0) <= done:
                events.append(event)
    return events


def _lines(path: Path) -> Iterator[tuple[str, int]]:
    """Yields the lines with their steps. A line that a kill cut off is left out."""
    if not path.exists():
        return
    for line in read_text(path, REMEDY).splitlines():
        with contextlib.suppress(ValueError):
            scope = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]
            attributes = scope["spans"][0]["attributes"]
            yield line, int(attributes[0]["value"]["intValue"])  # `_for_opentelemetry` puts the step first


def _naming_event(kind: str, tid: int, name: str) -> dict:
    """Returns the event that names a process or a thread (`kind`); a track is a thread."""
    return {"name": kind, "ph": "M", "pid": 1, "tid": tid, "args": {"name": name}}


def _for_chrome(step: int, tid: int, span: Span) -> dict:
    """Returns a span as a "complete event" (X); times are in microseconds, those of a Span in nanoseconds."""
    return {
        "name": span.name,
        "cat": SERVICE,
        "ph": "X",
        "pid": 1,
        "tid": tid,
        "ts": span.start / 1000,
        "dur": (span.end - span.start) / 1000,
        "args": {"step": step, **span.attributes},
    }


def _for_opentelemetry(step: int, span: Span) -> dict:
    """Returns a span in OTLP's JSON: ids in hexadecimal, 64-bit numbers as text. The step is the first attribute."""
    parent = {"parentSpanId": span.parent} if span.parent else {}
    attributes = {"r3lite.step": step, "thread.name": span.track, **span.attributes}
    return {
        "traceId": span.trace,
        "spanId": span.id,
        **parent,
        "name": span.name,
        "kind": INTERNAL,
        "startTimeUnixNano": str(span.start),
        "endTimeUnixNano": str(span.end),
        "attributes": _attributes(attributes),
    }


def _attributes(values: dict[str, int | float | str]) -> list[dict]:
    attributes = []
    for key, value in values.items():
        if isinstance(value, int):
            typed_value = {"intValue": str(value)}
        elif isinstance(value, float):
            typed_value = {"doubleValue": value}
        else:
            typed_value = {"stringValue": value}
        attributes.append({"key": key, "value": typed_value})
    return attributes
