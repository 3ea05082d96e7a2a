"""What a listener is told while an engine samples: the text of each turn, and each step when it is complete."""

import dataclasses

import pytest

from r3lite.core.episode import Document, Failure, Question
from r3lite.protocols.r3 import R3
from r3lite.protocols.registry import build_protocol
from r3lite.rollout.sequence import Listener
from r3lite.settings import LengthSettings, ProtocolSettings

PROTOCOL = R3("Q: {question}", "The retrieval documents:\n{documents}\nNow Step {step}.")
LENGTHS = LengthSettings(max_hops=2, max_new_tokens=120, max_length=3000, max_document_tokens=30)
DOCUMENTS = [Document("1", "Rome", "Rome is in Italy.")]
SPLIT = "\u6771\u4eac, caf\u00e9 and \U0001f469\u200d\U0001f680"  # characters of two to four bytes: of as many tokens


def ask(number, query):
    return f"Step {number}:\nThe problem analysis: look\nThe retrieval query: {query}"


def answer(number, text):
    return f"Step {number}:\nThe problem analysis: known\nThe final answer: {text}"


class Heard(Listener):
    """Keeps what it is told: the pieces of each turn, and each completed step with its documents' ids."""

    def __init__(self):
        super().__init__(self.take, self.close)
        self.turns, self.steps, self.failures = [[]], [], []

    def take(self, piece):
        self.turns[-1].append(piece)

    def close(self, sequence):
        self.turns.append([])
        step = sequence.steps[-1]
        self.steps.append((next(iter(step.queries), None), [d.id for d in step.documents], step.answer))
        self.failures.append(sequence.failure)

    @property
    def texts(self):
        return ["".join(pieces) for pieces in self.turns[:-1]]


@pytest.fixture
def listened(scripted):
    """Runs a script with a listener for each question: the listeners, the sequences, and the engine."""

    def run(script, retrieve=lambda pairs: [DOCUMENTS for _ in pairs], protocol=PROTOCOL, lengths=LENGTHS, **settings):
        engine = scripted(script, protocol=protocol, lengths=lengths, **settings)
        questions = [Question(id, "who?", ()) for id in script]
        heard = [Heard() for _ in questions]
        return heard, engine.run(questions, list(script), retrieve, listeners=heard), engine

    return run


def test_several_are_told_apart_and_change_nothing(listened):
    script = {
        "a": [ask(1, "first"), ask(2, "second"), answer(3, "London")],
        "b": [answer(1, "at once")],
        "c": [ask(1, "one"), answer(2, "c")],
    }
    heard, sequences, engine = listened(script)
    assert [h.texts for h in heard] == list(script.values())
    assert heard[0].steps == [("first", ["1"], None), ("second", ["1"], None), (None, [], "London")]
    alone = engine.run([s.question for s in sequences], list(script), lambda pairs: [DOCUMENTS for _ in pairs])
    assert [(s.tokens, s.logprobs) for s in alone] == [(s.tokens, s.logprobs) for s in sequences]


def test_characters_come_whole(listened):
    (heard,), _, _ = listened({"a": [answer(1, SPLIT)]})
    (pieces,) = heard.turns[:-1]
    assert heard.texts == [answer(1, SPLIT)]
    assert all("\ufffd" not in piece and piece for piece in pieces)
    assert "\U0001f469" in pieces and "\u6771" in pieces  # each at once when its last byte is there


def test_a_turn_that_is_cut_in_a_character_is_told_to_its_end(listened):
    text = answer(1, "\u6771\u4eac")
    lengths = dataclasses.replace(LENGTHS, max_new_tokens=len(text.encode()) - 1)
    (heard,), (sequence,), _ = listened({"a": [text]}, lengths=lengths)
    assert heard.texts == [text[:-1] + "\ufffd"] and sequence.finish == "cut_off"


def test_a_stop_string_is_not_told_and_what_looked_like_one_is(listened):
    near = ask(1, "The retrieval doctor")  # begins as the stop string does
    stopped = "Step 2:\nThe problem analysis: The retrieval d\nThe retrieval query: two\nThe retrieval documents:..."
    (heard,), _, _ = listened({"a": [near, stopped, answer(3, "x")]})
    assert heard.texts == [
        near,
        "Step 2:\nThe problem analysis: The retrieval d\nThe retrieval query: two\n",
        answer(3, "x"),
    ]
    assert not any("The retrieval do" in piece for piece in heard.turns[1])


def test_closing_tags_are_held_back(listened):
    turns = ["<think> a < b </think><search> one </search>...", "<think> so </think><answer> two </answer>..."]
    (heard,), (sequence,), _ = listened({"a": turns}, protocol=build_protocol(ProtocolSettings(format="tags")))
    assert heard.texts == ["<think> a < b </think><search> one ", "<think> so </think><answer> two "]
    assert sequence.episode().prediction == "two"


def test_a_forced_answer_is_told_with_its_prefix(listened):
    script = {"a": [ask(1, "one"), ask(2, "two"), ask(3, "three"), " Rome"]}
    (heard,), _, _ = listened(script)
    assert heard.texts == [*script["a"][:2], f"{script['a'][2]}\n{PROTOCOL.answer_heading} Rome"]
    assert heard.steps[2:] == [(None, [], "Rome")]


def test_a_forced_answer_stands_below_a_turn_without_an_analysis_that_was_cut_off(listened):
    """It stood in the line of the turn, as nothing of that had been parsed."""
    text = "Step 1: The document asks for more"
    lengths = dataclasses.replace(LENGTHS, max_new_tokens=len(text))
    (heard,), (sequence,), _ = listened({"a": [text, " Rome"]}, lengths=lengths)
    assert sequence.steps[0].analysis == ""
    assert heard.texts == [f"{text}\n{PROTOCOL.answer_heading} Rome"]


def test_a_step_whose_documents_do_not_fit_is_told_with_its_forced_answer_alone(listened):
    """It was told before, too: without any step, which was an IndexError of `ask` and `serve`."""
    searching = ask(1, "one")
    lengths = dataclasses.replace(LENGTHS, max_length=360)  # tokens are bytes
    (heard,), (sequence,), _ = listened({"a": [searching, " Rome"]}, lengths=lengths)
    assert sequence.steps[0].faults == ("no_room",)
    assert heard.steps == [(None, [], "Rome")]
    assert heard.texts == [f"{searching}\n{PROTOCOL.answer_heading} Rome"]


def test_a_baselines_given_step_is_told(listened):
    (heard,), _, _ = listened({"a": [None, " Rome"]}, baseline="single-retrieval")
    assert heard.steps == [("who?", ["1"], None), (None, [], "Rome")]
    assert heard.texts == ["", PROTOCOL.answer_heading + " Rome"]


def test_a_failure_is_there_when_the_step_is(listened):
    script = {"a": [ask(1, "one"), answer(2, "x")]}
    (heard,), _, _ = listened(script, retrieve=lambda pairs: [Failure("no disk") for _ in pairs])
    assert heard.steps[0] == ("one", [], None) and heard.failures == ["no disk", "no disk"]


def test_an_engine_goes_on_after_a_listener_ended_a_run(scripted):
    """As Ctrl-C does in the middle of an answer."""
    engine = scripted({"a": [ask(1, "one"), answer(2, "x")]}, protocol=PROTOCOL, lengths=LENGTHS)
    engine.model.train()

    def stop(piece):
        raise KeyboardInterrupt

    def run(listeners=None):
        return engine.run([Question("a", "who?", ())], ["a"], lambda pairs: [DOCUMENTS for _ in pairs], None, listeners)

    (expected,) = run()
    with pytest.raises(KeyboardInterrupt):
        run([Listener(stop, lambda sequence: None)])
    (resumed,) = run()
    assert resumed.tokens == expected.tokens and resumed.logprobs == expected.logprobs and engine.model.training
