"""Limits: requests a minute, and caps on requests and on cost."""

import threading

import pytest

from r3lite.llm.limits import Budget, RateLimiter
from tests.marks import ASK, ask


def test_requests_a_minute(gemini, client, clock, said):
    gemini.script = [said('{"mark": 1}')]
    client(judge_rpm=5, judge_concurrency=1).generate_all([ask(str(i)) for i in range(12)])
    assert clock.now - 1000 == pytest.approx(120)  # 5 now, 5 after a minute, 2 after another


def test_the_limiter_under_threads(clock):
    limiter, lock, sent = RateLimiter(3, clock, clock.sleep), threading.Lock(), []

    def work():
        for _ in range(4):
            limiter.wait()
            with lock:
                sent.append(clock.now)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counted = sorted(limiter._sent)
    assert len(sent) == 12 and len(counted) <= 3
    assert clock.now - 1000 >= 180


def test_one_429_holds_everybody(clock):
    limiter = RateLimiter(100, clock, clock.sleep)
    limiter.hold(30)
    limiter.wait()
    assert clock.slept == [30]


def test_the_cap_on_requests(gemini, client, said):
    gemini.script = [said('{"mark": 1}')]
    asked = client(judge_max_calls=2, judge_concurrency=3)
    replies = asked.generate_all([ask(str(i)) for i in range(5)])
    assert sorted(r.failure or "" for r in replies) == ["", "", "capped", "capped", "capped"]
    assert len(gemini.requests) == 2


def test_retries_count_towards_the_cap(gemini, client, failed):
    gemini.script = [failed(503)]
    assert client(judge_max_calls=2).generate(ASK).failure == "capped"
    assert len(gemini.requests) == 2


def test_the_cap_on_cost_is_never_passed(gemini, client, said):
    # Each reply costs 0.0012 dollars, and may cost 0.0025 and the prompt by its output limit of 1,000 tokens.
    gemini.script = [said('{"mark": 1}', tokens=(4, 480))]
    asked = client(judge_max_cost=0.01, judge_concurrency=4)
    requests = [ask(str(i), max_output_tokens=1000) for i in range(20)]
    replies = asked.generate_all(requests)
    done = sum(r.failure is None for r in replies)
    assert asked.counts()["cost"] == pytest.approx(done * (4 * 0.3e-6 + 480 * 2.5e-6))
    assert asked.counts()["cost"] <= 0.01
    assert done == 7  # after seven, an eighth might cost more than is left
    assert {r.failure for r in replies} == {None, "capped"}


def test_reservations_leave_no_rest():
    budget = Budget(max_cost=1.0)
    for _ in range(1000):
        assert budget.reserve(0.1) is None
        budget.settle(0.1, 0.0)
    assert budget.reserve(1.0) is None
