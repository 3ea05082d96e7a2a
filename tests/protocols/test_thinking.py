"""Models that think: a turn opens inside a thought, which no step has, and which a forced answer ends."""

import pytest

from r3lite.core.episode import ANSWERED, Document, Question, Step
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.protocols.transcript import Layout, Transcript
from r3lite.settings import LengthSettings, ProtocolSettings
from tests.protocols.test_chat_template import folder  # noqa: F401 (a fixture)

WHO = Question("1", "Who wrote it?", ("Ada",))
DOCUMENT = Document("d", "Book", "Ada wrote it.")
THOUGHT = "Hm, which book?\n</think>\n\n"


@pytest.fixture(params=["r3", "tags"])
def layout(request, folder):  # noqa: F811
    protocol = build_protocol(ProtocolSettings(format=request.param, worked_example=False))
    return Layout(Tokenizer.load(folder("r1")), protocol, LengthSettings(max_length=4000, max_hops=1))


def opened(layout) -> Transcript:
    transcript = Transcript(WHO)
    layout.open(transcript)
    return transcript


def said(layout, transcript, text: str, ends: bool = True) -> None:
    transcript.write([*layout.tokenizer.encode(text), *[layout.tokenizer.stop_id] * ends])
    layout.close_turn(transcript)


def shown(layout, tokens) -> str:
    return layout.tokenizer._marked.decode(tokens, skip_special_tokens=False)


def test_a_step_is_read_after_the_thought(layout):
    transcript, protocol = opened(layout), layout.protocol
    step = Step.asking("I look for the book.", "the book")
    text = protocol.render(step, 1)
    if protocol.thinks:  # <think> is the format's own, and opened already
        assert text.startswith("<think>")
        said(layout, transcript, text.removeprefix("<think>"), ends=False)
    else:
        said(layout, transcript, THOUGHT + text)
    assert transcript.steps == [step] and transcript.pending


def test_a_thought_that_is_not_over_is_no_step(layout):
    transcript = opened(layout)
    said(layout, transcript, "Hm, which book?")
    assert transcript.finish == "malformed" and transcript.steps[0].answer is None


def test_a_forced_answer_ends_the_thought(layout):
    transcript, protocol = opened(layout), layout.protocol
    for number in (1, 2):  # the second search is one too many
        text = protocol.render(Step.asking("I look.", f"the book {number}"), number)
        if protocol.thinks:
            said(layout, transcript, text.removeprefix("<think>") if number == 1 else text, ends=False)
        else:
            said(layout, transcript, THOUGHT + text)
        if number == 1:
            layout.splice(transcript, [[DOCUMENT]])
    given = shown(layout, transcript.tokens)
    assert given.count("<think>") == given.count("</think>")
    said(layout, transcript, " Ada" if not protocol.thinks else "Ada</answer>", ends=not protocol.thinks)
    assert transcript.finish == ANSWERED and transcript.steps[-1].answer == "Ada"


def test_a_thought_that_runs_out_of_room_is_ended_before_the_answer(layout):
    transcript = opened(layout)
    layout.lengths = LengthSettings(max_length=4000, max_new_tokens=10)
    said(layout, transcript, "Hm, which book may this have been?", ends=False)
    assert transcript.held is not None
    given = shown(layout, transcript.tokens)
    assert "</think>" in given.partition("Hm, which")[2]


def test_a_demonstration_leaves_the_thought_empty_and_reads_as_the_rollout(layout):
    steps = [Step.asking("I look.", "the book").with_documents([[DOCUMENT]]), Step("Ada wrote it.", answer="Ada")]
    laid = layout.lay_out(WHO, steps, 100)
    grown, protocol = opened(layout), layout.protocol
    for number, step in enumerate(steps, 1):
        text = protocol.render(step, number)
        if protocol.thinks:
            text = text.removeprefix("<think>") if number == 1 else text
        else:
            text = "\n</think>\n\n" + text
        grown.write(layout.tokenizer.encode(text) + [layout.tokenizer.stop_id] * (not protocol.thinks))
        layout.close_turn(grown)
        if grown.pending:
            layout.splice(grown, [[DOCUMENT]])
    assert (laid.tokens, laid.action_mask) == (grown.tokens, grown.action_mask)
    assert [step.without_documents() for step in laid.steps] == [step.without_documents() for step in grown.steps]


def test_what_a_user_sees_while_it_is_written_has_no_thought(layout):
    transcript = opened(layout)
    transcript.write(layout.tokenizer.encode("Hm, which"))
    readable = layout.readable(transcript, ended=False)
    assert readable == ("<think>Hm, which" if layout.protocol.thinks else "")
