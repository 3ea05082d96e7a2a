"""Which of a model's own episodes teach it."""

import pytest

from r3lite.core.episode import ANSWERED, CUT_OFF, MALFORMED, Document, Episode, Question, Step
from r3lite.datasets.self_taught import select
from r3lite.protocols.base import ANSWER_WAS_FORCED, NO_ROOM
from r3lite.protocols.registry import build_protocol
from r3lite.settings import CollectSettings, ProtocolSettings

FILM = Document("1", "Brenn", "Brenn (1929\u20131930) is a film by Ann Dahl.")
ANN = Document("2", "Ann Dahl", "Dahl was born in New York-Queens.")
BORN = Question("q", "Where was the director of Brenn born?", ("New York",), gold=(FILM, ANN), gold_by="title")
FIRST = Question("c", "Which came first, Brenn or Olm?", ("Brenn",), gold=(FILM, ANN), gold_by="title")
VERDICT = Question("y", "Is Brenn older than Olm?", ("yes",), gold=(FILM, ANN), gold_by="title")
PROTOCOL = build_protocol(ProtocolSettings())


def episode(
    answer="New York", queries=("Who?", "Where?"), retrieved=((FILM,), (ANN,)), question=BORN, tokens=9, **changes
):
    steps = [Step.asking("I look.", query, documents) for query, documents in zip(queries, retrieved)]
    last = Step("I know.", answer=answer, faults=changes.pop("faults", ()))
    return Episode(question, [*steps, last], changes.pop("finish", ANSWERED), tokens)


def choose(*episodes, keep=2, min_f1=0.8, retrieves=True):
    return select(episodes, PROTOCOL, CollectSettings(min_f1=min_f1, keep=keep), retrieves)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"answer": "Rome"}, "wrong answer"),
        ({"answer": "the New York"}, None),  # an article is no word
        ({"answer": "New York", "retrieved": ((FILM,), ())}, "answer not in the documents"),
        ({"answer": "New York", "queries": ()}, "nothing retrieved"),
        ({"faults": ("wrong_step_number",)}, "malformed step (wrong_step_number)"),
        ({"answer": None, "finish": MALFORMED}, "step 3 has neither a query nor an answer"),
        ({"finish": CUT_OFF, "faults": ("cut_off",)}, "cut off"),
        ({"faults": (ANSWER_WAS_FORCED,)}, "forced answer"),
        ({"faults": (NO_ROOM,)}, "forced answer"),
        # Right by chance in every second episode, whatever was read.
        ({"question": VERDICT, "answer": "Yes"}, None),
        (
            {"question": VERDICT, "answer": "Yes", "retrieved": ((FILM,), ())},
            "guessed: a gold paragraph was not retrieved",
        ),
        ({"question": FIRST, "answer": "Brenn"}, None),
        (
            {"question": FIRST, "answer": "Brenn", "retrieved": ((FILM,), ())},
            "guessed: a gold paragraph was not retrieved",
        ),
    ],
)
def test_why_an_episode_is_not_kept(changes, reason):
    episodes, reasons = choose(episode(**changes))
    assert (len(episodes), dict(reasons)) == ((0, {reason: 1}) if reason else (1, {}))


def test_without_known_gold_a_verdict_needs_a_document_only():
    open_question = Question("y", "Is Brenn older than Olm?", ("yes",))
    assert len(choose(episode("yes", question=open_question, retrieved=((FILM,), ())))[0]) == 1
    assert choose(episode("yes", question=open_question, retrieved=((), ())))[1] == {"nothing retrieved": 1}


def test_a_word_beside_a_dash_stands_in_a_document():
    """`normalize` makes one word of 1929-1930 with an en dash."""
    year = Question("q", "When did it begin?", ("1929",))
    assert len(choose(episode("1929", question=year))[0]) == 1
    cut_year = Question("q", "When did it begin?", ("192",))
    assert choose(episode("192", question=cut_year))[1] == {"answer not in the documents": 1}


def test_an_answer_that_overlaps_enough_is_right_and_must_itself_stand_in_a_document():
    close = Question("q", "Who made it?", ("Ann Maria Dahl",))
    assert len(choose(episode("Ann Dahl", question=close), min_f1=0.8)[0]) == 1
    assert choose(episode("Ann Dahl", question=close), min_f1=0.9)[1] == {"wrong answer": 1}


def test_without_a_retriever_no_document_is_asked_for():
    assert len(choose(episode(queries=()), retrieves=False)[0]) == 1


def test_the_shortest_are_kept_and_of_the_same_queries_one():
    same_queries = episode(tokens=7)
    other_queries = episode(queries=("Film?", "Where?"), tokens=8)
    long = episode(tokens=9)
    shortest = episode(queries=("who", "where"), tokens=6)
    third = episode(queries=("Born?", "Where?"), tokens=10)
    wrong = episode("Rome", tokens=1)
    episodes, reasons = choose(long, same_queries, third, other_queries, shortest, wrong)
    assert episodes == [shortest, other_queries]
    assert reasons == {"same queries, or analyses, as a shorter one": 2, "more than --keep 2": 1, "wrong answer": 1}
    assert choose(long, other_queries, keep=1)[0] == [other_queries]
