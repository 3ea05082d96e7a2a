"""Rewards for the final answer, compared with the gold answers. An episode without an answer is never right.

Every function takes an episode and returns the reward of its last step; None if the reward is missing.
"""

from r3lite.core import answer_match
from r3lite.core.answer_match import answer_scores, combined_score, in_a_row, normalize, split_words
from r3lite.core.episode import Episode


def exact_match(episode: Episode) -> float:
    """Returns 1 if the answer is one of the gold answers after normalization, else 0."""
    em, _ = answer_scores(episode)
    return em


def answer_f1(episode: Episode) -> float:
    """Returns the best F1 of the answer's words over the gold answers, 0 to 1."""
    _, f1 = answer_scores(episode)
    return f1


def contains_gold(episode: Episode) -> float:
    """Returns 1 if the answer contains a gold answer as whole words after normalization, else 0.

    As whole words, so `no` is not in `north`. A long answer is more likely to contain a gold answer; the reward
    `length_penalty` counters that.
    """
    words = split_words(normalize(episode.prediction))
    gold_answers = [split_words(normalize(gold)) for gold in episode.question.answers]
    return float(any(in_a_row(gold_words, words) for gold_words in gold_answers))


def rouge_l(episode: Episode) -> float:
    """Returns the best ROUGE-L F1 of the answer over the gold answers (Lin 2004, W04-1013), 0 to 1."""
    overlaps = [answer_match.rouge_l(episode.prediction, gold) for gold in episode.question.answers]
    return max((overlap.f1 for overlap in overlaps), default=0.0)


def rouge_l_levels(
    episode: Episode,
    high: float = 0.7,
    low: float = 0.3,
    pay_exact: float = 5.0,
    pay_high: float = 3.0,
    pay_low: float = -1.0,
) -> float:
    """Returns ROUGE-L in levels: `pay_exact` for an exact match, `pay_high` from `high` on, `pay_low` below `low`,
    else 0.

    The default rewards are those of systems with solution tags. At which ROUGE-L those systems change from one level to
    the next is not known: `high` and `low` are r3lite's choice.
    """
    if exact_match(episode):
        return pay_exact
    similarity = rouge_l(episode)
    if similarity >= high:
        return pay_high
    if similarity < low:
        return pay_low
    return 0.0


def hop_weighted(episode: Episode) -> float | None:
    """Returns 0.8 (0.6 EM + 0.3 F1) + 0.2 recall of the gold paragraphs, times a weight: 1 up to two hops,
    1.5 at three, 2 from four on.

    The reward is 0 to 1.84; None if no gold paragraph is known. An evaluation reports it as `combined`.
    """
    if episode.recall is None:
        return None
    em, f1 = answer_scores(episode)
    return combined_score(em, f1, episode.recall, hops=episode.question.hop_count)
