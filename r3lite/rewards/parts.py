"""The rewards with flags of their own: `format`, `process`, `outcome` and `search`.

They are reward functions like those of `--rewards`. Their parameters are flags, such as `--outcome-em`; some of these
parameters are their weights. A judge's verdict is None if there is no judge: then the judge's part of a reward is 0.
"""

from r3lite.core.answer_match import answer_scores
from r3lite.core.episode import Episode
from r3lite.protocols.base import new_query_counts
from r3lite.rewards.judged import judged_answer, trajectory_factor
from r3lite.rewards.searching import is_idle
from r3lite.rewards.verdict import StepVerdict, Verdict


def well_formed(episode: Episode, format_reward: float) -> list[float]:
    """Returns `format_reward` / number of steps at each step without a fault.

    If each step got all of `format_reward`, more steps would be rewarded more.
    """
    return [0.0 if step.faults else format_reward / len(episode.steps) for step in episode.steps]


def process(
    episode: Episode,
    verdict: Verdict | None,
    process_recall: float,
    process_judge: float,
    outcome_judge: float,
    gamma_correct: float,
    gamma_incorrect: float,
    gamma_fail: float,
) -> list[float]:
    """Returns, at each step that searches, `process_recall` times the share of the gold paragraphs that it is the first
    to retrieve, plus `process_judge` times the mean of relevance and coherence; 0 at other steps.

    The sum is multiplied by `trajectory_factor`, which depends on whether the answer is right: the judge decides this
    if `outcome_judge` is not 0, else exact match does.
    """
    if outcome_judge:
        is_right = verdict is not None and judged_answer(episode, verdict) == 1.0
    else:
        em, _ = answer_scores(episode)
        is_right = em == 1.0
    factor = trajectory_factor(
        episode,
        is_right=is_right,
        gamma_correct=gamma_correct,
        gamma_incorrect=gamma_incorrect,
        gamma_fail=gamma_fail,
    )
    opinions = verdict.steps if verdict else [StepVerdict(0.0, 0.0)] * len(episode.steps)
    gold_count = len(episode.question.gold) or 1
    rewards = []
    for step, new_gold, opinion in zip(episode.steps, episode.new_gold(), opinions, strict=True):
        reward = 0.0
        if step.searches:
            recall = process_recall * len(new_gold) / gold_count
            quality = process_judge * (opinion.relevance + opinion.coherence) / 2
            reward = factor * (recall + quality)
        rewards.append(reward)
    return rewards


def outcome(
    episode: Episode,
    verdict: Verdict | None,
    outcome_em: float,
    outcome_f1: float,
    outcome_judge: float,
    least_searches: int,
) -> float:
    """Returns the weighted sum of EM, F1 and the judge's verdict on the answer; 0 after fewer than `least_searches`
    different searches."""
    if sum(new_query_counts(episode.steps)) < least_searches:
        return 0.0
    em, f1 = answer_scores(episode)
    judged = judged_answer(episode, verdict) if verdict else 0.0
    return outcome_em * em + outcome_f1 * f1 + outcome_judge * judged


def search(episode: Episode, search_bonus: float, idle_query_penalty: float) -> list[float]:
    """Returns, at each step, `search_bonus` for each new query, and -`idle_query_penalty` if a query is blank or
    repeated."""
    rewards = []
    for step, new in zip(episode.steps, new_query_counts(episode.steps), strict=True):
        penalty = idle_query_penalty if is_idle(step) else 0.0
        rewards.append(search_bonus * new - penalty)
    return rewards
