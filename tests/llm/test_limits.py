"""Limits: requests a minute, and caps on requests and on cost."""

import threading

import pytest

from r3lite.llm.limits import Budget, RateLimiter
from tests.fake_gemini import error_reply, text_reply
from tests.marks import ASK, ask


def test_requests_a_minute(gemini, client, clock):
    gemini.script = [text_reply('{"mark": 1}')]
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


def test_the_cap_on_requests(gemini, client):
    gemini.script = [text_reply('{"mark": 1}')]
    llm = client(judge_max_calls=2, judge_concurrency=3)
    replies = llm.generate_all([ask(str(i)) for i in range(5)])
    assert sorted(r.failure or "" for r in replies) == ["", "", "capped", "capped", "capped"]
    assert len(gemini.requests) == 2


def test_retries_count_towards_the_cap(gemini, client):
    gemini.script = [error_reply(503)]
    assert client(judge_max_calls=2).generate(ASK).failure == "capped"
    assert len(gemini.requests) == 2


def test_the_cap_on_cost_is_never_passed(gemini, client):
    # Each reply costs 0.0012 dollars, and may cost 0.0038 and the prompt by its output limit of 1,512 tokens.
    gemini.script = [text_reply('{"mark": 1}', tokens=(4, 480))]
    llm = client(judge_max_cost=0.01, judge_concurrency=4)
    requests = [ask(str(i), max_output_tokens=1000) for i in range(20)]
    replies = llm.generate_all(requests)
    done = sum(r.failure is None for r in replies)
    assert llm.counts()["cost"] == pytest.approx(done * (4 * 0.3e-6 + 480 * 2.5e-6))
    assert llm.counts()["cost"] <= 0.01
    assert done == 6  # after six, a seventh might cost more than is left
    assert {r.failure for r in replies} == {None, "capped"}


PROMPT, TEXT = "How good is it? " * 100, '{"mark": 1}'


@pytest.mark.parametrize(
    "usage, tokens",
    [
        ({"promptTokenCount": 100, "candidatesTokenCount": 10, "thoughtsTokenCount": 5}, (100, 15)),
        (None, (533, 4)),  # estimated: 1,600 and 11 bytes of 3 a token
        ({}, (533, 4)),
        ({"promptTokenCount": -(10**9), "candidatesTokenCount": -(10**9)}, (533, 4)),
        ({"promptTokenCount": 0, "candidatesTokenCount": 0}, (533, 4)),
        ({"promptTokenCount": 1.5, "candidatesTokenCount": "10"}, (533, 4)),
        ({"promptTokenCount": True, "candidatesTokenCount": []}, (533, 4)),
        ({"promptTokenCount": 10**30, "candidatesTokenCount": None}, (533, 4)),
        # Thoughts, which cannot be counted here, are as many as the output limit allows.
        ({"promptTokenCount": 100, "candidatesTokenCount": 10, "thoughtsTokenCount": -1e9}, (100, 10 + 2048 + 512)),
    ],
)
def test_counts_of_tokens_that_cannot_be_are_estimated(gemini, client, usage, tokens):
    """Negative counts gave back what the cap had counted."""
    answer = text_reply(TEXT)
    answer.body["usageMetadata"] = usage
    gemini.script = [answer]
    llm = client()
    assert llm.generate(ask(PROMPT)).value.mark == 1
    counts = llm.counts()
    assert (counts["input_tokens"], counts["output_tokens"]) == tokens
    assert counts["cost"] == pytest.approx(tokens[0] * 0.3e-6 + tokens[1] * 2.5e-6, rel=0.05)


def test_a_usage_that_is_no_object_is_a_malformed_reply_at_its_full_price(gemini, client):
    answer = text_reply(TEXT)
    answer.body["usageMetadata"] = [7]
    gemini.script = [answer]
    llm = client()
    assert llm.generate(ask(PROMPT)).failure == "malformed"
    assert llm.counts()["cost"] == pytest.approx(533 * 0.3e-6 + 2560 * 2.5e-6, rel=0.01)


def test_a_call_that_breaks_off_counts_as_its_most(gemini, client):
    """What was sent may be billed, though the reply did not come."""
    gemini.script = [text_reply(TEXT, drip="headers")]
    llm = client(judge_timeout=0.3, judge_retries=0)
    llm.generate(ask(PROMPT))
    assert llm.counts()["cost"] == pytest.approx(533 * 0.3e-6 + 2560 * 2.5e-6, rel=0.01)
    for free in (client(judge_base_url="http://127.0.0.1:9", judge_retries=0), client(judge_retries=0)):
        gemini.script = [error_reply(500)]
        assert free.generate(ask(PROMPT)).failure in ("connection", "server")
        assert free.counts()["cost"] == 0


def test_without_a_price_there_is_no_cost(gemini, client):
    gemini.script = [text_reply(TEXT)]
    llm = client(judge_model="of-my-own")
    llm.generate(ASK)
    assert llm.counts()["input_tokens"] == 100 and "cost" not in llm.counts()


def test_reservations_leave_no_rest():
    budget = Budget(max_cost=1.0)
    for _ in range(1000):
        assert budget.reserve(0.1) is None
        budget.settle(0.1, 0.0)
    assert budget.reserve(1.0) is None
