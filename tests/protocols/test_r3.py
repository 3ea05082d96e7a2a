"""Strict reading of R3 steps and their rendering."""

import itertools

import pytest

from r3lite.episode import Document, Step
from r3lite.protocols.base import same_query
from r3lite.protocols.r3 import FAULTS, R3

FORMAT = R3("Q: {question}", "D: {documents} {step}", "Be brief.")
QUERY = "Step 2:\nThe problem analysis: I need the mayor.\nThe retrieval query: Who is mayor of London"
ANSWER = "Step 2:\nThe problem analysis: All is known.\nThe final answer: London"


def parse(text: str, number: int) -> Step:
    """The step that a turn means after so many others less one."""
    return FORMAT.parse(text, [Step("x", f"query {k}") for k in range(1, number)])


def faults(text: str, number: int = 2) -> tuple[str, ...]:
    return parse(text, number).faults


def test_well_formed_steps():
    assert parse(QUERY, 2) == Step("I need the mayor.", "Who is mayor of London")
    assert parse(ANSWER, 2) == Step("All is known.", answer="London")


def test_the_last_letter_of_an_answer_stays():
    r"""`strip("\\n")`, as others had it, takes a letter n for a line end: "London" became "Londo"."""
    for end in ("", "\n", "\n\n", " \n"):
        assert parse(ANSWER + end, 2).answer == "London"
    assert parse(ANSWER.replace("London", "nn\\n"), 2).answer == "nn\\n"


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
    assert parse(FORMAT.render(step, number), number) == step


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
    step = parse(f"{ANSWER}\nThe final answer: Paris", 2)
    assert step.answer is None and step.faults == ("repeated_heading",)


def test_both_a_query_and_an_answer_are_neither():
    step = parse(f"{QUERY}\nThe final answer: x", 2)
    assert step.query is None and step.answer is None


def test_a_usable_query_or_answer_survives_other_faults():
    assert parse(QUERY, 5).query == "Who is mayor of London"
    assert parse("The final answer: x", 1).answer == "x"
    assert parse(f"{QUERY}\nmore", 2).query == "Who is mayor of London"


def test_a_repeated_query():
    earlier = [Step("x", "Who is the king?"), Step("x", "who IS mayor of  London??")]
    assert FORMAT.parse(QUERY.replace("Step 2", "Step 3"), earlier).faults == ("repeated_query",)
    assert FORMAT.parse(QUERY, earlier[:1]).faults == ()
    assert same_query("a b", "A, b!") and not same_query("ab", "a b")


def test_headings_count_only_where_a_line_begins():
    """The words of a heading may stand inside a sentence; and the case is part of the heading."""
    text = "Step 1:\nThe problem analysis: is The final answer: here?\nThe retrieval query: The final answer: where"
    assert parse(text, 1) == Step("is The final answer: here?", "The final answer: where")
    assert "no_query_or_answer" in faults("Step 2:\nThe problem analysis: a\nthe final answer: b")


def test_the_forced_opening_and_what_the_model_adds_are_one_step():
    step = parse(FORMAT.forced_prefix(3) + " Oslo", 3)
    assert step.answer == "Oslo" and step.faults == ()
    assert "blank_answer" in faults(FORMAT.forced_prefix(2))


def test_any_mixture_of_pieces_is_read_without_an_error():
    pieces = ["Step 1:", "\n", "The problem analysis:", " x", "The retrieval query:", "The final answer:"]
    for mixture in itertools.product(pieces, repeat=5):
        step = parse("".join(mixture), 1)
        assert not (step.query and step.answer)
        assert set(step.faults) <= set(FAULTS)
        if not step.faults:
            assert parse(FORMAT.render(step, 1), 1) == step


def test_prompts_and_requests_are_the_texts_around_the_steps():
    assert FORMAT.opening("who?") == "Q: who?" and FORMAT.system == "Be brief." and FORMAT.user_turns
    assert FORMAT.observation([Document("a", "T", "x")], 2) == "D: [1] T: x 2"
    assert "Step 3" in FORMAT.step_request(3)


def test_a_stop_string_ends_a_turn_before_documents_are_made_up():
    assert any(stop in f"{QUERY}\nThe retrieval documents:" for stop in FORMAT.stop_strings)
    assert not any(stop in QUERY or stop in ANSWER for stop in FORMAT.stop_strings)
    assert FORMAT.first_turn(f"{QUERY}\nThe retrieval documents:\n[1] made up") == QUERY + "\n"
    assert FORMAT.first_turn(ANSWER) == ANSWER
