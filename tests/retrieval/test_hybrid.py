"""Fusion of two lists, with numbers worked by hand."""

import pytest

from r3lite.core.episode import Document, Question
from r3lite.retrieval.hybrid import DEPTH, HybridRetriever, hybrid_retriever, reciprocal_ranks, scaled_scores
from r3lite.retrieval.setup import Setup
from r3lite.settings import RetrievalSettings

A, B, C, D = (Document(x, x, x) for x in "ABCD")
PAIR = (Question("q", "?", ("a",)), "query")


def brings(source, *scored):
    documents = [Document(d.id, d.title, d.text, score, source) for d, score in scored]
    return lambda pairs: [list(documents) for _ in pairs]


SEMANTIC = brings("semantic", (A, 0.75), (B, 0.5), (C, 0.25))
LEXICAL = brings("lexical", (C, 8.0), (D, 6.0), (A, 4.0))


def fused(top_k, worth, weights, semantic=SEMANTIC, lexical=LEXICAL):
    (documents,) = HybridRetriever(semantic, lexical, top_k, worth, weights)([PAIR])
    return [(d.id, d.source, d.score) for d in documents]


def test_reciprocal_ranks():
    """A and C: 1/61 + 1/63; B and D: 1/62. Of equal ones the semantic list's first comes first."""
    assert fused(4, reciprocal_ranks, (1.0, 1.0)) == [
        ("A", "semantic+lexical", pytest.approx(0.03226646)),
        ("C", "semantic+lexical", pytest.approx(0.03226646)),
        ("B", "semantic", pytest.approx(0.01612903)),
        ("D", "lexical", pytest.approx(0.01612903)),
    ]
    assert [id for id, *_ in fused(1, reciprocal_ranks, (1.0, 1.0))] == ["A"]


def test_weighted_scores():
    """Scaled, the semantic ones are 1, 0.5, 0 and the lexical ones 1, 0.5, 0: A 0.7, B 0.35, C 0.3, D 0.15."""
    assert [(id, pytest.approx(score)) for id, _, score in fused(4, scaled_scores, (0.7, 0.3))] == [
        ("A", 0.7), ("B", 0.35), ("C", 0.3), ("D", 0.15)
    ]  # fmt: skip
    half = fused(4, scaled_scores, (0.5, 0.5))
    assert [(id, pytest.approx(score)) for id, _, score in half] == [("A", 0.5), ("C", 0.5), ("B", 0.25), ("D", 0.25)]


def test_lists_of_equal_scores_or_of_none():
    assert scaled_scores([]) == []
    one = brings("lexical", (D, 3.0))
    assert fused(2, scaled_scores, (0.5, 0.5), lexical=one)[:2] == [("A", "semantic", 0.5), ("D", "lexical", 0.5)]
    nothing = brings("lexical")
    assert [id for id, *_ in fused(4, reciprocal_ranks, (1.0, 1.0), lexical=nothing)] == ["A", "B", "C"]


def test_the_settings_choose_the_fusion_and_the_lists_are_a_hundred_deep():
    documents = [Document(f"{i}", "", f"harbor number{i} " + "road " * i) for i in range(DEPTH + 20)]
    questions = [Question("q", "?", ("a",), tuple(documents))]

    def built(**changes):
        settings = RetrievalSettings(retriever="hybrid", encoder="hashing", **changes)
        return hybrid_retriever(Setup(settings, questions), top_k=3)

    rrf, weighted = built(), built(fusion="weighted", lexical_weight=0.2)
    assert (rrf.values_of, rrf.weights) == (reciprocal_ranks, (1.0, 1.0))
    assert (weighted.values_of, weighted.weights) == (scaled_scores, (0.8, 0.2))
    pair = (questions[0], "harbor")
    assert [len(retrieve([pair])[0]) for retrieve in (rrf.semantic, rrf.lexical, rrf)] == [DEPTH, DEPTH, 3]
