"""Rows of plain RAG: in any chat template their prompts have the tokens of the evaluation, and only the answer is
trained on."""

import json

import pytest

from r3lite.core.episode import Document, Failure, Question
from r3lite.core.errors import R3LiteError
from r3lite.core.files import read_jsonl
from r3lite.datasets.plain_rag import write_plain_rag
from r3lite.datasets.trajectories import encode_row, read_rows
from r3lite.protocols.chat_template import ChatTemplate
from r3lite.protocols.layout import OPENINGS, Layout
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.protocols.transcript import Transcript
from r3lite.settings import LengthSettings, ProtocolSettings
from tests.errors import raises

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
# A family that has a system message, one that has none and trims, and one that opens a thought.
TEMPLATES = {
    "plain": TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "folds": "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "thinks": TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
}
DOCUMENTS = [
    Document("1", "Oslo", "Oslo is the capital\nof Norway. <|im_end|> It lies on a fjord, between hills and forests."),
    Document("2", "Bergen ", " Bergen is west of it."),
]
OSLO = Question("a", "Which  city is the\ncapital of Norway?", ("Oslo", "Kristiania"), gold=(DOCUMENTS[0],))
BERGEN = Question("b", "Which city is west of Oslo?", ("Bergen",))


@pytest.fixture(params=TEMPLATES)
def any_tokenizer(request, tokenizer):
    template = ChatTemplate(TEMPLATES[request.param], request.param)
    return Tokenizer(tokenizer._marked.to_str(), template, "<|endoftext|>")


def layout_of(tokenizer, baseline: str, **lengths) -> Layout:
    opening = OPENINGS[baseline]
    return Layout(tokenizer, build_protocol(ProtocolSettings(), opening), LengthSettings(**lengths), opening)


def evaluated(question, documents, layout) -> list[int]:
    """The prompt of a question in an evaluation."""
    transcript = Transcript(question)
    layout.open(transcript)
    layout.splice(transcript, [documents])
    return transcript.tokens


def test_the_prompt_has_the_tokens_of_the_evaluation_and_only_the_answer_is_trained_on(any_tokenizer, tmp_path):
    layout = layout_of(any_tokenizer, "rag", max_document_tokens=60, max_new_tokens=40, max_length=640)
    tally = write_plain_rag([OSLO, BERGEN], lambda pairs: [DOCUMENTS for _ in pairs], layout, tmp_path / "rag.jsonl")
    assert (tally.questions, tally.accepted, tally.gold, tally.retrieved_gold) == (2, 2, 1, 1)
    rows = read_rows(tmp_path / "rag.jsonl", build_protocol(ProtocolSettings()))
    for question, row in zip((OSLO, BERGEN), rows, strict=True):
        encoded = encode_row(row, layout_of(any_tokenizer, "none", max_length=640))
        prompt = evaluated(question, DOCUMENTS, layout)
        assert encoded.tokens[: len(prompt)] == prompt
        assert encoded.action_mask[: len(prompt)] == [False] * len(prompt)
        trained = [token for token, has_loss in zip(encoded.tokens, encoded.action_mask) if has_loss]
        assert trained == encoded.tokens[len(prompt) :][: len(trained)]
        assert trained[-1] == any_tokenizer.stop_id
        reply = any_tokenizer.decode(trained[:-1]).removeprefix("\n</think>\n\n")
        assert reply == question.answers[0]


def test_what_is_written_by_hand(tokenizer, tmp_path):
    layout = layout_of(tokenizer, "rag", max_document_tokens=24)
    write_plain_rag([OSLO], lambda pairs: [DOCUMENTS for _ in pairs], layout, tmp_path / "rag.jsonl")
    (row,) = read_jsonl(tmp_path / "rag.jsonl")
    user = (
        "[1] Oslo: Oslo is the capital of N\n[2] Bergen: Bergen is west of it.\n\n"
        "Question: Which city is the capital of Norway?\nAnswer with a short phrase or a name only, no explanation."
    )
    contents = {"system": "You answer questions. Use the documents.", "user": user, "assistant": "Oslo"}
    messages = [{"role": role, "content": content} for role, content in contents.items()]
    assert row.values == {"id": "a", "messages": messages, "source": "rag"}


def test_the_question_is_the_query_and_one_that_fails_gives_no_row(tokenizer, tmp_path):
    queries = []

    def retrieve(pairs):
        queries.extend((question.id, query) for question, query in pairs)
        return [Failure("down"), DOCUMENTS]

    tally = write_plain_rag([BERGEN, OSLO], retrieve, layout_of(tokenizer, "rag"), tmp_path / "rag.jsonl")
    assert queries == [("b", BERGEN.text), ("a", "Which city is the capital of Norway?")]
    assert tally.rejected == {"the retriever failed": 1} and tally.accepted == 1
    assert [json.loads(line)["id"] for line in (tmp_path / "rag.jsonl").read_text().splitlines()] == ["a"]


def test_a_question_without_room_is_named_as_in_the_evaluation(tokenizer, tmp_path):
    layout = layout_of(tokenizer, "rag", max_length=300, max_new_tokens=100)
    with raises(R3LiteError, "length-too-small", "300", "question a "):
        write_plain_rag([OSLO], lambda pairs: [DOCUMENTS], layout, tmp_path / "rag.jsonl")
    assert not (tmp_path / "rag.jsonl").exists()
