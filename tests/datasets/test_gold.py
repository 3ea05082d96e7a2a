"""Demonstrations from gold decompositions: exact texts, earlier answers filled in, the gold paragraph ensured."""

from dataclasses import replace

import pytest

from r3lite.core.episode import Document, Hop, Question, Search
from r3lite.datasets import gold
from r3lite.datasets.gold import referenced_hops
from r3lite.datasets.trajectories import check_steps
from r3lite.protocols.registry import build_protocol
from r3lite.settings import ProtocolSettings

FILM = Document("q/2", "Brenn", "A film by Ann Dahl.")
PERSON = Document("q/0", "Ann Dahl", "Ann Dahl was born in Oslo.")
HOPS = (Hop("Who directed Brenn?", "Ann Dahl", FILM), Hop("Where was #1 born?", "Oslo", PERSON))
QUESTION = Question(
    "q", "Where was the director of Brenn born?", ("Oslo",), (FILM, PERSON), (FILM, PERSON), "text", HOPS
)
OTHERS = [Document(str(i), f"Other {i}", "Nothing.") for i in range(5)]


def with_hops(*hops):
    return Question("q", "Q?", ("a",), gold=(FILM, PERSON), hops=hops)


def test_the_texts_of_a_demonstration():
    first, second, last = gold.with_searches(QUESTION, [[FILM], [PERSON]])
    assert (first.analysis, first.queries) == ("I need to find out: Who directed Brenn?", ("Who directed Brenn?",))
    assert second.analysis == "Who directed Brenn? Ann Dahl. Next I need to find out: Where was Ann Dahl born?"
    assert (second.queries, second.documents) == (("Where was Ann Dahl born?",), (PERSON,))
    assert last.analysis == "Where was Ann Dahl born? Oslo. This gives the answer."
    assert (last.queries, last.answer) == ((), "Oslo")
    assert check_steps(gold.with_searches(QUESTION, [[FILM], [PERSON]]), build_protocol(ProtocolSettings())) is None


def test_a_hurried_demonstration_is_well_formed_and_wrong():
    """It stops one hop too early and takes what it has for the answer, as a hasty teacher would."""
    first, last = gold.with_searches(gold.hasty(QUESTION), [[FILM], [PERSON]])
    assert (first.queries, first.documents) == (("Who directed Brenn?",), (FILM,))
    assert (last.analysis, last.answer) == ("Who directed Brenn? Ann Dahl. This gives the answer.", "Ann Dahl")
    assert check_steps((first, last), build_protocol(ProtocolSettings())) is None


def test_a_demonstration_without_search_says_all_facts_and_answers():
    (step,) = gold.without_search(QUESTION)
    assert step.analysis == "Who directed Brenn? Ann Dahl. Where was Ann Dahl born? Oslo. This gives the answer."
    assert (step.queries, step.answer) == ((), "Oslo")
    (hurried,) = gold.without_search(gold.hasty(QUESTION))
    assert (hurried.analysis, hurried.answer) == ("Who directed Brenn? Ann Dahl. This gives the answer.", "Ann Dahl")
    assert check_steps([step], build_protocol(ProtocolSettings(format="solution"))) is None
    unsupported = with_hops(Hop("Who?", "x"))
    assert gold.obstacle(unsupported, 5) == "a hop without a gold paragraph"
    assert gold.obstacle(unsupported, 5, searches=False) is None


def test_only_earlier_hops_are_references():
    hops = (
        Hop("Who sang Mambo #5?", "Bega", FILM),
        Hop("Did #1 or #2 sing #12?", "no", PERSON),
        Hop("#2#1", "x", FILM),
    )
    assert gold.queries(with_hops(*hops)) == ["Who sang Mambo #5?", "Did Bega or #2 sing #12?", "noBega"]
    assert [referenced_hops(with_hops(*hops), i) for i in range(3)] == [set(), {0}, {0, 1}]
    long = with_hops(Hop(f"Who sang #{'1' * 5000}?", "x", FILM))  # an exception, as Python reads no such number
    assert gold.queries(long) == [long.hops[0].question] and referenced_hops(long, 0) == set()


def test_a_word_is_not_said_twice_where_an_answer_is_filled_in():
    hops = (Hop("Where is it?", "in New Delhi", FILM), Hop("When is monsoon in #1?", "May", PERSON))
    assert gold.queries(with_hops(*hops))[1] == "When is monsoon in New Delhi?"


def test_an_answer_that_ends_a_sentence_gets_no_second_stop():
    hops = (Hop("Until when?", "3 a.m.", FILM), Hop("Which?", 'under "North Africa."', PERSON))
    steps = gold.with_searches(with_hops(*hops), [[], []])
    assert steps[1].analysis.startswith("Until when? 3 a.m. Next")
    assert steps[2].analysis == 'Which? under "North Africa." This gives the answer.'


@pytest.mark.parametrize(
    ("hops", "reason"),
    [
        ((), "no decomposition"),
        ((Hop("Q?", "a", None),), "a hop without a gold paragraph"),
        ((Hop("Q?", "a", FILM),) * 3, "more than 2 hops"),
        ((Hop("Q?", "a", FILM),) * 2, None),
    ],
)
def test_obstacles(hops, reason):
    assert gold.obstacle(with_hops(*hops), max_hops=2) == reason


def test_a_gold_paragraph_that_was_found_stays_where_it_was():
    retrieved = [OTHERS[0], Document("corpus-7", "Ann Dahl", "Ann Dahl was born  in Oslo."), OTHERS[1]]
    assert gold.with_gold(QUESTION, 1, retrieved, top_k=3, seed="0") == (retrieved, True)


def test_a_missed_gold_paragraph_takes_the_last_one_s_place_but_stands_anywhere():
    places = set()
    for seed in range(40):
        documents, was_there = gold.with_gold(QUESTION, 1, OTHERS, top_k=5, seed=str(seed))
        assert not was_there and len(documents) == 5
        assert [d for d in documents if d != PERSON] == OTHERS[:4]
        places.add(documents.index(PERSON))
    assert places == set(range(5))
    assert gold.with_gold(QUESTION, 1, OTHERS, 5, "7") == gold.with_gold(QUESTION, 1, OTHERS, 5, "7")


def test_another_hop_s_gold_paragraph_does_not_stand_in():
    documents, was_there = gold.with_gold(QUESTION, 1, [FILM], top_k=5, seed="0")
    assert not was_there and set(documents) == {FILM, PERSON}


def test_without_a_retriever_the_gold_paragraph_stands_alone():
    assert gold.with_gold(QUESTION, 0, [], top_k=5, seed="0") == ([FILM], False)


def test_a_plan_of_a_decomposition():
    """Edges follow what a hop uses: a reference, or an answer that it names outright and the question does not."""
    hops = (
        Hop("Who directed {Brenn}?", "Ann Dahl", FILM),
        Hop("Given Ann Dahl: where was she born?", "Oslo", PERSON),
        Hop("Is #1 older than Rome?", "no", PERSON),
    )
    plan = gold.search_plan_of(replace(with_hops(*hops), text="Older than Rome?"))
    assert plan.text().splitlines()[1:] == [
        "A: Who directed Brenn? (General)",
        "B: Given {A}: where was she born? (General)",
        "C: Is {A} older than Rome? (General)",
        "Edges: A -> B ; A -> C",
    ]
    named = gold.search_plan_of(replace(with_hops(*hops), text="Where was Ann Dahl, who directed Brenn, born?"))
    assert named.nodes[1].query == "Given Ann Dahl: where was she born?"


def test_an_answer_that_is_the_letter_of_a_node_does_not_double_the_braces():
    hops = (
        Hop("Which film did Brenn make?", "A", FILM),
        Hop("Which vitamin is in #1?", "B", FILM),
        Hop("Who found #2, as A says?", "Ann Dahl", PERSON),
    )
    plan = gold.search_plan_of(replace(with_hops(*hops), text="Who found it?"))
    assert [node.query for node in plan.nodes[1:]] == ["Which vitamin is in {A}?", "Who found {B}, as {A} says?"]


def test_an_answer_is_verified_by_the_documents_that_show_it():
    """A format that verifies rejected every demonstration."""
    protocol = build_protocol(ProtocolSettings(verification=True))
    steps = gold.demonstration(QUESTION, [[OTHERS[0], FILM], [PERSON]], protocol)
    assert steps[-1].verification == "[2] Brenn shows Ann Dahl, [1] Ann Dahl shows Oslo."
    searching = gold.with_searches(QUESTION, [[OTHERS[0], FILM], [PERSON]])
    assert check_steps(steps, protocol) is None and steps[:-1] == searching[:-1]
    assert gold.verified(QUESTION, steps, build_protocol(ProtocolSettings())) == steps
    assert check_steps(gold.demonstration(QUESTION, [OTHERS, OTHERS], protocol), protocol).startswith(
        "step 3 answers without a"
    )


def test_queries_that_do_not_wait_for_one_another_are_asked_at_once():
    hops = (Hop("Who made it?", "Ann", FILM), Hop("When?", "1900", PERSON), Hop("Who ruled #1 in #2?", "Olav", FILM))
    question, protocol = with_hops(*hops), build_protocol(ProtocolSettings(queries_per_step=3))
    steps = gold.demonstration(question, [[FILM], [PERSON], []], protocol)
    assert [step.queries for step in steps] == [("Who made it?", "When?"), ("Who ruled Ann in 1900?",), ()]
    assert [list(search.documents) for search in steps[0].searches] == [[FILM], [PERSON]]
    assert steps[0].analysis == "I need to find out: Who made it? When?"
    assert steps[1].analysis.startswith("Who made it? Ann. When? 1900. Next I need to find out:")
    assert check_steps(steps, protocol) is None
    assert [len(s.queries) for s in gold.with_searches(question, [[]] * 3, most_queries=1)] == [1, 1, 1, 0]


@pytest.mark.parametrize("hurried", [False, True])
def test_a_demonstration_that_plans_is_well_formed(hurried):
    hops = (Hop("Who made it?", "Ann", FILM), Hop("When?", "1900", PERSON), Hop("Who ruled #1 in #2?", "Olav", FILM))
    question, protocol = with_hops(*hops), build_protocol(ProtocolSettings(format="dag"))
    steps = gold.planned(gold.hasty(question) if hurried else question, [[FILM], [PERSON], []])
    assert check_steps(steps, protocol) is None
    assert [s.queries for s in steps] == [("Who made it?", "When?"), *[("Who ruled Ann in 1900?",)] * (not hurried), ()]
    assert [list(s.documents) for s in steps[0].searches] == [[FILM], [PERSON]]
    assert steps[-1].answer == ("1900" if hurried else question.answers[0])
    assert gold.planned_searches(question)[2] == Search("Who ruled Ann in 1900?", kind="General")
