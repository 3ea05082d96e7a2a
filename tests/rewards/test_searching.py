import pytest

from r3lite.core.episode import Document, Episode, Question, Search, Step
from r3lite.protocols.base import new_query_counts
from r3lite.rewards.searching import gold_precision, gold_recall, information_gain, search_count, search_excess
from tests.rewards.episodes import ANOTHER, GOLD, OTHER, QUESTION, answered, search

UNKNOWN = Question("q", "Who?", ("Ada",))


def test_recall_is_paid_where_a_paragraph_is_found_first():
    steps = [search(OTHER), search(GOLD[1], OTHER), search(GOLD[1], GOLD[0])]
    assert gold_recall(answered("Ada", *steps)) == [0, 0.5, 0.5, 0]


def test_precision_counts_a_paragraph_once():
    # Other, another, and the first gold paragraph, which came twice and once cut.
    cut = Document("x", GOLD[0].title, GOLD[0].text[:4])
    assert gold_precision(answered("Ada", search(OTHER, GOLD[0]), search(GOLD[0], cut, ANOTHER))) == pytest.approx(
        1 / 3
    )
    assert gold_precision(answered("Ada")) == gold_precision(answered("Ada", search())) == 0


def test_gain_less_what_was_seen_before():
    steps = [search(OTHER, GOLD[0]), search(GOLD[0], ANOTHER, OTHER, GOLD[1]), search(OTHER), search()]
    # Half of the gold; the other half, with 2 of 4 seen before; nothing, with 1 of 1; nothing was brought.
    assert information_gain(answered("Ada", *steps)) == [0.5, 0.5 - 2 / 4, -1, 0, 0]
    assert information_gain(answered("Ada", *steps), redundancy=0.1) == pytest.approx([0.5, 0.45, -0.1, 0, 0])


@pytest.mark.parametrize("reward", [gold_recall, gold_precision, information_gain])
def test_without_known_gold_the_reward_is_missing_and_not_zero(reward):
    assert reward(answered("Ada", search(OTHER), question=UNKNOWN)) is None


def test_bonus_and_penalty_of_searches():
    idle = [search(faults=("repeated_query",)), search(query=None, faults=("blank_query",))]
    episode = answered("Ada", search(query="a"), idle[0], search(query="b"), idle[1], search(query="c"))
    assert search_count(episode) == [1, 0, 1, 0, 1, 0] and search_excess(episode) == [0, -1, 0, -1, 0, 0]
    assert search_count(episode, most=2) == [1, 0, 1, 0, 0, 0]
    assert search_excess(episode, most=2) == [0, -1, 0, -1, -1, 0]
    assert search_count(answered("Ada")) == search_excess(answered("Ada")) == [0]
    assert search_count(Episode(QUESTION)) == []


def test_bonus_and_penalty_of_the_queries_of_a_step():
    """Three queries in one step counted as one search."""
    first = Step("a", tuple(map(Search, ("one", "two"))))
    second = Step("b", tuple(map(Search, ("two", "three", "four", "five"))), faults=("repeated_query",))
    blank = Step("c", (Search("six"),), faults=("blank_query",))  # beside a line without a query
    episode = answered("Ada", first, second, blank)
    assert new_query_counts(episode.steps) == [2, 3, 1, 0]
    assert search_count(episode) == [2, 1, 0, 0] and search_count(episode, most=9) == [2, 3, 1, 0]
    assert search_excess(episode) == [0, -2 - 1, -1 - 1, 0] and search_excess(episode, most=9) == [0, -1, -1, 0]
    assert new_query_counts([Step("d", tuple(map(Search, ("one", "One!"))))]) == [1]  # two nodes that ask the same
