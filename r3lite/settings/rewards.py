"""Settings of what an episode is paid."""

from dataclasses import dataclass
from typing import Annotated

from r3lite.config import Bounds, Judged, NonNegative, Section

Factor = Annotated[float, Bounds(low=-1000, high=1000)]


@dataclass(frozen=True)
class RewardSettings(Section):
    """Rewards."""

    outcome_em: NonNegative = 1.0
    """paid at the end for an exact match"""
    outcome_f1: NonNegative = 0.0
    """paid at the end per unit of F1"""
    outcome_judge: Judged[NonNegative] = 0.0
    """paid at the end when the judge calls the answer right"""
    process_recall: NonNegative = 0.0
    """paid at each query per share of the gold paragraphs found for the first time, which must be known"""
    process_judge: Judged[NonNegative] = 0.0
    """paid at each query per unit of the judge's relevance and coherence"""
    format_reward: NonNegative = 0.1
    """paid for well-formed steps: this times their share of the episode's steps"""
    gamma_correct: Factor = 0.6
    """process rewards of a trajectory with a right answer are multiplied by 1 + this (R3-RAG)"""
    gamma_incorrect: Factor = -0.2
    """the same for a wrong answer"""
    gamma_fail: Factor = -0.1
    """the same for an episode without an answer"""
    least_searches: Annotated[int, Bounds(low=0, high=100)] = 0
    """an episode with fewer different searches is not paid for its outcome; 0: off"""
    search_bonus: NonNegative = 0.0
    """paid at each query that is neither blank nor repeated"""
    idle_query_penalty: NonNegative = 0.0
    """taken off at each step with a blank or repeated query (--end-at-idle-query ends the episode there)"""
