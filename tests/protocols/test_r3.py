"""Strict reading of R3 steps, their rendering, the prompts' placeholders."""

import itertools

import pytest

from r3lite.episode import Document, Step
from r3lite.errors import R3LiteError
from r3lite.protocols.r3 import FAULTS, Prompts, R3Format, render_documents, same_query
from r3lite.settings import ProtocolSettings

FORMAT = R3Format()
QUERY = "Step 2:\nThe problem analysis: I need the mayor.\nThe retrieval query: Who is mayor of London"
ANSWER = "Step 2:\nThe problem analysis: All is known.\nThe final answer: London"


def faults(text: str, number: int = 2, earlier=()) -> tuple[str, ...]:
    return FORMAT.parse(text, number, earlier).faults


def test_well_formed_steps():
    assert FORMAT.parse(QUERY, 2) == Step("I need the mayor.", "Who is mayor of London")
    assert FORMAT.parse(ANSWER, 2) == Step("All is known.", answer="London")


def test_the_last_letter_of_an_answer_stays():
    r"""`strip("\\n")`, as others had it, takes a letter n for a line end: "London" became "Londo"."""
    for end in ("", "\n", "\n\n", " \n"):
        assert FORMAT.parse(ANSWER + end, 2).answer == "London"
    assert FORMAT.parse(ANSWER.replace("London", "nn\\n"), 2).answer == "nn\\n"


@pytest.mark.parametrize("number", [1, 2, 12])
@pytest.mark.parametrize(
    "step",
    [
        Step("one line", "what?"),
        Step("two\nlines: with a colon\n\nand a gap", "Step 3: a film?"),
        Step("It says The final answer: maybe, inside a line", answer="yes"),
        Step("x", answer="12:30 [1] 東京"),
    ],
)
def test_what_is_rendered_is_read_back(step, number):
    assert FORMAT.parse(FORMAT.render(step, number), number) == step


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("The problem analysis: a\nThe final answer: b", "no_step_heading"),
        ("I think.\nStep 2:\nThe problem analysis: a\nThe final answer: b", "no_step_heading"),
        (QUERY.replace("Step 2", "Step 1"), "wrong_step_number"),
        (QUERY.replace("Step 2", "Step two"), "no_step_heading"),
        ("Step 2:\nThe retrieval query: q", "no_analysis"),
        ("Step 2:\nThe problem analysis:  \nThe retrieval query: q", "no_analysis"),
        ("Step 2:\nsome words\nThe problem analysis: a\nThe retrieval query: q", "no_analysis"),
        ("Step 2:\nThe problem analysis: a", "no_query_or_answer"),
        ("", "no_query_or_answer"),
        (f"{QUERY}\nThe final answer: x", "query_and_answer"),
        ("Step 2:\nThe problem analysis: a\nThe retrieval query: \n", "blank_query"),
        ("Step 2:\nThe problem analysis: a\nThe final answer:", "blank_answer"),
        (f"{ANSWER}\nThe final answer: Paris", "repeated_heading"),
        (f"{QUERY}\nThe retrieval query: another", "repeated_heading"),
        (f"{QUERY}\nand more", "text_after_query"),
        (f"{ANSWER}\n\nStep 3:\nThe problem analysis: on", "text_after_answer"),
        (f"{QUERY}\nThe retrieval documents:\n[1] made up", "wrote_documents"),
    ],
)
def test_faults_have_names(text, fault):
    assert fault in faults(text)
    assert set(faults(text)) <= set(FAULTS)


def test_a_step_with_two_answers_does_not_count_twice():
    step = FORMAT.parse(f"{ANSWER}\nThe final answer: Paris", 2)
    assert step.answer is None and step.faults == ("repeated_heading",)


def test_both_a_query_and_an_answer_are_neither():
    step = FORMAT.parse(f"{QUERY}\nThe final answer: x", 2)
    assert step.query is None and step.answer is None


def test_a_usable_query_or_answer_survives_other_faults():
    assert FORMAT.parse(QUERY, 5).query == "Who is mayor of London"
    assert FORMAT.parse("The final answer: x", 1).answer == "x"
    assert FORMAT.parse(f"{QUERY}\nmore", 2).query == "Who is mayor of London"


def test_a_repeated_query():
    earlier = ["Who is the king?", "who IS mayor of  London??"]
    assert faults(QUERY, earlier=earlier) == ("repeated_query",)
    assert faults(QUERY, earlier=earlier[:1]) == ()
    assert same_query("a b", "A, b!") and not same_query("ab", "a b")


def test_headings_count_only_where_a_line_begins():
    """The words of a heading may stand inside a sentence; and the case is part of the heading."""
    text = "Step 1:\nThe problem analysis: is The final answer: here?\nThe retrieval query: The final answer: where"
    assert FORMAT.parse(text, 1) == Step("is The final answer: here?", "The final answer: where")
    assert "no_query_or_answer" in faults("Step 2:\nThe problem analysis: a\nthe final answer: b")


def test_the_forced_opening_and_what_the_model_adds_are_one_step():
    step = FORMAT.parse(FORMAT.forced_answer(3) + " Oslo", 3)
    assert step.answer == "Oslo" and step.faults == ()
    assert "blank_answer" in faults(FORMAT.forced_answer(2))


def test_any_mixture_of_pieces_is_read_without_an_error():
    pieces = ["Step 1:", "\n", "The problem analysis:", " x", "The retrieval query:", "The final answer:"]
    for mixture in itertools.product(pieces, repeat=5):
        step = FORMAT.parse("".join(mixture), 1)
        assert not (step.query and step.answer)
        assert set(step.faults) <= set(FAULTS)
        if not step.faults:
            assert FORMAT.parse(FORMAT.render(step, 1), 1) == step


def test_a_stop_string_ends_a_turn_before_documents_are_made_up():
    assert any(stop in f"{QUERY}\nThe retrieval documents:" for stop in FORMAT.stop_strings)
    assert not any(stop in QUERY or stop in ANSWER for stop in FORMAT.stop_strings)


def test_documents_are_numbered_one_a_line():
    documents = [Document("a", "T", "one\n two"), Document("b", "U", "{documents} {question}")]
    assert render_documents(documents) == "[1] T: one two\n[2] U: {documents} {question}"
    assert "nothing" in render_documents([])


def test_prompts_are_filled_once():
    """A document or a question that holds a placeholder must not be filled in its turn."""
    prompts = Prompts("Q: {question}", "D:\n{documents} {step}")
    assert prompts.opening("is {question} {documents}?") == "Q: is {question} {documents}?"
    assert prompts.documents([Document("a", "T", "{documents} {step}")], 2) == "D:\n[1] T: {documents} {step} 2"


def test_shipped_prompts_load():
    prompts = Prompts.load(ProtocolSettings())
    assert "Step k:" in prompts.init and prompts.init.endswith("{question}")
    assert prompts.documents([Document("a", "T", "x")], 2).startswith("The retrieval documents:")
    tiny = ProtocolSettings(init_prompt="prompts/tiny/init_prompt.txt", step_prompt="prompts/tiny/step_prompt.txt")
    assert "{question}" in Prompts.load(tiny).init


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
        Prompts.load(ProtocolSettings(init_prompt=str(path)))


def test_a_user_s_template_may_have_braces_of_its_own(tmp_path):
    path = tmp_path / "init.txt"
    path.write_text('Reply as {"a": {}} to {question}', encoding="utf-8")
    assert Prompts.load(ProtocolSettings(init_prompt=str(path))).opening("x") == 'Reply as {"a": {}} to x'
    with pytest.raises(R3LiteError, match="cannot be read"):
        Prompts.load(ProtocolSettings(step_prompt=str(tmp_path / "gone.txt")))


def test_a_template_that_is_not_there_is_named_as_the_user_did():
    """The error named the place among the shipped files where it was looked for last."""
    with pytest.raises(R3LiteError) as error:
        Prompts.load(ProtocolSettings(init_prompt="nope.txt"))
    assert error.value.cause == "prompt file nope.txt cannot be read: there is no such file"
