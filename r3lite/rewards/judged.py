"""Rewards for what only a judge can say. A function with a parameter `verdict` gets the judge's verdict."""

from r3lite.core.episode import Episode
from r3lite.rewards.verdict import Verdict


def judged_answer(episode: Episode, verdict: Verdict) -> float:
    """Returns 1 if the judge calls the answer right, else 0."""
    return float(verdict.correct and bool(episode.prediction))


def relevance(
    episode: Episode,
    verdict: Verdict,
    gamma_correct: float = 0.0,
    gamma_incorrect: float = 0.0,
    gamma_fail: float = 0.0,
) -> list[float]:
    """Returns for each step how relevant its documents are, 0 to 1, times `trajectory_factor`; 0 without a query.

    This is R3-RAG's process reward (arXiv 2505.23794). The paper's gammas are 0.6, -0.2 and -0.1.
    """
    factor = trajectory_factor(
        episode,
        is_right=verdict.correct,
        gamma_correct=gamma_correct,
        gamma_incorrect=gamma_incorrect,
        gamma_fail=gamma_fail,
    )
    rewards = []
    for step, opinion in zip(episode.steps, verdict.steps, strict=True):
        rewards.append(factor * opinion.relevance if step.searches else 0.0)
    return rewards


def trajectory_factor(
    episode: Episode,
    is_right: bool,
    gamma_correct: float,
    gamma_incorrect: float,
    gamma_fail: float,
) -> float:
    """Returns R3-RAG's factor of an episode's process rewards: 1 + the gamma of a correct, wrong or missing answer."""
    if not episode.prediction:
        return 1 + gamma_fail
    if is_right:
        return 1 + gamma_correct
    return 1 + gamma_incorrect


def coherence(episode: Episode, verdict: Verdict) -> float:
    """Returns the mean over the steps of how well their analyses follow from what was known then, 0 to 1."""
    return sum(opinion.coherence for opinion in verdict.steps) / (len(verdict.steps) or 1)


def query_rationality(episode: Episode, verdict: Verdict) -> float:
    """Returns the mean over the steps that search of how sensible their queries are, given what was known, 0 to 1.

    The reward is 0 if no step searches.
    """
    pairs = zip(episode.steps, verdict.steps, strict=True)
    values = [opinion.rationality for step, opinion in pairs if step.searches]
    return sum(values) / (len(values) or 1)
