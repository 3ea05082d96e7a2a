"""Spans as they are recorded, and those of whole runs on the tiny checkpoint, read back by Perfetto's and
OpenTelemetry's rules."""

import base64
import json
import threading

import pytest

from r3lite import ppo, sft
from r3lite.core import run_files
from r3lite.core.spans import NO_SPANS, Spans
from r3lite.protocols import base
from r3lite.training.trace import CHROME, CLOSED, OPENTELEMETRY
from tests.cold_start import WORLD, arguments, assert_same_runs, logged


def test_spans_know_what_they_are_inside_of():
    spans = Spans()
    with spans.span("step"), spans.span("rollout") as attributes:
        attributes["episodes"] = 2
        start = spans.now()
        worker = threading.Thread(target=spans.add, args=("retrieve", "retriever", start), kwargs={"queries": 3})
        worker.start()
        worker.join()
    with pytest.raises(KeyError), spans.span("next"):
        raise KeyError
    retrieve, rollout, step, following = spans.take()
    assert [s.name for s in (retrieve, rollout, step, following)] == ["retrieve", "rollout", "step", "next"]
    assert retrieve.parent == rollout.id and rollout.parent == step.id and step.parent is following.parent is None
    assert retrieve.trace == rollout.trace == step.trace != following.trace
    assert step.start <= rollout.start <= retrieve.start <= retrieve.end <= rollout.end <= step.end <= following.start
    assert rollout.attributes == {"episodes": 2} and retrieve.attributes == {"queries": 3}
    assert len(step.trace) == 32 and len(step.id) == 16 and not spans.take()


def test_without_spans_no_clock_is_read(monkeypatch):
    monkeypatch.setattr("r3lite.core.spans.time", None)
    with NO_SPANS.span("rollout", episodes=1) as attributes:
        assert attributes == {"episodes": 1}
    NO_SPANS.add("retrieve", "retriever", NO_SPANS.now(), queries=3)
    assert not NO_SPANS.take()


@pytest.fixture(scope="module")
def plain(cold):
    assert ppo.main(arguments(cold, cold / "plain", *MORE)) == 0
    return cold / "plain"


MORE = ("--eval-data", str(WORLD / "test.jsonl"), "--eval-questions", "2", "--eval-every", "2")


@pytest.fixture(scope="module")
def chrome(cold):
    """Stopped after two steps, killed in the middle of a line of the third, and gone on with."""
    output = cold / "chrome"
    flags = arguments(cold, output, *MORE, "--track-spans", "chrome", "--resume", "auto")
    assert ppo.main([*flags, "--stop-after", "2"]) == 0
    text = (output / CHROME).read_text(encoding="utf-8")
    rollout = next(e for e in json.loads(text) if e["name"] == "rollout")
    third = json.dumps(rollout | {"args": {"step": 3}})
    (output / CHROME).write_text(text.removesuffix(CLOSED) + f",\n{third},\n{third[:30]}", encoding="utf-8")
    assert ppo.main(flags) == 0
    return output


@pytest.mark.slow
def test_numbers_are_the_same_with_spans_and_without(plain, chrome):
    assert_same_runs(plain, chrome)
    assert [r["step"] for r in logged(chrome, run_files.METRICS)] == [0, 1, 2, 3, 4]
    assert not (plain / CHROME).exists() and not (plain / OPENTELEMETRY).exists()


def test_the_chrome_trace_of_a_run_that_was_interrupted(chrome):
    events = json.loads((chrome / CHROME).read_text(encoding="utf-8"))
    spans = [e for e in events if e["ph"] == "X"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == sorted(["run", "retriever", *(f"episode {i}" for i in range(1, 7))])
    assert [e["args"]["step"] for e in spans if e["name"] == "step"] == [1, 2, 3, 4]
    assert [e["args"]["step"] for e in spans if e["name"] == "validate"] == [0, 2, 4]
    for name in ("rollout", "score", "update", "checkpoint"):
        assert [e["args"]["step"] for e in spans if e["name"] == name] == [1, 2, 3, 4], name
    lasting = {e["args"]["step"]: e for e in spans if e["name"] == "rollout"}
    for record in logged(chrome, run_files.METRICS)[1:]:  # the same clock, read twice
        assert lasting[record["step"]]["dur"] / 1e6 == pytest.approx(record["time/rollout"], abs=0.01)
    for tid in names:  # on one track, spans enclose each other or follow
        ends = []
        for e in sorted((e for e in spans if e["tid"] == tid), key=lambda e: (e["ts"], -e["dur"])):
            while ends and ends[-1] <= e["ts"] + 0.5:
                ends.pop()
            assert all(e["ts"] + e["dur"] <= end + 0.5 for end in ends), e
            ends.append(e["ts"] + e["dur"])


def _end(event: dict) -> float:
    return event["ts"] + event["dur"]


def turns(step: dict) -> int:
    """Two if the answer was forced: it is written in a turn of its own, after the one that was cut off or asked."""
    was_forced = {base.TURN_CUT_OFF, base.ANSWER_WAS_FORCED} & set(step.get("faults", []))
    return 2 if was_forced and step.get("answer") else 1


def test_generations_have_the_prompt_lengths_of_the_episodes(chrome):
    """Of each episode, as many as it has turns; together they wrote what episodes.jsonl holds, on which the mean length
    of the metrics is built."""
    events = json.loads((chrome / CHROME).read_text(encoding="utf-8"))
    rollouts = {e["args"]["step"]: e for e in events if e["name"] == "rollout"}
    for record in logged(chrome, run_files.METRICS)[1:]:
        rollout = rollouts[record["step"]]
        inside = [
            e for e in events
            if e["name"] == "generation" and rollout["ts"] <= e["ts"] and _end(e) <= _end(rollout)
        ]  # fmt: skip
        episodes = [e for e in logged(chrome, "episodes.jsonl") if e["step"] == record["step"]]
        assert len(inside) == sum(turns(s) for e in episodes for s in e["steps"])
        new_tokens = sum(e["args"]["new_tokens"] for e in inside)
        assert new_tokens / 6 == pytest.approx(record["completions/mean_length"])
        last = {}
        numbers = {}  # of the turns on each track
        for e in sorted(inside, key=lambda e: e["ts"]):  # a prompt holds all that came before
            numbers.setdefault(e["tid"], []).append(e["args"]["turn"])
            previous = last.get(e["tid"])
            if previous:
                assert e["args"]["prompt_tokens"] >= previous["prompt_tokens"] + previous["new_tokens"]
            last[e["tid"]] = e["args"]
        expected = [[n for n, step in enumerate(e["steps"], 1) for _ in range(turns(step))] for e in episodes]
        assert sorted(numbers.values()) == sorted(expected)


def test_opentelemetrys_own_messages_hold_the_spans_of_sft(cold):
    trace = pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2")
    from google.protobuf import json_format

    output, rows = cold / "sft-spans", cold / "rows.jsonl"
    flags = ["--preset", "tiny", "--data", str(rows), "--max-steps", "3", "--validate-every", "2", "--save-every", "2"]
    flags += ["--output", str(output), "--track-spans", "opentelemetry", "--resume", "auto"]
    assert sft.main([*flags, "--stop-after", "2"]) == 0
    with open(output / OPENTELEMETRY, "a", encoding="utf-8") as file:
        file.write('{"resourceSpans":[{"res')  # torn by a kill
    assert sft.main(flags) == 0
    spans_by_step = []
    for line in logged(output, OPENTELEMETRY):
        for span in line["resourceSpans"][0]["scopeSpans"][0]["spans"]:
            for key in {"traceId", "spanId", "parentSpanId"} & span.keys():  # hexadecimal in OTLP, base64 in protobuf
                span[key] = base64.b64encode(bytes.fromhex(span[key])).decode()
        data = json_format.ParseDict(line, trace.TracesData(), ignore_unknown_fields=False)
        (resource,) = data.resource_spans
        about = {a.key: a.value.string_value for a in resource.resource.attributes}
        assert about == {"service.name": "r3lite", "r3lite.command": "sft", "r3lite.run": "sft-spans"}
        spans_by_step.append(resource.scope_spans[0].spans)
    names = [[s.name for s in spans] for spans in spans_by_step]
    assert names == [
        ["update", "step"],
        ["update", "validate", "checkpoint", "step"],
        ["update", "validate", "checkpoint", "step"],
    ]
    for step, spans in enumerate(spans_by_step, 1):
        (root,) = [s for s in spans if not s.parent_span_id]
        assert root.name == "step" and len(root.trace_id) == 16 and len(root.span_id) == 8
        for s in spans:
            assert s.trace_id == root.trace_id and s.kind == trace.Span.SPAN_KIND_INTERNAL
            assert s is root or s.parent_span_id == root.span_id
            assert (
                root.start_time_unix_nano <= s.start_time_unix_nano <= s.end_time_unix_nano <= root.end_time_unix_nano
            )
            assert {a.key: a.value for a in s.attributes}["r3lite.step"].int_value == step
    assert len({spans[0].trace_id for spans in spans_by_step}) == 3
