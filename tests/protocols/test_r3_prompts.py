"""Prompt files: what is refused, and how placeholders are filled."""

import pytest

from r3lite.core.episode import Document, Step
from r3lite.core.errors import R3LiteError
from r3lite.protocols.r3 import R3, render_documents
from r3lite.settings import ProtocolSettings
from tests.errors import raises


def test_documents_are_numbered_one_a_line():
    documents = [Document("a", "T", "one\n two"), Document("b", "U", "{documents} {question}")]
    assert render_documents(documents) == "[1] T: one two\n[2] U: {documents} {question}"
    assert "nothing" in render_documents([])


def test_prompts_are_filled_once():
    """A document or a question that holds a placeholder must not be filled in its turn."""
    prompts = R3("Q: {question}", "D:\n{documents} {step}")
    assert prompts.question_message("is {question} {documents}?") == "Q: is {question} {documents}?"
    assert (
        prompts.observation("Who?", [Step.asking("a", "q", [Document("a", "T", "{documents} {step}")])])
        == "D:\n[1] T: {documents} {step} 2"
    )


def test_shipped_prompts_load():
    prompts = R3.load(ProtocolSettings())
    assert prompts.question_message("Who?") == "The question: Who?\nWrite Step 1: an analysis and a query."
    assert prompts.observation("Who?", [Step.asking("a", "q", [Document("a", "T", "x")])]).startswith(
        "The retrieval documents:"
    )
    tiny = ProtocolSettings(init_prompt="prompts/tiny/init_prompt.txt", step_prompt="prompts/tiny/step_prompt.txt")
    assert "{question}" in R3.load(tiny).init_prompt


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no place", "placeholders none"),
        ("{question} {question}", r"\['question', 'question'\]"),
        ("{question} {documents}", r"\['question', 'documents'\]"),
        ("{query}", r"\['query'\]"),
    ],
)
def test_a_template_without_its_placeholder_is_refused(tmp_path, text, message):
    path = tmp_path / "init.txt"
    path.write_text(text)
    with pytest.raises(R3LiteError, match=message):
        R3.load(ProtocolSettings(init_prompt=str(path)))


def test_a_user_s_template_may_have_braces_of_its_own(tmp_path):
    path = tmp_path / "init.txt"
    path.write_text('Reply as {"a": {}} to {question}', encoding="utf-8")
    assert R3.load(ProtocolSettings(init_prompt=str(path))).question_message("x") == 'Reply as {"a": {}} to x'
    with raises(R3LiteError, "prompt-unreadable"):
        R3.load(ProtocolSettings(step_prompt=str(tmp_path / "gone.txt")))


def test_a_template_that_is_not_there_is_named_as_the_user_did():
    """The error named the place among the shipped files where it was looked for last."""
    with pytest.raises(R3LiteError) as error:
        R3.load(ProtocolSettings(init_prompt="nope.txt"))
    assert error.value.cause == "prompt file nope.txt cannot be read: no such file"
