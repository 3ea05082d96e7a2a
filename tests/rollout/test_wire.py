"""What crosses the network is refused unless a trainer could have sampled it: one test for each check."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from r3lite.assembly.rollout_service import RolloutService
from r3lite.core.episode import Question, Step
from r3lite.core.errors import R3LiteError
from r3lite.core.records import InvalidRecord, Record, Source
from r3lite.rollout.remote import RolloutWorker
from r3lite.rollout.sequence import Sequence
from r3lite.rollout.uniforms import Uniforms
from r3lite.rollout.wire import (
    AdapterFiles,
    EpisodeLimits,
    Ticket,
    check_start,
    identity_of,
    sequence_from_json,
    tickets_from_json,
    tickets_to_json,
)
from tests.errors import raises

QUESTION = Question("1", "Who?", ())
LIMITS = EpisodeLimits(vocabulary=100, max_length=6)
SEARCH = Step.asking("I look.", "Brenn").to_json()
ANSWER = Step("I know.", answer="Ann").to_json()
# Two prompt tokens, a step of two tokens, a document of one, and an answer of one.
EPISODE = {
    "tokens": [1, 2, 3, 4, 5, 99],
    "actions": "001101",
    "logprobs": [-1.0, -0.5, 0.0],
    "steps": [SEARCH, ANSWER],
    "step_ends": [3, 5],
    "finish": "answered",
}
ADAPTER = AdapterFiles(b"{}\0weights")
FACTS = {"--model": "toy"}
PEER = SimpleNamespace(holding=nullcontext)


def read(**changes) -> Sequence:
    return sequence_from_json(Record(EPISODE | changes, Source("the reply")), QUESTION, LIMITS)


def test_a_sound_episode_is_read_as_it_is():
    sequence = read()
    assert sequence.tokens == EPISODE["tokens"] and sequence.logprobs == EPISODE["logprobs"]
    assert sequence.action_mask == [False, False, True, True, False, True] and sequence.step_ends == [3, 5]


# By what the refusal says.
WRONG = {
    "not a list of whole numbers from 0 to 99": {
        "an id that is beyond the vocabulary": {"tokens": [1, 2, 3, 4, 5, 100]},
        "an id below zero": {"tokens": [1, 2, 3, 4, 5, -1]},
        "true as an id": {"tokens": [1, 2, 3, 4, 5, True]},
        "an id with a point": {"tokens": [1, 2, 3, 4, 5, 6.0]},
    },
    "tokens are 7, more than --max-length 6": {
        "more tokens than fit": {"tokens": [1, 1, 2, 3, 4, 5, 6], "actions": "0001101", "step_ends": [4, 6]},
    },
    "not a text of 0 and 1": {
        "an action that is neither": {"actions": "00110x"},
        "another action that is neither": {"actions": "201101"},
    },
    "tokens, actions, logprobs and steps are inconsistent": {
        "fewer actions": {"actions": "01101"},
        "fewer log-probabilities": {"logprobs": [-1.0, -0.5]},
        "more log-probabilities": {"logprobs": [-1.0, -0.5, -0.5, -0.5]},
        "fewer steps": {"steps": [ANSWER]},
    },
    "not a list of log-probabilities": {
        "a log-probability above 0": {"logprobs": [-1.0, -0.5, 0.1]},
        "a log-probability below fp32": {"logprobs": [-1.0, -0.5, -1e39]},
        "true as a log-probability": {"logprobs": [-1.0, -0.5, False]},
    },
    "step_ends are not the ends of turns": {
        "step ends in another order": {"step_ends": [5, 3]},
        "step ends in another order, the last at the end": {"step_ends": [3, 2, 5], "steps": [SEARCH, SEARCH, ANSWER]},
        "two steps that end at one token": {"step_ends": [5, 5]},
        "a step that ends at a prompt's token": {"step_ends": [1, 5]},
        "a step that ends at a document's token": {"step_ends": [4, 5]},
        "a last step that ends before the end": {"step_ends": [2, 3]},
        "no steps": {"step_ends": [], "steps": []},
    },
    "not a list of whole numbers from 0 to 5": {
        "a step end beyond the tokens": {"step_ends": [3, 6]},
    },
    "not one of answered, cut_off, malformed": {
        "an unknown finish": {"finish": "won"},
    },
    "does not fit the answers of the steps": {
        "an answer of an episode that was cut off": {"finish": "cut_off"},
        "an end with an answer that is not there": {"steps": [SEARCH, SEARCH]},
        "an answer before the last step": {"steps": [ANSWER, ANSWER]},
    },
}


@pytest.mark.parametrize(("cause", "fault"), [(cause, fault) for cause, faults in WRONG.items() for fault in faults])
def test_an_episode_that_could_not_have_been_sampled_is_refused(cause, fault):
    with raises(InvalidRecord, "bad-record", cause):
        read(**WRONG[cause][fault])


@pytest.mark.parametrize(
    "changes",
    [{"tokens": [1, 7]}, {"action_mask": [False, True], "logprobs": [-1.0]}, {"tokens": [1, 2, 9]}],
    ids=["another token", "another mask", "a longer prompt"],
)
def test_an_episode_begins_with_the_prompt_of_its_question(changes):
    tokens = changes.get("tokens", [1, 2])
    start = {"tokens": tokens, "action_mask": [False] * len(tokens)} | changes
    check_start(read(), Sequence(QUESTION, tokens=[1, 2], action_mask=[False, False], stream=Uniforms(0)))
    with raises(InvalidRecord, "wire-prompt-differs"):
        check_start(read(), Sequence(QUESTION, **start, stream=Uniforms(0)))


def test_an_episode_goes_on_with_the_log_probabilities_of_its_first_steps():
    start = {"tokens": [1, 2, 3], "action_mask": [False, False, True], "stream": Uniforms(0)}
    check_start(read(), Sequence(QUESTION, **start, logprobs=[-1.0]))
    with raises(InvalidRecord, "wire-prompt-differs"):
        check_start(read(), Sequence(QUESTION, **start, logprobs=[-2.0]))


def test_an_adapter_is_two_files(tmp_path):
    ADAPTER.write(tmp_path)
    with raises(InvalidRecord, "wire-adapter"):
        AdapterFiles(b"{}").write(tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_worker_takes_an_adapter_by_its_hash_alone(monkeypatch):
    service = RolloutService(None, None, FACTS)
    monkeypatch.setattr(service, "_switch_to", lambda adapter: setattr(service, "version", adapter.version))
    with raises(R3LiteError, "adapter-damaged", ADAPTER.version):
        service.answer("/adapter/" + "0" * 32, ADAPTER.body, PEER)
    assert service.version == ""
    assert service.answer(f"/adapter/{ADAPTER.version}", ADAPTER.body, PEER) == {"adapter": ADAPTER.version}


def test_a_worker_quotes_a_hash_that_is_none_in_few_words():
    with raises(R3LiteError, "adapter-damaged", ADAPTER.version) as error:
        RolloutService(None, None, FACTS).answer("/adapter/" + "x" * 3000, ADAPTER.body, PEER)
    assert len(str(error.value)) < 300


def test_a_worker_takes_earlier_messages_of_the_roles_of_chats_only():
    (question,) = tickets_to_json([Ticket(QUESTION, "0", 0)])["questions"]
    for role in ("user", "tool" * 1000):
        earlier = [{"role": role, "content": "Hi"}]
        request = {"questions": [question | {"earlier": earlier}], "episodes": [{"question": 0, "seed": "0"}]}
        record = Record(request, Source("the request"))
        if role == "user":
            assert tickets_from_json(record, LIMITS)[0].question.earlier == tuple(earlier)
            continue
        with raises(InvalidRecord, "bad-record", "questions[0].earlier[0].role is 'tool") as error:
            tickets_from_json(record, LIMITS)
        assert len(str(error.value)) < 300


@pytest.mark.parametrize("change", [{"identity": "another"}, {"adapter": "another"}])
def test_a_worker_samples_nothing_for_another_trainer(change):
    service = RolloutService(None, None, FACTS)
    service.version = ADAPTER.version
    request = {"identity": identity_of(FACTS), "adapter": ADAPTER.version, "questions": [], "episodes": []} | change
    assert service.answer("/sample", Record(request, Source("")), PEER) == {"differs": True}


class Answering:
    """A link whose server gives one reply."""

    url = "http://worker"

    def __init__(self, reply: dict):
        self.reply = reply

    def ask(self, path, content, server, read):
        return read(Record(self.reply, Source("the reply")))


def test_a_worker_with_other_settings_is_refused():
    version = {"adapter": ADAPTER.version, "dtype": "fp32"}
    RolloutWorker(Answering(version | {"facts": FACTS}), FACTS, None).check()
    with raises(R3LiteError, "worker-differs", "--model is other"):
        RolloutWorker(Answering(version | {"facts": {"--model": "other"}}), FACTS, None).check()


@pytest.mark.parametrize(
    "episodes",
    [
        [EPISODE | {"adapter": "another"}],
        [EPISODE | {"adapter": ADAPTER.version}] * 2,
        [],
    ],
    ids=["of another adapter", "more than tickets", "none"],
)
def test_episodes_are_as_many_as_tickets_and_of_the_adapter_that_was_sent(episodes, monkeypatch):
    worker = RolloutWorker(Answering({"episodes": episodes}), FACTS, None)
    worker.adapter_version = ADAPTER.version
    monkeypatch.setattr(worker, "_sequence", lambda episode, ticket: ticket)
    ticket = Ticket(QUESTION, "0", 0)
    with raises(InvalidRecord, "worker-episode-count"):
        worker.sample([ticket], ADAPTER, None)
    worker.link.reply = {"episodes": [EPISODE | {"adapter": ADAPTER.version}]}
    assert worker.sample([ticket], ADAPTER, None) == [ticket]
