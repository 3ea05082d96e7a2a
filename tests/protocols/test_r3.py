"""Strict reading of R3 steps and their rendering."""

import itertools
from dataclasses import replace

import pytest

from r3lite.core.episode import Document, Question, Search, Step
from r3lite.models.weights import resolve_folder
from r3lite.protocols.base import same_query
from r3lite.protocols.layout import Layout
from r3lite.protocols.r3 import FAULTS, R3
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.protocols.transcript import Transcript
from r3lite.settings import LengthSettings, ProtocolSettings

FORMAT = R3("Q: {question}", "D: {documents} {step}", "Be brief.")
QUERY = "Step 2:\nThe problem analysis: I need the mayor.\nThe retrieval query: Who is mayor of London"
ANSWER = "Step 2:\nThe problem analysis: All is known.\nThe final answer: London"


def parse(text: str, number: int) -> Step:
    """The step that a turn means after so many others less one."""
    return FORMAT.parse(text, [Step.asking("x", f"query {k}") for k in range(1, number)])


def faults(text: str, number: int = 2) -> tuple[str, ...]:
    return parse(text, number).faults


def test_well_formed_steps():
    assert parse(QUERY, 2) == Step.asking("I need the mayor.", "Who is mayor of London")
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
        Step.asking("one line", "what?"),
        Step.asking("two\nlines: with a colon\n\nand a gap", "Step 3: a film?"),
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
    assert not step.searches and step.answer is None


def test_a_usable_query_or_answer_survives_other_faults():
    assert parse(QUERY, 5).queries == ("Who is mayor of London",)
    assert parse("The final answer: x", 1).answer == "x"
    assert parse(f"{QUERY}\nmore", 2).queries == ("Who is mayor of London",)


def test_a_repeated_query():
    earlier = [Step.asking("x", "Who is the king?"), Step.asking("x", "who IS mayor of  London??")]
    assert FORMAT.parse(QUERY.replace("Step 2", "Step 3"), earlier).faults == ("repeated_query",)
    assert FORMAT.parse(QUERY, earlier[:1]).faults == ()
    assert same_query("a b", "A, b!") and not same_query("ab", "a b")


def test_headings_count_only_where_a_line_begins():
    """The words of a heading may stand inside a sentence; and the case is part of the heading."""
    text = "Step 1:\nThe problem analysis: is The final answer: here?\nThe retrieval query: The final answer: where"
    assert parse(text, 1) == Step.asking("is The final answer: here?", "The final answer: where")
    assert "no_query_or_answer" in faults("Step 2:\nThe problem analysis: a\nthe final answer: b")


def test_a_forced_answer_needs_no_analysis_of_its_own():
    step = FORMAT.read_answer(" Oslo", [Step.asking("x", "q")] * 2)
    assert step.answer == "Oslo" and step.faults == ()
    assert "blank_answer" in FORMAT.read_answer("", []).faults


def test_a_turn_that_ran_out_of_room_is_finished_by_an_answer_unless_it_has_begun_one():
    assert FORMAT.heading_after_cut_off("Step 1:\nThe problem analysis: a lot", []) == "\nThe final answer:"
    assert FORMAT.heading_after_cut_off("Step 1:\nThe problem analysis: x\nThe final answer: a lot", []) is None
    # In the middle of a line it is plain text: the turn was not asked for an answer.
    assert FORMAT.heading_after_cut_off("Step 2: The final answer: a long", [Step("x")]) is None
    mentioned = "Step 1:\nThe problem analysis: what The final answer: means"
    assert FORMAT.heading_after_cut_off(mentioned, []) == "\nThe final answer:"


def test_any_mixture_of_pieces_is_read_without_an_error():
    pieces = ["Step 1:", "\n", "The problem analysis:", " x", "The retrieval query:", "The final answer:"]
    pieces.append("Step 1:\nThe problem analysis: x\n")  # without which no mixture of five is free of faults
    faultless = 0
    for mixture in itertools.product(pieces, repeat=5):
        step = parse("".join(mixture), 1)
        assert not (step.searches and step.answer)
        assert set(step.faults) <= set(FAULTS)
        if not step.faults:
            assert parse(FORMAT.render(step, 1), 1) == step
            faultless += 1
    assert faultless > 50


def test_prompts_and_requests_are_the_texts_around_the_steps():
    assert FORMAT.question_message("who?") == "Q: who?" and FORMAT.system == "Be brief." and FORMAT.user_turns
    assert FORMAT.observation("who?", [Step.asking("a", "q", [Document("a", "T", "x")])]) == "D: [1] T: x 2"
    assert "Step 3" in FORMAT.step_request(3)


def test_a_stop_string_ends_a_turn_before_documents_are_made_up():
    assert any(stop in f"{QUERY}\nThe retrieval documents:" for stop in FORMAT.stop_strings)
    assert not any(stop in QUERY or stop in ANSWER for stop in FORMAT.stop_strings)
    assert FORMAT.first_turn(f"{QUERY}\nThe retrieval documents:\n[1] made up") == QUERY + "\n"
    assert FORMAT.first_turn(ANSWER) == ANSWER


SEVERAL = replace(FORMAT, most_queries=3)
CAREFUL = replace(FORMAT, verifies=True)
LIST = "Step 2:\nThe problem analysis: I need both.\nThe retrieval queries:\n1. Who wrote A?\n2. Who wrote B?"


def both(*queries: str) -> Step:
    return Step("I need both.", tuple(map(Search, queries)))


def test_several_queries_of_a_step():
    step = both("Who wrote A?", "Who wrote B?")
    assert SEVERAL.render(step, 2) == LIST and SEVERAL.parse(LIST, [Step("x")]) == step
    assert SEVERAL.parse(LIST.replace("1. ", " 1.").replace("\n2", "\n\n2"), [Step("x")]) == step
    alone = both("Who wrote A?")
    assert SEVERAL.parse(SEVERAL.render(alone, 1), []) == alone
    assert FORMAT.parse(LIST, [Step("x")]).faults == ("no_query_or_answer",)  # without the option it is plain text
    next_line = both("Who wrote\x85A?", "Who wrote\u2028B?")  # a line of a list ends at "\n", as anywhere in the format
    assert SEVERAL.parse(SEVERAL.render(next_line, 1), []) == next_line


@pytest.mark.parametrize(
    ("old", "new", "fault", "usable"),
    [
        ("1. Who", "Who", "unnumbered_query", 2),
        ("2. Who", "3. Who", "unnumbered_query", 2),
        ("1. Who", "1.5 million copies: who", "unnumbered_query", 2),
        ("2. Who wrote B?", "2.", "blank_query", 1),
        ("\n1. Who wrote A?\n2. Who wrote B?", "", "blank_query", 0),
        ("B?", "B?\n3. Who wrote C?\n4. Who wrote D?", "too_many_queries", 3),
        ("Who wrote B?", "who  wrote a", "repeated_query", 2),
        ("Who wrote B?", "Who asked before?", "repeated_query", 2),
        ("The retrieval queries:", "The retrieval query: x\nThe retrieval queries:", "query_and_queries", 0),
        ("B?", "B?\nThe final answer: x", "query_and_answer", 0),
        ("B?", "B?\nThe retrieval queries:\n1. Who?", "repeated_heading", 2),
    ],
)
def test_what_can_be_wrong_with_several_queries(old, new, fault, usable):
    assert LIST.count(old) == 1
    step = SEVERAL.parse(LIST.replace(old, new), [Step.asking("x", "Who asked before?")])
    assert fault in step.faults and len(step.queries) == usable and step.answer is None


def test_the_documents_of_several_queries_stand_under_them():
    one, two = Document("a", "A", "x"), Document("b", "B", "y\n2. Who wrote B?")
    step = both("Who wrote A?", "Who wrote B?").with_documents([[one, two], []])
    text = "1. Who wrote A?\n[1] A: x\n[2] B: y 2. Who wrote B?\n2. Who wrote B?\n(nothing was found)"
    assert SEVERAL.observation("who?", [step]) == f"D: {text} 2"


def test_an_answer_is_verified_before_it_is_given():
    text = "Step 1:\nThe problem analysis: It is A.\nThe verification: [1] says so.\nThe final answer: A"
    step = Step("It is A.", answer="A", verification="[1] says so.")
    assert CAREFUL.parse(text, []) == step and CAREFUL.render(step, 1) == text
    for bad in (
        text.replace("The verification: [1] says so.\n", ""),
        text.replace("[1] says so.", ""),
        "Step 1:\nThe problem analysis: It is A.\nThe final answer: A\nThe verification: [1] says so.",
    ):
        unverified = CAREFUL.parse(bad, [])
        assert (unverified.faults, unverified.answer) == (("no_verification",), "A")
    idle = CAREFUL.parse(text.replace("The final answer: A", "The retrieval query: where?"), [])
    assert (idle.faults, idle.queries) == (("idle_verification",), ("where?",))
    forced = CAREFUL.read_answer(" A", [Step.asking("x", "y")])
    assert (forced.answer, forced.faults) == ("A", ())


def test_a_forced_answer_keeps_the_verification_before_it():
    """The turn was cut off between the verification and the answer."""
    tokenizer = Tokenizer.load(resolve_folder("tiny"))
    layout = Layout(tokenizer, CAREFUL, LengthSettings())
    transcript = Transcript(Question("1", "which?", ("A",)))
    layout.open(transcript)
    transcript.write(tokenizer.encode("Step 1:\nThe problem analysis: It is A.\nThe verification: [1] says so.\n"))
    layout.close_turn(transcript)
    transcript.write([*tokenizer.encode(" A"), tokenizer.stop_id])
    layout.close_turn(transcript)
    assert transcript.steps == [Step("It is A.", answer="A", verification="[1] says so.", faults=("cut_off",))]


def test_the_prompts_of_the_options():
    plain, both_on = R3.load(ProtocolSettings()), R3.load(ProtocolSettings(queries_per_step=3, verification=True))
    assert "note" not in plain.init_prompt and "verification" not in plain.init_prompt
    assert "Up to 3 questions" in both_on.init_prompt and "The verification:" in both_on.init_prompt
