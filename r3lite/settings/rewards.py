"""Settings of the rewards."""

import re
from collections import Counter
from typing import Annotated, Any, ClassVar, Literal

from r3lite.core.config import MOST, Basic, Bounds, NonNegative, Section, UsageError
from r3lite.core.needs import Needs, NeedsOthers
from r3lite.settings.common import Weighted
from r3lite.settings.conditions import has_documents, has_queries

Factor = Annotated[float, Bounds(low=-1000, high=1000)]
FIRST_WEIGHT = "first_weight"
NAME = re.compile(r"\w+|\w+(\.\w+)*:\w+")  # a built-in reward, or package.module:function


class RewardEntry(Weighted):
    """NAME=WEIGHT, or a table of a name, a weight and the parameters of the reward, whose numbers are finite

    The keys are `name`, `weight` (1 unless given), perhaps `first_weight` (the weight in the first rounds of a
    curriculum), and the names of the reward's parameters. `rewards/registry.py` has the rewards and checks their
    parameters.
    """

    def __init__(self, entry: Any):
        super().__init__(entry, "name")
        for weight in (self["weight"], self.get(FIRST_WEIGHT, 0.0)):
            if type(weight) not in (int, float):
                raise ValueError
        for value in self.values():
            parts = value if isinstance(value, list) else [value]
            if not all(map(_is_plain, parts)):
                raise ValueError
        if not isinstance(self["name"], str) or not NAME.fullmatch(self["name"]):
            raise ValueError


def _is_plain(value: Any) -> bool:
    """Tells whether a value is text, true or false, or a number that is not too large."""
    if isinstance(value, str):
        return True
    return isinstance(value, (int, float)) and abs(value) <= MOST


class RewardSettings(Section):
    """Rewards."""

    needs: ClassVar = (
        # Harmful: in a format without searches no episode has enough searches, so that no answer would be rewarded.
        NeedsOthers("least_searches", "a --format that searches", has_queries, harmful=True),
        NeedsOthers("search_bonus idle_query_penalty process_judge", "a --format that searches", has_queries),
        NeedsOthers("process_recall", "a --format that searches and a --retriever other than none", has_documents),
        Needs(
            "gamma_correct gamma_incorrect gamma_fail",
            "--process-recall or --process-judge",
            lambda s: s.process_recall or s.process_judge,
        ),
        Needs(
            "curriculum_rounds curriculum_switch",
            "a reward with a first_weight in --rewards",
            lambda s: any(FIRST_WEIGHT in entry for entry in s.rewards or ()),
        ),
    )

    outcome_em: NonNegative = 1.0
    """reward at the end for an exact match"""
    outcome_f1: NonNegative = 0.0
    """reward at the end, times the F1 of the answer"""
    outcome_judge: NonNegative = 0.0
    """reward at the end if the judge says that the answer is correct"""
    process_recall: NonNegative = 0.0
    """reward at each query, times the share of the gold paragraphs that it is the first to retrieve"""
    process_judge: NonNegative = 0.0
    """reward at each query, times the mean of the judge's relevance and coherence"""
    format_reward: NonNegative = 0.1
    """reward for well-formed steps, times their share of all steps"""
    gamma_correct: Factor = 0.6
    """process rewards of an episode with a correct answer are multiplied by 1 + this (R3-RAG)"""
    gamma_incorrect: Factor = -0.2
    """the same for a wrong answer"""
    gamma_fail: Factor = -0.1
    """the same for an episode without an answer"""
    least_searches: Annotated[int, Bounds(low=0, high=100)] = 0
    """no outcome reward for an episode with fewer different searches; 0: off"""
    search_bonus: NonNegative = 0.0
    """reward for each query that is neither blank nor repeated"""
    idle_query_penalty: NonNegative = 0.0
    """penalty for each step with a blank or repeated query (--end-at-idle-query ends the episode there)"""
    rewards: Basic[tuple[RewardEntry, ...] | None] = None
    """further rewards: NAME=WEIGHT, comma-separated. docs/rewards.md has their names; package.module:function=WEIGHT is
    imported from the current folder; weights may be negative; in a TOML file, tables of name, weight, parameters and
    perhaps first_weight"""
    curriculum_rounds: Annotated[int, Bounds(low=0, high=1 << 30)] = 30
    """number of rounds for which rewards with a first_weight use it; 0: never"""
    curriculum_switch: Literal["hard", "linear"] = "hard"
    """how first_weight changes to weight; hard: at once, after these rounds; linear: gradually, round by round"""

    def __post_init__(self):
        for name, times in Counter(entry["name"] for entry in self.rewards or ()).items():
            if times > 1:
                raise UsageError(f"--rewards has {name} {times} times; give it one weight", code="reward-twice")
