"""Baselines in a plain chat: the prompt to the token, what of a reply is the answer, and what is cut to make room."""

import pytest

from r3lite.core.episode import ANSWERED, CUT_OFF, MALFORMED, Document, Question, Step
from r3lite.core.errors import R3LiteError
from r3lite.protocols.layout import OPENINGS, Layout
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.transcript import Transcript
from r3lite.settings import LengthSettings, ProtocolSettings
from tests.errors import raises
from tests.protocols.test_tokenizer import rendered

QUESTION = Question("q", "Who wrote it,\nand when?", ("Ada",))
DOCUMENTS = [Document("1", "Ada", "Ada wrote\nit in 1843."), Document("2", "Rome", "東京 is not Rome.")]
REQUEST = "Question: Who wrote it, and when?\nAnswer with a short phrase or a name only, no explanation."
PROMPT = f"[1] Ada: Ada wrote it in 1843.\n[2] Rome: 東京 is not Rome.\n\n{REQUEST}"
WITH_DOCUMENTS, WITHOUT = "You answer questions. Use the documents.", "You answer questions."


def opened(tokenizer, baseline, documents=DOCUMENTS, system=None, **lengths) -> tuple[Layout, Transcript]:
    """An episode up to the model's turn."""
    opening = OPENINGS[baseline]
    protocol = build_protocol(ProtocolSettings(format="tags", system_prompt=system), opening)
    layout = Layout(tokenizer, protocol, LengthSettings(**lengths), opening)
    transcript = Transcript(QUESTION)
    layout.open(transcript)
    assert [s.query for s in transcript.pending] == (["Who wrote it, and when?"] if opening.retrieves_first else [])
    if transcript.pending:
        layout.splice(transcript, [documents])
    return layout, transcript


def messages(system: str, user: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def with_reply(layout: Layout, transcript: Transcript, reply: str, ends: bool = True) -> Transcript:
    """The transcript after a reply, which the model ends itself, or the limit."""
    transcript.write(layout.tokenizer.encode(reply) + [layout.tokenizer.stop_id] * ends)
    layout.close_turn(transcript)
    return transcript


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize(
    ("baseline", "default_system", "user"),
    [("rag", WITH_DOCUMENTS, PROMPT), ("gold", WITH_DOCUMENTS, PROMPT), ("closed-book", WITHOUT, REQUEST)],
)
def test_a_prompt_is_that_of_transformers(qwen, reference, baseline, default_system, user, system):
    _, transcript = opened(qwen, baseline, system=system)
    assert transcript.tokens == rendered(reference, messages(system or default_system, user), prompt=True)
    assert not any(transcript.action_mask) and transcript.finish is None


@pytest.mark.parametrize(
    ("baseline", "system", "user"), [("rag", WITH_DOCUMENTS, PROMPT), ("closed-book", WITHOUT, REQUEST)]
)
def test_a_prompt_is_that_of_a_chat(tokenizer, baseline, system, user):
    """The same where the tokenizer of Qwen2.5 is not there."""
    _, transcript = opened(tokenizer, baseline)
    opened_turn = tokenizer.assistant_turn()[len(tokenizer.encode("\n")) :]
    assert transcript.tokens == tokenizer.chat(messages(system, user))[0] + opened_turn


def test_the_search_is_a_step_and_the_answer_another(tokenizer):
    episode = with_reply(*opened(tokenizer, "rag"), "Ada, 1843").episode()
    assert episode.steps == [Step.asking("", "Who wrote it, and when?", DOCUMENTS), Step(answer="Ada, 1843")]
    assert (episode.finish, episode.tokens_written) == (ANSWERED, len("Ada, 1843") + 1)
    closed = with_reply(*opened(tokenizer, "closed-book"), "Ada").episode()
    assert closed.steps == [Step(answer="Ada")] and closed.finish == ANSWERED


@pytest.mark.parametrize(
    ("reply", "ends", "answer", "faults", "finish"),
    [
        ("Ada", True, "Ada", (), ANSWERED),
        (" \n\n Ada Byron \nShe wrote it.\n", True, "Ada Byron", (), ANSWERED),
        ("Step 1:\nThe final answer: Ada", True, "Step 1:", (), ANSWERED),
        ("Ada\n\nShe wro", False, "Ada", (), ANSWERED),
        ("Ada Byr", False, "Ada Byr", (), ANSWERED),
        ("", True, None, ("blank_answer",), MALFORMED),
        (" \n ", True, None, ("blank_answer",), MALFORMED),
        (" \n ", False, None, ("cut_off",), CUT_OFF),
    ],
)
def test_the_first_line_that_is_not_blank_is_the_answer(tokenizer, reply, ends, answer, faults, finish):
    layout, transcript = opened(tokenizer, "closed-book")
    step = with_reply(layout, transcript, reply, ends).steps[-1]
    assert (step, transcript.finish) == (Step(answer=answer, faults=faults), finish)
    assert set(faults) <= layout.protocol.faults.keys()


def test_documents_are_cut_and_left_out_so_that_question_and_answer_have_room(tokenizer):
    long = [Document(str(i), "T", f"{i}" * 400) for i in range(3)]
    _, transcript = opened(tokenizer, "rag", long, max_document_tokens=100)
    assert [len(d.text) for d in transcript.steps[0].documents] == [100] * 3
    for limit, document_lengths in ((500, [50] * 3), (400, [25] * 3), (300, [25])):
        lengths = {"max_document_tokens": 100, "max_length": limit, "max_new_tokens": 40}
        _, transcript = opened(tokenizer, "rag", long, **lengths)
        assert [len(d.text) for d in transcript.steps[0].documents] == document_lengths
        assert REQUEST in tokenizer.decode(transcript.tokens) and len(transcript.tokens) + 40 <= limit
        assert [*transcript.steps[0].documents] == transcript.episode().documents  # scored as they were shown


def test_without_room_for_a_document_it_is_no_rag(tokenizer):
    with raises(R3LiteError, "length-too-small", "q"):
        opened(tokenizer, "rag", max_length=250, max_new_tokens=40)
    with raises(R3LiteError, "prompt-too-long", "leaves no room for an answer"):
        opened(tokenizer, "rag", max_length=150)


def test_what_finds_nothing_says_so(tokenizer):
    _, transcript = opened(tokenizer, "rag", [])
    assert f"user\n(nothing was found)\n\n{REQUEST}" in tokenizer.decode(transcript.tokens)
