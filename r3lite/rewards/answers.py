"""Rewards for the final answer, compared with the gold answers. An episode without an answer is never right.

Every function takes an episode; what it returns is the reward of the last step. None is a missing reward.
"""

from r3lite.core import answer_match
from r3lite.core.answer_match import answer_scores, combined_score, in_a_row, normalize, split_words
from r3lite.core.episode import Episode


def exact_match(episode: Episode) -> float:
    """1 if the answer is one of the gold answers after normalization, else 0."""
    return answer_scores(episode)[0]


def answer_f1(episode: Episode) -> float:
    """The best F1 of the answer's words over the gold answers, 0 to 1."""
    return answer_scores(episode)[1]


def contains_gold(episode: Episode) -> float:
    """1 if a gold answer stands in the answer after normalization, as whole words: `no` is not in `north`; else 0.

    A long answer is more likely to hold it: `length_penalty` is its counterweight.
    """
    words = split_words(normalize(episode.prediction))
    return float(any(in_a_row(split_words(normalize(gold)), words) for gold in episode.question.answers))


def rouge_l(episode: Episode) -> float:
    """The best ROUGE-L F1 of the answer over the gold answers (Lin 2004, W04-1013), 0 to 1."""
    return max((answer_match.rouge_l(episode.prediction, gold).f1 for gold in episode.question.answers), default=0.0)


def rouge_l_levels(
    episode: Episode,
    high: float = 0.7,
    low: float = 0.3,
    pay_exact: float = 5.0,
    pay_high: float = 3.0,
    pay_low: float = -1.0,
) -> float:
    """ROUGE-L in levels: `pay_exact` for an exact match, `pay_high` from `high` on, `pay_low` below `low`, else 0.

    The rewards are those of systems with solution tags; where their levels begin is not known, and r3lite's own.
    """
    alike = rouge_l(episode)
    if exact_match(episode):
        return pay_exact
    return pay_high if alike >= high else pay_low if alike < low else 0.0


def hop_weighted(episode: Episode) -> float | None:
    """0.8 (0.6 EM + 0.3 F1) + 0.2 recall of the gold paragraphs, times 1 at two hops to 2 from four on: 0 to 1.84.

    None if no gold paragraph is known. It is the score `combined` of an evaluation.
    """
    if episode.recall is None:
        return None
    return combined_score(*answer_scores(episode), episode.recall, episode.question.hop_count)
