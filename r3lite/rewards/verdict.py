"""A judge's opinion of an episode, which rewards use. The judge itself is in judge.py."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepVerdict:
    """A judge's opinion of one step: three numbers from 0 to 1.

    A step without documents has relevance 0, and a step without a query has rationality 0.
    """

    relevance: float  # of the passages that it retrieved, to the question
    coherence: float  # of its analysis with what was known before it
    rationality: float = 0.0  # of its query: whether it asks for what is missing, and a passage could answer it


@dataclass(frozen=True)
class Verdict:
    """A judge's opinion of an episode: whether its answer is right, and one opinion per step."""

    correct: bool
    steps: tuple[StepVerdict, ...]
