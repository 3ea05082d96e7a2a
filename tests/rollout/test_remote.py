"""A trainer beside workers that send what they should not: none of it ends the run, and none is learned from."""

import time
from dataclasses import replace

import pytest

from r3lite.assembly.rollout_service import RolloutService
from r3lite.core.episode import Question
from r3lite.core.errors import R3LiteError
from r3lite.llm.http_client import Link, WrongReply
from r3lite.protocols.r3 import R3
from r3lite.rollout.remote import RemoteEngine, RolloutWorker
from r3lite.rollout.sampling import Sampler
from r3lite.rollout.wire import AdapterFiles, Ticket
from r3lite.settings import LengthSettings
from tests.errors import raises

PROTOCOL = R3("Q: {question}", "The retrieval documents:\n{documents}\nNow Step {step}.")
LENGTHS = LengthSettings(max_hops=2, max_new_tokens=120, max_length=1000)
FACTS = {"--model": "toy"}
ADAPTER = AdapterFiles(b"{}\0weights")
QUESTIONS = [Question(id, f"who is {id}?", ()) for id in "abcd"]
ANSWER = "Step 1:\nThe problem analysis: known\nThe final answer: "
SEEDS = list("1234")


class Broken(RolloutService):
    """A worker whose first episode of each request has other fields, or which fails."""

    change: dict | Exception | None = None

    def answer(self, path, request, peer):
        reply = super().answer(path, request, peer)
        if path == "/sample" and isinstance(self.change, Exception):
            raise self.change
        if path == "/sample" and self.change:
            reply["episodes"][0] |= self.change
        return reply


@pytest.fixture
def workers(scripted, running):
    """A worker that can be broken, a sound one, and the engine that asks both; two more engines at their places."""
    script = {question.id: [ANSWER + question.id] for question in QUESTIONS}
    engines = [scripted(script, protocol=PROTOCOL, lengths=LENGTHS) for _ in range(2)]
    services = [Broken(engines[0], None, FACTS), RolloutService(engines[1], None, FACTS)]
    servers = []
    for service in services:
        service.version = ADAPTER.version
        servers.append(RolloutWorker(Link(running(service), "", 30, 1 << 24), FACTS, engines[0].layout_of))
        servers[-1].check()
    remote = RemoteEngine(servers, save_adapter=None)
    remote.adapter = ADAPTER
    yield services[0], remote
    remote.close()


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (None, None),
        ({"tokens": [1 << 30]}, "tokens is [1073741824], not a list of whole numbers from 0 to"),
        ({"tokens": [5] * 2000}, "tokens are 2,000, more than --max-length 1,000"),
        ({"actions": "0" * 5, "tokens": [5] * 5, "logprobs": []}, "step_ends"),
        ({"tokens": [5, 6], "actions": "01", "logprobs": [-1], "step_ends": [1]}, "does not begin as question"),
        ({"logprobs": [-(10**400)]}, "not a list of log-probabilities"),
        ({"adapter": "another"}, "these are not 1 episodes of the adapter"),
        (KeyError("of ours"), "status 500"),
        (IndexError("of ours"), "internal error, see the server's log"),
    ],
)
def test_what_a_broken_worker_sends_is_sampled_elsewhere(workers, capfd, change, cause):
    service, remote = workers
    service.change = change
    url = remote.servers[0].link.url
    sequences = remote.run(QUESTIONS, SEEDS, None)
    assert [s.episode().prediction for s in sequences] == [q.id for q in QUESTIONS]
    warnings = [line for line in capfd.readouterr().err.splitlines() if "another server samples" in line]
    assert bool(warnings) == bool(cause) == bool(remote.end_round(1, None)["rollout/moved_episodes"])
    assert all(url in line and cause in line for line in warnings), warnings


def test_without_another_server_the_run_says_which_one_is_broken(workers):
    service, remote = workers
    service.change = {"tokens": [1 << 30]}
    remote.servers.pop()
    with raises(R3LiteError, "no-worker-left", remote.servers[0].link.url, "/sample did not"):
        remote.run(QUESTIONS, SEEDS, None)


def test_an_abandoned_request_is_not_sampled_to_its_end(engine_of, running, monkeypatch):
    """It was, while the trainer had the same episodes sampled by another worker, and the next request waited."""

    steps = []
    sample = Sampler.__call__

    def slow(sampler, logits, uniforms):
        steps.append(len(uniforms))
        time.sleep(0.02)
        return sample(sampler, logits, uniforms)

    monkeypatch.setattr(Sampler, "__call__", slow)
    engine = engine_of(PROTOCOL, replace(LENGTHS, max_new_tokens=900))
    service = RolloutService(engine, lambda pairs: [[] for _ in pairs], FACTS)
    service.version = ADAPTER.version
    worker = RolloutWorker(Link(running(service), "", 1, 1 << 24), FACTS, engine.layout_of)
    worker.check()
    with pytest.raises(R3LiteError, match="does not answer"):
        worker.sample([Ticket(QUESTIONS[0], SEEDS[0], 0)], ADAPTER, None)
    assert service.one_at_a_time.acquire(timeout=10)  # within a token's time, not at the end of the episode
    service.one_at_a_time.release()
    assert 0 < len(steps) < 200


class Slots:
    """A server of two requests at a time. Its first request fails if `fails`; the others take `seconds`."""

    slots = 2

    def __init__(self, fails: bool, seconds: float):
        self.fails = fails
        self.seconds = seconds
        self.requests = 0
        self.link = Link("http://127.0.0.1:9", "", 1, 1 << 10)  # not used; the engine closes it

    def sample(self, tickets, adapter, retrieve):
        self.requests += 1
        if self.fails and self.requests == 1:
            raise WrongReply("it wrote nonsense", "", code="worker-reply")
        time.sleep(self.seconds)
        return tickets


def test_a_server_that_failed_gets_no_more_requests_also_if_its_other_request_is_answered():
    broken = Slots(fails=True, seconds=0.1)
    sound = Slots(fails=False, seconds=0.5)
    remote = RemoteEngine([broken, sound], save_adapter=None)
    assert remote._sampled(list(range(8)), ADAPTER, None) == list(range(8))
    assert (broken.requests, sound.requests) == (2, 3)
    remote.close()
    alone = RemoteEngine([Slots(fails=True, seconds=0.1)], save_adapter=None)
    with raises(R3LiteError, "no-worker-left", "it wrote nonsense"):
        alone._sampled(list(range(8)), ADAPTER, None)
    assert alone.servers[0].requests == 2
    alone.close()
