"""The spans of a run as a file: a Chrome trace, or OpenTelemetry's JSON.

Each step is a trace of its own, so that an interrupted run leaves whole ones. In both layouts a span, or a step's
spans, are one line that names its step: a resumed run drops the steps that it takes again, as metrics.jsonl does.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from r3lite.core.files import read_text, write_text
from r3lite.core.spans import MAIN, Span, Spans
from r3lite.training.metrics import writing

CHROME, OPENTELEMETRY = "trace.json", "spans.jsonl"
REMEDY = "Move it away, or remove --track-spans."
SERVICE = "r3lite"
INTERNAL = 1  # OpenTelemetry's kind of a span that calls no other service
CLOSED = "\n]\n"


class ChromeTrace:
    """`trace.json`, one event a line, which chrome://tracing and ui.perfetto.dev open. It is whole JSON after each
    step; both read it without the bracket at its end, too, which a kill may take away."""

    def __init__(self, path: Path, command: str, done: int):
        self.path, events = path, _events(path, done)
        self._tracks = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
        if not events:
            events = [_named("process_name", 1, f"{SERVICE} {command}: {path.absolute().parent.name}")]
        write_text(path, "[\n" + ",\n".join(map(json.dumps, events)) + CLOSED)

    def write(self, step: int, spans: list[Span]) -> None:
        events = []
        # The run first, and episode 9 before episode 10.
        for track in sorted({span.track for span in spans} - self._tracks.keys(), key=lambda t: (t != MAIN, len(t), t)):
            self._tracks[track] = len(self._tracks) + 1
            events.append(_named("thread_name", self._tracks[track], track))
        events += [_for_chrome(step, self._tracks[span.track], span) for span in spans]
        with writing(self.path), open(self.path, "rb+") as file:
            file.seek(-len(CLOSED), os.SEEK_END)
            file.write("".join(",\n" + json.dumps(event) for event in events).encode() + CLOSED.encode())


class OpenTelemetryLines:
    """`spans.jsonl`, the JSON lines of OpenTelemetry's file exporter, which its collector reads; a step a line."""

    def __init__(self, path: Path, command: str, done: int):
        self.path = path
        run = {"service.name": SERVICE, "r3lite.core.command": command, "r3lite.run": path.absolute().parent.name}
        self._resource = {"attributes": _attributes(run)}
        write_text(path, "".join(line + "\n" for line, step in _lines(path) if step <= done) if done else "")

    def write(self, step: int, spans: list[Span]) -> None:
        scope = {"scope": {"name": SERVICE}, "spans": [_for_opentelemetry(step, span) for span in spans]}
        line = {"resourceSpans": [{"resource": self._resource, "scopeSpans": [scope]}]}
        with writing(self.path), open(self.path, "a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


LAYOUTS = {"chrome": (CHROME, ChromeTrace), "opentelemetry": (OPENTELEMETRY, OpenTelemetryLines)}


class SpanLog:
    """Writes what a run records, step by step; without spans it does nothing."""

    def __init__(self, spans: Spans | None, settings: dict, output: Path, command: str, done: int):
        self.spans = spans
        if spans:
            name, layout = LAYOUTS[settings["track_spans"]]
            self._file = layout(output / name, command, done)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Records a step, and writes its spans when it is over, also if it is left early."""
        if not self.spans:
            yield
            return
        try:
            with self.spans.span("step"):
                yield
        finally:
            self.write(number)

    def write(self, number: int) -> None:
        """Writes what was recorded since the last time, as of step `number`."""
        if self.spans:
            self._file.write(number, self.spans.take())


def _events(path: Path, done: int) -> list[dict]:
    """The events of a trace up to a step; a line torn by a kill is left out."""
    events = []
    for line in read_text(path, REMEDY).splitlines() if done and path.exists() else ():
        with contextlib.suppress(ValueError):
            event = json.loads(line.rstrip(","))
            if isinstance(event, dict) and event["args"].get("step", 0) <= done:
                events.append(event)
    return events


def _lines(path: Path) -> Iterator[tuple[str, int]]:
    """Whole lines and their steps."""
    for line in read_text(path, REMEDY).splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            attributes = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["attributes"]
            yield line, int(attributes[0]["value"]["intValue"])


def _named(what: str, tid: int, name: str) -> dict:
    return {"name": what, "ph": "M", "pid": 1, "tid": tid, "args": {"name": name}}


def _for_chrome(step: int, tid: int, span: Span) -> dict:
    """The keys of a complete event; times are in microseconds."""
    return {
        "name": span.name, "cat": SERVICE, "ph": "X", "pid": 1, "tid": tid, "ts": span.start / 1000,
        "dur": (span.end - span.start) / 1000, "args": {"step": step, **span.attributes},
    }  # fmt: skip


def _for_opentelemetry(step: int, span: Span) -> dict:
    """The keys of OTLP's JSON: ids in hexadecimal, 64-bit numbers as text; the step comes first."""
    parent = {"parentSpanId": span.parent} if span.parent else {}
    return {
        "traceId": span.trace, "spanId": span.id, **parent, "name": span.name, "kind": INTERNAL,
        "startTimeUnixNano": str(span.start), "endTimeUnixNano": str(span.end),
        "attributes": _attributes({"r3lite.step": step, "thread.name": span.track, **span.attributes}),
    }  # fmt: skip


def _attributes(values: dict) -> list[dict]:
    kinds = {int: "intValue", float: "doubleValue", str: "stringValue"}
    texts = {key: str(value) if isinstance(value, int) else value for key, value in values.items()}
    return [{"key": key, "value": {kinds[type(value)]: texts[key]}} for key, value in values.items()]
