"""Rewards for what only a judge can say. A function that names a `verdict` is given the judge's."""

from r3lite.core.episode import Episode
from r3lite.rewards.verdict import Verdict


def judged_answer(episode: Episode, verdict: Verdict) -> float:
    """1 if the judge calls the answer right, else 0."""
    return float(verdict.correct and bool(episode.prediction))


def relevance(
    episode: Episode,
    verdict: Verdict,
    gamma_correct: float = 0.0,
    gamma_incorrect: float = 0.0,
    gamma_fail: float = 0.0,
) -> list[float]:
    """At each query, how relevant its documents are to the question, 0 to 1, times the trajectory factor of R3-RAG
    (arXiv 2505.23794, with 0.6, -0.2 and -0.1)."""
    gamma = gamma_fail
    if episode.prediction:
        gamma = gamma_correct if verdict.correct else gamma_incorrect
    pairs = zip(episode.steps, verdict.steps, strict=True)
    return [(1 + gamma) * opinion.relevance if step.searches else 0.0 for step, opinion in pairs]


def coherence(episode: Episode, verdict: Verdict) -> float:
    """How well the analyses follow from what was known before, 0 to 1; the mean over the steps."""
    return sum(opinion.coherence for opinion in verdict.steps) / (len(verdict.steps) or 1)


def query_rationality(episode: Episode, verdict: Verdict) -> float:
    """How sensible the queries are, given what was known, 0 to 1; the mean over the steps that ask, 0 if none does."""
    asked = [v.rationality for s, v in zip(episode.steps, verdict.steps, strict=True) if s.searches]
    return sum(asked) / (len(asked) or 1)
