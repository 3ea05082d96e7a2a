"""Rewards for searches and for what they retrieved.

Every function takes an episode. A list has the reward of each step, a number is that of the last step; None is a
missing reward.
"""

from collections.abc import Hashable

from r3lite.core.episode import Episode, Step
from r3lite.protocols.base import IDLE_QUERY_FAULTS, new_query_counts


def gold_recall(episode: Episode) -> list[float] | None:
    """Returns, at each step, the share of the gold paragraphs that it is the first to retrieve. The shares add up to
    the recall, 0 to 1.

    The reward is None if no gold paragraph is known.
    """
    gold = episode.question.gold
    if not gold:
        return None
    return [len(new_gold) / len(gold) for new_gold in episode.new_gold()]


def gold_precision(episode: Episode) -> float | None:
    """Returns the share of gold ones among the retrieved paragraphs, each counted once; 0 if none was retrieved.

    The reward is None if no gold paragraph is known.
    """
    question = episode.question
    if not question.gold:
        return None
    paragraphs = set(map(question.paragraph_key, episode.documents))
    if not paragraphs:
        return 0.0
    return len(question.gold_indices(episode.documents)) / len(paragraphs)


def information_gain(episode: Episode, redundancy: float = 1.0) -> list[float] | None:
    """Returns, at each step, the gain in recall less `redundancy` times the share of its documents that earlier steps
    retrieved.

    This is G - P of StepSearch (arXiv 2505.15107), where P is that share. The likeness of a gold paragraph is that of
    the retrieved document most like it. G is how much the step raises this likeness, as a mean over the gold
    paragraphs. In the paper, likeness is a cosine of words; here it is 1 for the paragraph itself, else 0. The reward
    is None if no gold paragraph is known.
    """
    gains = gold_recall(episode)
    if gains is None:
        return None
    earlier: set[Hashable] = set()  # keys of paragraphs
    rewards = []
    for gain, step in zip(gains, episode.steps, strict=True):
        keys = [episode.question.paragraph_key(document) for document in step.documents]
        repeated = sum(key in earlier for key in keys)
        rewards.append(gain - redundancy * (repeated / (len(keys) or 1)))
        earlier.update(keys)
    return rewards


def search_count(episode: Episode, most: int = 3) -> list[float]:
    """Returns, at each step, how many of its new queries are among the first `most` of the episode."""
    return [float(within) for within, _ in _split_new_queries(episode, most)]


def search_excess(episode: Episode, most: int = 3) -> list[float]:
    """Returns -1 at each step with a query that is blank or repeated, and -1 for each new query after the first `most`
    of the episode; a penalty."""
    rewards = []
    for step, (_, beyond) in zip(episode.steps, _split_new_queries(episode, most), strict=True):
        rewards.append(-float(beyond) - float(is_idle(step)))
    return rewards


def is_idle(step: Step) -> bool:
    """Returns True if a query of the step is blank or repeated."""
    return not IDLE_QUERY_FAULTS.isdisjoint(step.faults)


def _split_new_queries(episode: Episode, most: int) -> list[tuple[int, int]]:
    """Returns how many of each step's new queries are among the first `most` of the episode, and how many are not."""
    split = []
    left = max(0, most)
    for count in new_query_counts(episode.steps):
        within = min(count, left)
        left -= within
        split.append((within, count - within))
    return split
