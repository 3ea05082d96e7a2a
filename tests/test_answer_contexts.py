"""Contexts from demonstrations: which demonstration of which question becomes one, and what is refused."""

import json
from dataclasses import replace

import pytest

from r3lite.assembly.answer_contexts import read_contexts
from r3lite.core.episode import ANSWERED, Document, Question
from r3lite.core.errors import R3LiteError
from r3lite.core.files import write_jsonl
from r3lite.protocols.layout import Layout
from r3lite.protocols.registry import build_protocol
from r3lite.settings import LengthSettings, ProtocolSettings

ROME = Document("r", "Rome", "Rome lies on the Tiber. " * 3)
MILAN = Document("m", "Milan", "Milan lies on the Olona.")


def question(id: str = "1", **fields) -> Question:
    return Question(id, "Which river is Rome's?", ("Tiber",), documents=(ROME, MILAN), gold=(ROME,), **fields)


def demonstration(document: Document, query: str, id: str = "1", text: str = "Which river is Rome's?") -> dict:
    documents = [{"id": document.id, "title": document.title, "text": document.text}]
    steps = [
        {"analysis": "To be found.", "query": query, "documents": documents},
        {"analysis": "It is there.", "answer": "Tiber"},
    ]
    return {"id": id, "question": text, "answers": ["Tiber"], "steps": steps}


@pytest.fixture
def layouts(tokenizer):
    lengths = LengthSettings(max_new_tokens=20, max_length=8000, max_document_tokens=400)
    layout = Layout(tokenizer, build_protocol(ProtocolSettings()), lengths)
    return {"": layout, "a": layout, "b": layout}


def read(tmp_path, layouts, *rows: dict, questions: tuple[Question, ...] = (question(),)):
    write_jsonl(tmp_path / "gold.jsonl", rows)
    return read_contexts([str(tmp_path / "gold.jsonl")], questions, layouts)


def test_the_first_demonstration_with_every_gold_paragraph_counts(tmp_path, layouts, capsys):
    rows = [demonstration(MILAN, "Milan"), demonstration(ROME, "Rome"), demonstration(ROME, "Tiber")]
    other = replace(question("2"), text="Which river is Milan's?")
    contexts = read(tmp_path, layouts, *rows, questions=(question(), other))
    assert list(contexts) == ["1"]
    context = contexts["1"]
    assert (context.steps[0].queries, context.finish, context.question) == (("Rome",), ANSWERED, question())
    tokenizer = layouts[""].tokenizer
    assert tokenizer.decode(context.turn).startswith("Step 2:\nThe problem analysis: It is there.")
    assert "Rome lies on the Tiber." in tokenizer.decode(context.tokens[: context.turn_start])
    assert "1 of 2 questions have a context in --contexts" in capsys.readouterr().err


def test_a_demonstration_belongs_to_every_question_that_asks_the_same(tmp_path, layouts):
    questions = (question("a/1", source="a"), question("b/7", source="b"))
    row = demonstration(ROME, "Rome", id="other", text="Which river is Rome's ?")
    contexts = read(tmp_path, layouts, row, questions=questions)
    assert [context.question for context in contexts.values()] == list(questions)


def test_a_demonstration_that_leaves_no_room_for_a_turn_is_no_context(tmp_path, layouts):
    (context,) = read(tmp_path, layouts, demonstration(ROME, "Rome")).values()
    layout = layouts[""]
    for room, fits in ((20, True), (19, False)):
        lengths = replace(layout.lengths, max_length=context.turn_start + room)
        shorter = {"": Layout(layout.tokenizer, layout.protocol, lengths)}
        if fits:
            assert read(tmp_path, shorter, demonstration(ROME, "Rome"))["1"].tokens == context.tokens
        else:
            with pytest.raises(R3LiteError, match="no question has a demonstration with every gold paragraph"):
                read(tmp_path, shorter, demonstration(ROME, "Rome"))


def test_a_source_without_contexts_is_an_error_that_names_it(tmp_path, layouts):
    questions = (question("a/1", source="a"), replace(question("b/1", source="b"), text="Who?"))
    with pytest.raises(R3LiteError, match="no question of the source b has a demonstration"):
        read(tmp_path, layouts, demonstration(ROME, "Rome"), questions=questions)


def test_conversations_are_refused(tmp_path, layouts):
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    with pytest.raises(R3LiteError, match=r"chats\.jsonl has conversations"):
        read_contexts([str(tmp_path / "chats.jsonl")], [question()], layouts)
