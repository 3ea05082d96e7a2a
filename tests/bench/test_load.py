"""The figures of a load, from requests whose times are known."""

import pytest

from bench.stress import load


def test_requests_that_a_restart_delayed_are_counted_apart():
    requests = load.Load(sent=202, answered=202, resent=3)
    requests.latencies = [(i * 0.4, 0.1) for i in range(100)] + [(60 + i * 0.4, 0.2) for i in range(100)]
    requests.latencies += [(39.95, 12.0), (45.0, 10.0)]  # under way as the server ended; sent while it was away
    requests.memory = [(t, 100.0 + t / 10) for t in range(0, 100, 5)]
    figures = load.report(requests, start=0.0, stopped=40.0, restarted=55.0, end=100.0)
    assert (figures["delayed_by_restart"], figures["longest_delay_seconds"], figures["away_seconds"]) == (2, 12.0, 15.0)
    assert figures["requests_per_second"] == round(200 / 85, 1)
    assert 100 <= figures["p50_ms"] <= 200 and figures["p99_ms"] == 200
    # After the first fifth of each time: from 101.0 at second 10 to 104.0, and from 106.5 at 65 to 109.5.
    assert figures["memory_growth"] == pytest.approx([104.0 / 101.0 - 1, 109.5 / 106.5 - 1], abs=1e-4)


@pytest.mark.parametrize(
    "kind, reply, good",
    [
        ("retrieve", {"result": [[{"document": {}}]]}, True),
        ("retrieve", {"result": []}, False),
        ("serve", {"final_answer": ""}, True),
        ("serve", {"error": "busy"}, False),
    ],
)
def test_what_counts_as_an_answer(kind, reply, good):
    assert load.is_answer(kind, reply) is good
