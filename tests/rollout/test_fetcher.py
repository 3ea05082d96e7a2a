"""Queries are gathered and sent by iterations that are counted; each sequence gets the documents of its own."""

import random

from r3lite.episode import Document, Failure, Question
from r3lite.rollout.fetcher import GATHER, PATIENCE, Fetcher
from r3lite.rollout.sequence import Sequence


def waiting(id, *queries):
    return Sequence(Question(id, "?", ("a",)), stream=random.Random(0), pending=queries)


def documents(queries):
    return [Document(q, q, q) for q in queries]


def test_all_queries_of_all_sequences_are_one_call():
    """A step may ask several; its documents come in their order."""
    calls = []

    def retrieve(pairs):
        calls.append([(question.id, query) for question, query in pairs])
        return [documents([query, query + "!"]) for _, query in pairs]

    one, two = waiting("1", "a", "b"), waiting("2", "c")
    with Fetcher(retrieve) as fetcher:
        fetched = fetcher.fetch([one, two])
    assert calls == [[("1", "a"), ("1", "b"), ("2", "c")]]
    assert fetched == [(one, [documents(["a", "a!"]), documents(["b", "b!"])]), (two, [documents(["c", "c!"])])]


def test_a_query_that_failed_brings_nothing_and_its_sequence_says_why():
    def retrieve(pairs):
        return [Failure("no room") if query == "bad" else documents([query]) for _, query in pairs]

    one, two = waiting("1", "a", "bad"), waiting("2", "c")
    with Fetcher(retrieve) as fetcher:
        assert fetcher.fetch([one, two]) == [(one, [documents(["a"]), []]), (two, [documents(["c"])])]
    assert (one.failure, two.failure) == ("no room", None)
    assert one.episode().failure == "no room"


def test_queries_wait_for_others_and_documents_for_their_iteration():
    first, second = waiting("1", "a"), waiting("2", "b")
    with Fetcher(lambda pairs: [documents([query]) for _, query in pairs]) as fetcher:
        arrivals = {}
        for iteration in range(GATHER + PATIENCE + 1):
            for sequence, _ in fetcher.collect(idle=False):
                arrivals[sequence.question.id] = iteration
            if iteration == 0:
                fetcher.ask(first)
            if iteration == 3:
                fetcher.ask(second)
            fetcher.send(idle=False)
    assert arrivals == {"1": GATHER + PATIENCE, "2": GATHER + PATIENCE}


def test_nothing_is_waited_for_if_no_sequence_is_at_work():
    with Fetcher(lambda pairs: [documents([query]) for _, query in pairs]) as fetcher:
        fetcher.ask(waiting("1", "a"))
        fetcher.send(idle=True)
        assert [found for _, found in fetcher.collect(idle=True)] == [[documents(["a"])]]
