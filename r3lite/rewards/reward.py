"""The reward of each step of an episode: the sum of all rewards of the settings, see `registry.py`.

Takes an episode, the weights of the settings and, if there is a judge, its `Verdict`.
"""

from collections.abc import Set
from dataclasses import dataclass, field

from r3lite.core.answer_match import answer_scores
from r3lite.core.episode import Episode
from r3lite.core.errors import R3LiteError
from r3lite.rewards.judge import Judge
from r3lite.rewards.judged import judged_answer
from r3lite.rewards.missing import check_all_missing
from r3lite.rewards.registry import LARGEST_REWARD, needs_verdict, rewards_of
from r3lite.rewards.verdict import Verdict
from r3lite.settings import RewardSettings

ALWAYS = ("format", "process", "outcome")  # parts that every reward has; they come first in the lines of episodes.jsonl


@dataclass(frozen=True)
class EpisodeReward:
    """The rewards of an episode.

    `by_step[k]` is the reward at the end of step k. `parts` has two kinds of numbers by name:
    - Weighted parts, which add up to the total: `format`, `process`, `outcome`, `search` if searches are rewarded, and
      each named reward.
    - Scores, which are only logged: `em`, `f1`, `recall` (None if the question has no gold paragraphs) and, with a
      judge, `judge` (1 if it says that the answer is right).

    `answer_reward` is the reward of the answer alone: the sum of `outcome` and of the named rewards for answers. None:
    the run has no reward for answers.

    Raises R3LiteError if a reward is not finite or too large for fp32.
    """

    by_step: list[float]
    parts: dict[str, float | None] = field(default_factory=dict)
    answer_reward: float | None = None

    def __post_init__(self):
        for reward in self.by_step:
            if not abs(reward) <= LARGEST_REWARD:  # true of NaN, too
                cause = f"the reward of a step is {reward}; it must be finite and at most {LARGEST_REWARD:.0e}"
                raise R3LiteError(
                    cause, "Lower the weights of the rewards, such as --outcome-em.", code="reward-out-of-range"
                )

    @property
    def total(self) -> float:
        return sum(self.by_step)

    @property
    def signal(self) -> float:
        """Returns the number that is compared within a group to see if it has variance.

        It is `answer_reward`, or the total if the run has no reward for answers. It decides which groups are refilled
        and which are expanded first; the metric frac_reward_zero_std is computed from it. Advantages always come from
        the total. By the total, a group of wrong answers that differ only in recall would have variance, and would not
        be replaced by a better one.
        """
        if self.answer_reward is None:
            return self.total
        return self.answer_reward

    @property
    def right(self) -> bool:
        """True if the answer is right: by the judge if there is one, else by exact match."""
        return self.parts.get("judge", self.parts["em"]) == 1.0

    def failed(self, below: float | None = None) -> bool:
        """Returns whether the outcome reward is less than `below`; without `below`, whether the answer is wrong."""
        if below is None:
            return not self.right
        return self.parts["outcome"] < below


def highest_outcome(settings: RewardSettings) -> float:
    """Returns the highest outcome reward."""
    return settings.outcome_em + settings.outcome_f1 + settings.outcome_judge


def outcome_share(reward: EpisodeReward, settings: RewardSettings) -> float:
    """Returns the outcome reward divided by the highest possible one: how right the answer is, from 0 to 1.

    The total does not show how right it is, because format and recall are rewarded for wrong answers, too.
    """
    return reward.parts["outcome"] / highest_outcome(settings)


def score(
    episode: Episode,
    settings: RewardSettings,
    verdict: Verdict | None = None,
) -> EpisodeReward | None:
    """Returns the reward of an episode: at each step, the sum of what the settings reward there.

    The settings reward by `format`, `process`, `search` and `outcome` (parts.py), and by the functions that --rewards
    names (registry.py), each at the steps that it chooses.

    Returns None, a missing reward, if the retriever failed, if the last turn searched although it had to answer, if a
    reward needs a verdict and there is none, or if a named reward is missing.
    """
    if episode.is_void:
        return None
    if verdict is None and needs_verdict(settings):
        return None
    assert verdict is None or len(verdict.steps) == len(episode.steps), "a verdict has one opinion per step"
    functions = rewards_of(settings)
    step_rewards_by_name = {function.name: function.step_rewards(episode, verdict) for function in functions}
    if None in step_rewards_by_name.values():
        return None
    by_step = [0.0] * len(episode.steps)
    # Added in the order of `rewards_of`: another one would change the last bits.
    for step_rewards in step_rewards_by_name.values():
        by_step = [total + reward for total, reward in zip(by_step, step_rewards, strict=True)]
    totals = {name: sum(step_rewards) for name, step_rewards in step_rewards_by_name.items()}
    parts = {name: totals[name] for name in ALWAYS} | totals  # all of `totals`, in another order: ALWAYS first
    answer_reward = None
    for_answers = [function.name for function in functions if function.pays_answer]
    if highest_outcome(settings) or for_answers:
        answer_reward = parts["outcome"] + sum(parts[name] for name in for_answers)
    em, f1 = answer_scores(episode)
    parts |= {"em": em, "f1": f1, "recall": episode.recall}
    if verdict is not None:
        parts["judge"] = judged_answer(episode, verdict)
    return EpisodeReward(by_step, parts, answer_reward)


def score_all(
    episodes: list[Episode],
    settings: RewardSettings,
    judge: Judge | None,
    run_sources: Set[str],
) -> list[EpisodeReward | None]:
    """Returns the reward of each episode, by the judge's verdicts if there is a judge; None: missing, see `score`.

    Raises R3LiteError if a reward is missing for all of many episodes (see `check_all_missing`). `run_sources` are the
    names of the run's data sets: episodes of only some of them prove nothing, since questions of another one may have
    what the reward needs.
    """
    verdicts = judge.verdicts(episodes) if judge else [None] * len(episodes)
    pairs = zip(episodes, verdicts, strict=True)
    rewards = [score(episode, settings, verdict) for episode, verdict in pairs]
    if all(reward is None for reward in rewards) and run_sources <= {episode.question.source for episode in episodes}:
        check_all_missing(episodes, verdicts, settings)
    return rewards
