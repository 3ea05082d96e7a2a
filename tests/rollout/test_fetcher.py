"""Queries are gathered and sent by iterations that are counted; each sequence gets the documents of its own."""

from contextlib import closing

from r3lite.core.episode import Document, Failure, Question, Routes, Search
from r3lite.rollout.fetcher import GATHER, PATIENCE, Fetcher
from r3lite.rollout.sequence import Sequence
from r3lite.rollout.uniforms import Uniforms


def waiting(id, *queries):
    return Sequence(Question(id, "?", ("a",)), stream=Uniforms(0), pending=tuple(map(Search, queries)))


def documents(queries):
    return [Document(q, q, q) for q in queries]


def test_all_queries_of_all_sequences_are_one_call():
    """A step may ask several; its documents come in their order."""
    calls = []

    def retrieve(pairs):
        calls.append([(question.id, query) for question, query in pairs])
        return [documents([query, query + "!"]) for _, query in pairs]

    one, two = waiting("1", "a", "b"), waiting("2", "c")
    with closing(Fetcher(retrieve)) as fetcher:
        fetched = fetcher.fetch([one, two])
    assert calls == [[("1", "a"), ("1", "b"), ("2", "c")]]
    assert fetched == [(one, [documents(["a", "a!"]), documents(["b", "b!"])]), (two, [documents(["c", "c!"])])]


def test_a_query_that_failed_brings_nothing_and_its_sequence_says_why():
    def retrieve(pairs):
        return [Failure("no room") if query == "bad" else documents([query]) for _, query in pairs]

    one, two = waiting("1", "a", "bad"), waiting("2", "c")
    with closing(Fetcher(retrieve)) as fetcher:
        assert fetcher.fetch([one, two]) == [(one, [documents(["a"]), []]), (two, [documents(["c"])])]
    assert (one.failure, two.failure) == ("no room", None)
    assert one.episode().failure == "no room"


def test_queries_wait_for_others_and_documents_for_their_iteration():
    first, second = waiting("1", "a"), waiting("2", "b")
    with closing(Fetcher(lambda pairs: [documents([query]) for _, query in pairs])) as fetcher:
        arrivals = {}
        for iteration in range(GATHER + PATIENCE + 1):
            for sequence, _ in fetcher.collect(idle=False):
                arrivals[sequence.question.id] = iteration
            if iteration == 0:
                fetcher.queue(first)
            if iteration == 3:
                fetcher.queue(second)
            fetcher.end_iteration(idle=False)
    assert arrivals == {"1": GATHER + PATIENCE, "2": GATHER + PATIENCE}


def test_nothing_is_waited_for_if_no_sequence_is_at_work():
    with closing(Fetcher(lambda pairs: [documents([query]) for _, query in pairs])) as fetcher:
        fetcher.queue(waiting("1", "a"))
        fetcher.end_iteration(idle=True)
        assert [results for _, results in fetcher.collect(idle=True)] == [[documents(["a"])]]


def test_each_kind_of_source_is_one_call_of_its_own_retriever():
    calls = []

    def named(name):
        def retrieve(pairs):
            calls.append((name, [(question.id, query) for question, query in pairs]))
            return [documents([f"{name} {query}"]) for _, query in pairs]

        return retrieve

    one, two = waiting("1"), waiting("2")
    one.pending = (Search("a", kind="News"), Search("b", kind="General"), Search("c", kind="News"))
    two.pending = (Search("d", kind="Academic"), Search("e"), Search("f", kind="News"))
    routes = Routes(named("all"), {"News": named("news"), "Academic": named("papers")})
    with closing(Fetcher(routes)) as fetcher:
        fetched = fetcher.fetch([one, two])
    assert sorted(calls) == [
        ("all", [("1", "b"), ("2", "e")]),
        ("news", [("1", "a"), ("1", "c"), ("2", "f")]),
        ("papers", [("2", "d")]),
    ]
    assert [[d.id for d in hits] for hits in fetched[0][1]] == [["news a"], ["all b"], ["news c"]]
    assert [[d.id for d in hits] for hits in fetched[1][1]] == [["papers d"], ["all e"], ["news f"]]


def test_a_source_that_fails_fails_its_own_searches_only():
    one, two = waiting("1"), waiting("2")
    one.pending, two.pending = (Search("a", kind="News"), Search("b")), (Search("c", kind="General"),)
    failing = {"News": lambda pairs: [Failure("no reply")] * len(pairs)}
    with closing(Fetcher(Routes(lambda pairs: [documents([query]) for _, query in pairs], failing))) as fetcher:
        assert fetcher.fetch([one, two]) == [(one, [[], documents(["b"])]), (two, [documents(["c"])])]
    assert (one.failure, two.failure) == ("no reply", None)
