"""Rewards for searches and for what they retrieved.

Every function takes an episode. A list has the reward of each step, a number is that of the last step; None is a
missing reward.
"""

from collections.abc import Hashable
from itertools import accumulate

from r3lite.core.episode import Episode
from r3lite.protocols.base import IDLE, new_queries


def gold_recall(episode: Episode) -> list[float] | None:
    """At each step, the share of the gold paragraphs that it found first: they add up to the recall, 0 to 1.

    None if no gold paragraph is known.
    """
    gold = episode.question.gold
    return [len(news) / len(gold) for news in episode.new_gold()] if gold else None


def gold_precision(episode: Episode) -> float | None:
    """The share of gold ones among the paragraphs that it retrieved, each counted once; 0 if it retrieved none.

    None if no gold paragraph is known.
    """
    question = episode.question
    if not question.gold:
        return None
    found = set(map(question.paragraph, episode.documents))
    return len(question.gold_found(episode.documents)) / len(found) if found else 0.0


def information_gain(episode: Episode, redundancy: float = 1.0) -> list[float] | None:
    """At each step, the gain in recall less `redundancy` times the share of its documents that earlier steps retrieved.

    G - P of StepSearch (arXiv 2505.15107): G is the mean over the gold paragraphs of how much more like one the
    documents are than any before. There likeness is a cosine of words, here it is 1 for the paragraph itself, else 0.
    None if no gold paragraph is known.
    """
    gains = gold_recall(episode)
    if gains is None:
        return None
    seen: set[Hashable] = set()
    rewards = []
    for gain, step in zip(gains, episode.steps, strict=True):
        retrieved = [episode.question.paragraph(document) for document in step.documents]
        again = sum(name in seen for name in retrieved) / (len(retrieved) or 1)
        rewards.append(gain - redundancy * again)
        seen.update(retrieved)
    return rewards


def search_count(episode: Episode, most: int = 3) -> list[float]:
    """At each step, how many of its new queries are among the first `most` of the episode."""
    return [float(max(0, min(before + new, most) - before)) for before, new in _new_queries(episode)]


def search_excess(episode: Episode, most: int = 3) -> list[float]:
    """-1 at each step with a query that is blank or repeated, and -1 for each new query after the first `most` of the
    episode; a penalty."""
    pairs = zip(episode.steps, _new_queries(episode), strict=True)
    beyond = [(step, before + new - max(before, most)) for step, (before, new) in pairs]
    return [-float(max(0, n)) - float(not IDLE.isdisjoint(step.faults)) for step, n in beyond]


def _new_queries(episode: Episode) -> list[tuple[int, int]]:
    """Of each step, how many new queries there were before it, and how many it has."""
    counts = new_queries(episode.steps)
    return list(zip(accumulate(counts, initial=0), counts))
