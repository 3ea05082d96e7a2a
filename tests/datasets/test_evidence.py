"""Demonstrations that quote what they found: exact texts, and what is rejected rather than made up."""

from dataclasses import replace

import pytest

from r3lite.core.episode import Document, Failure, Hop, Question
from r3lite.datasets.demonstrations import MAX_QUOTED, Demonstration, demonstrate
from r3lite.datasets.trajectories import check_steps
from r3lite.protocols.registry import build_protocol
from r3lite.settings import LengthSettings, ProtocolSettings

FILM = Document("q/2", "Brenn (film)", "Brenn is old. It is a film by Ann Dahl.")
PERSON = Document("q/0", "Ann Dahl", "Ann Dahl was born in Oslo.")
OTHER = Document("9", "Other", "Nothing.")
HOPS = (
    Hop("Who directed Brenn?", "Ann Dahl", FILM, ("It is a film by Ann Dahl.",)),
    Hop("Where was #1 born?", "Oslo", PERSON, ("Ann Dahl was born in Oslo.",)),
)
# As HotpotQA has them: names to look up, and the sentences that say why.
QUOTES = (replace(HOPS[0], question="Brenn"), replace(HOPS[1], question="#1"))
QUESTION = Question("q", "Where was the director of Brenn born?", ("Oslo",), (), (FILM, PERSON), "title", HOPS)


def demonstration_of(*documents, question=QUESTION, max_hops=3, length=500):
    """The demonstration whose queries bring these documents, one after the other."""
    one = Demonstration(question, max_hops, length)
    for retrieved in documents:
        assert not one.is_over
        one.add(retrieved)
    return one


def test_a_missing_name_is_looked_up_and_each_fact_is_written_once():
    one = demonstration_of([OTHER, FILM], [PERSON])
    first, second, last = one.steps
    assert (first.analysis, first.queries) == ("The question names Brenn.", (QUESTION.text,))
    assert second.analysis == "Who directed Brenn? Ann Dahl."
    assert (second.queries, second.documents) == (("Ann Dahl",), (PERSON,))
    assert (last.analysis, last.answer) == ("Where was Ann Dahl born? Oslo.", "Oslo")
    assert check_steps(one.steps, build_protocol(ProtocolSettings())) is None


def test_what_is_all_found_is_answered_at_once():
    one = demonstration_of([PERSON, FILM])
    assert one.steps[1].analysis == "Who directed Brenn? Ann Dahl. Where was Ann Dahl born? Oslo."
    assert one.steps[1].answer == "Oslo"


def test_without_sub_questions_the_evidence_is_quoted():
    one = demonstration_of([FILM], [PERSON], question=replace(QUESTION, hops=QUOTES))
    assert [s.queries for s in one.steps] == [(QUESTION.text,), ("Ann Dahl",), ()]
    quoted = ["Brenn: It is a film by Ann Dahl.", "Ann Dahl: Ann Dahl was born in Oslo."]
    assert [s.analysis for s in one.steps[1:]] == quoted


def test_a_fact_that_leans_on_one_not_found_yet_waits_for_it():
    """Nothing says before that it matters: writing it down would teach to guess. It is not searched for again."""
    one = demonstration_of([PERSON], [FILM])
    assert [s.queries for s in one.steps] == [(QUESTION.text,), ("Brenn",), ()]
    assert one.steps[1].analysis == "Nothing of use was found."
    assert one.steps[2].analysis == "Who directed Brenn? Ann Dahl. Where was Ann Dahl born? Oslo."


def test_a_question_that_finds_nothing_goes_on_with_a_name_that_it_has():
    one = demonstration_of([OTHER], [FILM], [PERSON])
    assert [s.queries for s in one.steps] == [(QUESTION.text,), ("Brenn",), ("Ann Dahl",), ()]
    assert one.steps[1].analysis == "Nothing of use was found."


def test_a_name_that_nothing_has_named_is_not_asked_for():
    """Asking for it would teach the model to ask for what it cannot know: the sub-question is asked in its place."""
    film = replace(HOPS[0], document=replace(FILM, title="A Film of 1990"), question="Which film is old?")
    question = replace(QUESTION, gold=(film.document, PERSON), hops=(film, HOPS[1]))
    assert demonstration_of([OTHER], question=question).steps[1].queries == ("Which film is old?",)
    hidden = replace(question, hops=(replace(film, question=question.text), HOPS[1]))
    assert demonstration_of([OTHER], question=hidden).rejected == "no query known for a missing paragraph"


def test_an_answer_that_no_quote_has_is_not_filled_in():
    """`Old Persian` stood in the query, and only `Persian` in what had been read."""
    dahl = replace(QUOTES[0], answer="Ann Maria Dahl")
    person = replace(QUOTES[1], document=replace(PERSON, title="Oslo people"))
    question = replace(QUESTION, gold=(FILM, person.document), hops=(dahl, person))
    assert demonstration_of([FILM], question=question).rejected == "no query known for a missing paragraph"


@pytest.mark.parametrize(
    ("documents", "changes", "reason"),
    [
        (([FILM], [OTHER], [OTHER]), {}, "a query that does not find its gold paragraph"),
        (([FILM],), {"max_hops": 1}, "more than 1 queries"),
        (([FILM, PERSON],), {"question": replace(QUESTION, answers=("Bergen",))}, "an answer that stands in no"),
        (([FILM, PERSON],), {"length": 20}, None),  # the evidence is cut off both: as if nothing was found
    ],
)
def test_what_cannot_be_shown_is_rejected(documents, changes, reason):
    one = demonstration_of(*documents, **changes)
    assert (one.rejected or "").startswith(reason or "") and bool(one.rejected) == bool(reason)
    assert reason or one.steps[1].analysis == "Nothing of use was found."


def test_a_paragraph_without_its_evidence_is_not_found():
    """One of the same title may be of another corpus, and say something else."""
    namesake = replace(PERSON, text="Ann Dahl is a painter.")
    assert demonstration_of([FILM], [namesake], [namesake]).rejected


def test_a_query_that_finds_nothing_makes_way_for_the_next_that_is_known():
    demonstration = demonstration_of([FILM], [OTHER], [PERSON])
    assert demonstration.steps[1].queries == (HOPS[1].question.replace("#1", HOPS[0].answer),)
    assert demonstration.steps[1].documents == (PERSON,) and demonstration.steps[-1].answer == QUESTION.answers[0]
    assert demonstration_of([FILM], [PERSON]).steps[1].queries == ("Ann Dahl",)


def test_what_is_too_long_to_quote_is_rejected():
    long = "word " * (MAX_QUOTED // 5)
    hop = replace(QUOTES[1], evidence=(long.strip(),), document=replace(PERSON, text=long))
    question = replace(QUESTION, gold=(FILM, hop.document), hops=(HOPS[0], hop))
    assert demonstration_of([FILM], [hop.document], question=question, length=9999).rejected.startswith(
        "more than 600 characters"
    )


def test_what_a_comparison_comes_to_is_written_before_its_answer():
    films = Document("q/3", "Alva", "Alva is of 1950."), Document("q/4", "Berta (film)", "Berta is of 3 May 1949.")
    hops = Hop("When was Alva published?", "1950", films[0]), Hop("When was Berta published?", "3 May 1949", films[1])
    question = Question("c", "Which is older, Alva or Berta?", ("Berta",), (), films, "title", hops, "comparison")
    last = demonstration_of(films, question=question).steps[-1]
    assert last.analysis.endswith("published? 3 May 1949. Berta (3 May 1949) is before Alva (1950).")


def test_yes_and_no_need_not_stand_in_a_document():
    assert demonstration_of([FILM, PERSON], question=replace(QUESTION, answers=("yes",))).steps[-1].answer == "yes"


def test_all_questions_are_asked_together():
    batches = []

    def retrieve(pairs):
        batches.append([query for _, query in pairs])
        return [Failure("no room") if q.id == "f" else [FILM] if query == q.text else [PERSON] for q, query in pairs]

    lengths = LengthSettings(max_hops=3, max_document_tokens=100)
    complete, broken = demonstrate([QUESTION, replace(QUESTION, id="f")], retrieve, lengths)
    assert batches == [[QUESTION.text] * 2, ["Ann Dahl"]]
    assert complete.steps[-1].answer == "Oslo" and broken.rejected == "the retriever failed"
