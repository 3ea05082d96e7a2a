"""Plans and the answers of their nodes, as a protocol."""

import random

import pytest

from r3lite.core.episode import Document, Question, Search, Step
from r3lite.protocols.layout import OPENINGS, Layout
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.transcript import Transcript
from r3lite.settings import LengthSettings, ProtocolSettings
from tests.protocols.test_plan import DIAMOND

DAG = build_protocol(ProtocolSettings(format="dag"))
ROOT, LEFT, RIGHT = Search("Who made Brenn?", kind="General"), "When was Ann Dahl born?", "Where was Ann Dahl born?"
PLANNED = Step(DIAMOND, (ROOT,))
SIDES = Step("A: Ann Dahl", (Search(LEFT, kind="News"), Search(RIGHT, kind="Academic")))
LAST = Step("B: 1900\nC: Oslo", (Search("Who ruled Oslo in 1900?", kind="General"),))
FINAL = Step("D: Olav", answer="Olav")


def test_an_episode_survives_being_written():
    episode = [PLANNED, SIDES, LAST, FINAL]
    for number, step in enumerate(episode, 1):
        assert DAG.parse(DAG.render(step, number), episode[: number - 1]) == step


@pytest.mark.parametrize(
    ("text", "faults", "queries", "answer"),
    [
        ("A: Ann Dahl\nB: x", ("text_outside_answers",), 2, None),
        ("So:\nA: Ann Dahl", ("text_outside_answers",), 2, None),
        ("A: Ann Dahl\nA: Bo", ("repeated_answer",), 2, None),
        ("A:", ("blank_answer", "missing_answer"), 0, None),
        ("", ("missing_answer",), 0, None),
        ("A: Ann Dahl\nThe final answer: Oslo", ("early_answer",), 0, "Oslo"),
        ("The final answer: Oslo\nThe final answer: Rome", ("early_answer", "repeated_answer"), 0, None),
        ("The final answer:", ("early_answer", "blank_answer"), 0, None),
        ("The final answer: Oslo\nmore", ("early_answer", "text_outside_answers"), 0, "Oslo"),
    ],
)
def test_what_can_be_wrong_with_answers(text, faults, queries, answer):
    step = DAG.parse(text, [PLANNED])
    assert (step.faults, len(step.searches), step.answer) == (faults, queries, answer)


def test_what_can_be_wrong_with_the_end():
    earlier = [PLANNED, SIDES, LAST]
    assert DAG.parse("D: Olav", earlier).faults == ("no_final_answer",)
    assert DAG.parse("The final answer: Olav", earlier) == Step("", answer="Olav")  # its node need not be answered
    step = DAG.parse("B: 1900\nC: Oslo", [PLANNED, SIDES, Step.asking("", "who RULED Oslo in 1900")])
    assert step.faults[0] == "text_outside_answers"  # they are not what was asked last


def test_a_turn_that_is_cut_off_begins_its_answer_only_at_the_beginning_of_a_line():
    earlier = [Step("a plan")]
    assert DAG.heading_after_cut_off("A: Ann\nThe final answer: Os", earlier) is None
    assert DAG.heading_after_cut_off("A: what The final answer: is", earlier) == "\nThe final answer:"
    assert DAG.heading_after_cut_off("Nodes:", []) is None  # a plan cannot answer


def test_a_query_that_was_asked_before_is_a_fault():
    plan = Step("Nodes:\nA: Who? (General)\nB: {A} (General)\nEdges: A -> B", (Search("Who?", kind="General"),))
    step = DAG.parse("A: who", [plan])
    assert (step.queries, step.faults) == (("who",), ("repeated_query",))


def test_documents_stand_under_their_nodes_and_the_queries_after_them():
    step = SIDES.with_documents([[Document("1", "T", "x\nB: y")], []])
    documents = "The retrieval documents of B:\n[1] T: x B: y\nThe retrieval documents of C:\n(nothing was found)"
    request = f"B: {LEFT}\nC: {RIGHT}\n\nWrite the lines B: and C: with answers of a few words."
    assert DAG.observation("Who?", [PLANNED, step]) == f"{documents}\n\n{request}"
    last = "\n\nD: Who ruled Oslo in 1900?\nThe final answer: Who?\n\n"
    last += "Write the lines D: and The final answer: with answers of a few words."
    assert DAG.observation("Who?", [PLANNED, SIDES, LAST]).endswith(last)


@pytest.mark.parametrize("question", ["Who {A} is {0}?", "why " * 60, "???", "Who (the film)?"])
@pytest.mark.parametrize("opening", ["single-retrieval", "no-retrieval"])
def test_baselines_of_any_question(tokenizer, question, opening):
    """A plan that is given has no limits, and braces in the question are no references."""
    layout = Layout(tokenizer, DAG, LengthSettings(), OPENINGS[opening])
    transcript = Transcript(Question("q", question, ("x",)))
    layout.open(transcript)
    if transcript.pending:
        layout.splice(transcript, [[Document("1", "T", "x")]])
    transcript.write([*tokenizer.encode(" Oslo"), tokenizer.stop_id])
    layout.close_turn(transcript)
    assert transcript.finish == "answered" and transcript.steps[-1].answer == "Oslo"
    assert not any(step.faults for step in transcript.steps)


def test_any_text_is_read_without_an_error():
    draw = random.Random(0)
    parts = ["Nodes:", "Edges:", "\n", "A", ":", " ", "->", ";", "(General)", "{A}", "The final answer:", "x", "B: y"]
    for earlier in ([], [PLANNED], [PLANNED, SIDES], [PLANNED, SIDES, LAST]):
        for _ in range(300):
            step = DAG.parse("".join(draw.choices(parts, k=draw.randint(0, 14))), earlier)
            assert not (step.searches and step.answer) and set(step.faults) <= DAG.faults.keys()
            assert step.searches or step.answer or step.faults


def test_the_prompt_names_limits_and_sources():
    prompt = build_protocol(ProtocolSettings(format="dag", most_nodes=9, most_node_words=7)).init_prompt
    assert "at most 9 nodes" in prompt and "7 words" in prompt and "General, News, Academic" in prompt
