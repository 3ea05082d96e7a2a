"""The golden retriever: supporting paragraphs, and those that join them, drawn the same way each time."""

import pytest

from r3lite.core.episode import Document, Question
from r3lite.core.errors import R3LiteError
from r3lite.retrieval.golden import golden_retriever, paragraphs
from r3lite.retrieval.setup import Setup
from r3lite.settings import RetrievalSettings
from tests.errors import raises

DOCUMENTS = tuple(Document(f"q/{i}", f"Title {i}", f"Text {i}.") for i in range(12))
GOLD = (DOCUMENTS[7], DOCUMENTS[2])
ONE = Question("q", "?", ("a",), DOCUMENTS, gold=GOLD, gold_by="title")
BARE = Question("bare", "?", ("a",), DOCUMENTS)


def golden(*questions, seed=0, **changes):
    return golden_retriever(Setup(RetrievalSettings(retriever="golden", **changes), list(questions), seed), top_k=1)


def test_the_gold_paragraphs_whatever_is_asked():
    assert golden(ONE)([(ONE, "anything"), (ONE, "x")]) == [list(GOLD), list(GOLD)]
    assert {(d.source, d.score) for d in golden(ONE)([(ONE, "x")])[0]} == {("golden", None)}


def test_a_question_without_gold_paragraphs_is_refused():
    with raises(R3LiteError, "golden-without-paragraphs", "bare"):
        golden(ONE, BARE)
    with raises(R3LiteError, "golden-without-paragraphs", "bare"):
        golden(BARE)


@pytest.mark.parametrize(("rate", "noise_count"), [(0.0, 0), (0.1, 1), (0.5, 5), (0.77, 8), (1.0, 10)])
def test_the_noise_rate_is_the_share_of_the_other_paragraphs(rate, noise_count):
    """2 of the 12 paragraphs are gold, so 10 may join."""
    documents = paragraphs(ONE, rate, seed=0)
    assert len(set(documents)) == len(documents) == 2 + noise_count and set(GOLD) <= set(documents) <= set(DOCUMENTS)


def test_noise_follows_seed_and_question_and_nothing_else():
    first = golden(ONE, noise_rate=0.5)
    assert first([(ONE, "x")]) == first([(ONE, "y")]) == golden(ONE, noise_rate=0.5)([(ONE, "z")])
    assert paragraphs(ONE, 0.5, seed=1) != paragraphs(ONE, 0.5, seed=0)
    other_question = Question("p", "?", ("a",), DOCUMENTS, gold=GOLD, gold_by="title")
    assert paragraphs(other_question, 0.5, seed=0) != paragraphs(ONE, 0.5, seed=0)


def test_the_order_does_not_tell_which_are_gold():
    """Over many seeds a gold paragraph stands at each of the 12 places equally often, and so before the other one."""
    orders = [paragraphs(ONE, 1.0, seed) for seed in range(1200)]
    places = [order.index(GOLD[0]) for order in orders]
    counts = [places.count(place) for place in range(12)]
    assert min(counts) > 60 and max(counts) < 145  # 100 each, give or take 4 standard deviations of 9.6
    first = sum(order.index(GOLD[0]) < order.index(GOLD[1]) for order in orders)
    assert 530 < first < 670
