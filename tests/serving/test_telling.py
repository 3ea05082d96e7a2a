"""What is told of a growing answer in each format, and the passages that an answer rests on."""

import itertools

import pytest

from r3lite.core.episode import ANSWERED, CUT_OFF, Document, Episode, Question, Step
from r3lite.protocols.chat import Chat
from r3lite.protocols.layout import Layout
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.transcript import Transcript
from r3lite.serving.asks import Ask
from r3lite.serving.telling import GrowingAnswer, sources_of
from r3lite.settings import LengthSettings, ProtocolSettings

DOCUMENTS = [Document("1", "Rome", "It is the capital of Italy."), Document("2", "Oslo", "Oslo lies in Norway.")]
R3_TURN = "Step 1:\nThe problem analysis: First, Rome.\nThe retrieval query: Rome is where?"
TAGS_TURN = "<think> First, Rome. </think><search> Rome is where? "


def growing(protocol, mode="search"):
    events = []
    transcript = Transcript(Question("q", "where?", ()))
    return GrowingAnswer(Ask("where?", mode, "rl"), transcript, protocol, events.append), transcript, events


@pytest.mark.parametrize(("name", "turn"), [("r3", R3_TURN), ("tags", TAGS_TURN)])
def test_an_analysis_grows_at_its_end_only_and_never_shows_the_beginning_of_a_heading(name, turn):
    ask, _, events = growing(build_protocol(ProtocolSettings(format=name)))
    for character in turn:
        ask.take_text(character)
    analyses = [event["analysis"] for event in events]
    assert all(later.startswith(earlier.rstrip()) for earlier, later in itertools.pairwise(analyses))
    assert analyses[-1] == "First, Rome." and "".join(event["text"] for event in events) == turn
    if name == "r3":  # a search in tags is usable when it is closed
        assert events[-1]["query"] == "Rome is where?"


def test_a_chat_is_its_answer():
    ask, transcript, events = growing(Chat(), "chat")
    ask.take_text("Step 1:")
    ask.take_text(" no, just so")
    assert events[-1]["answer"] == "Step 1: no, just so"
    transcript.finish = CUT_OFF
    answer = ask.answer("why")
    assert (answer.final_answer, answer.finish, answer.why) == ("Step 1: no, just so", CUT_OFF, None)


def test_passages_are_numbered_once_and_cited_word_for_word(tokenizer):
    protocol = build_protocol(ProtocolSettings())
    layout = Layout(tokenizer, protocol, LengthSettings())
    ask, transcript, events = growing(protocol)
    layout.open(transcript)
    turns = [
        (R3_TURN, DOCUMENTS),
        ("Step 2:\nThe problem analysis: Norway?\nThe retrieval query: Oslo?", DOCUMENTS[1:]),
        ("Step 3:\nThe problem analysis: So.\nThe final answer: the capital of Italy", ()),
    ]
    for text, documents in turns:
        ask.take_text(text)
        transcript.write([*tokenizer.encode(text), tokenizer.stop_id])
        layout.close_turn(transcript)
        if transcript.pending:
            layout.splice(transcript, [documents])
        ask.take_step(transcript)
    steps = [event for event in events if event["type"] == "step"]
    assert [[d["number"] for d in step["documents"]] for step in steps] == [[1, 2], [2], []]
    answer = ask.answer("why")
    assert answer.finish == ANSWERED and answer.final_answer == "the capital of Italy" and answer.why is None
    assert [(s.number, s.id, s.cited) for s in answer.sources] == [(1, "1", True), (2, "2", False)]
    assert [step["sources"] for step in answer.steps] == [[1, 2], [2], []]
    assert answer.search_queries == ["Rome is where?", "Oslo?"]
    assert answer.reasoning_trace == "\n".join(text for text, _ in turns)
    assert answer.prompt_tokens + answer.completion_tokens == len(transcript.tokens)


def test_without_an_answer_it_says_why():
    ask, transcript, _ = growing(build_protocol(ProtocolSettings()))
    transcript.finish = CUT_OFF
    answer = ask.answer("step 1 had no room")
    assert (answer.final_answer, answer.finish, answer.why) == ("", CUT_OFF, "step 1 had no room")


def test_a_passage_in_a_script_without_spaces_is_cited():
    documents = (Document("1", "日本", "日本の首都は東京です。"), Document("2", "京都", "京都は古い都です。"))
    episode = Episode(Question("q", "?", ()), [Step.asking("", "首都", documents)])
    assert [source.cited for source in sources_of(episode, "東京")] == [True, False]
