"""The reward of each step of an episode: the weighted sum of all rewards that the settings choose, see `registry.py`.

It is computed from the episode, the settings and, if there is a judge, the judge's `Verdict`.
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

# The parts that every episode's reward has. They come first in the lines of episodes.jsonl.
ALWAYS = ("format", "process", "outcome")


@dataclass(frozen=True)
class EpisodeReward:
    """The reward of an episode: of each step, and in parts.

    `by_step` has one number per step, the reward at the step's end. `parts` has two kinds of numbers by name:
    - Weighted parts: what one reward function gave, summed over the steps. They add up to the total. Their names are
      `format`, `process`, `outcome`, `search` if searches are rewarded, and the names in --rewards.
    - Scores, which add nothing to the reward: `em`, `f1`, `recall` (None if the question has no gold paragraphs) and,
      with a judge, `judge` (1 if the judge calls the answer right). `right` reads `judge` or else `em`.

    `answer_reward` is the reward of the answer alone: the sum of `outcome` and of those of --rewards that reward the
    answer. It is None if the run has no reward for answers.

    The constructor raises R3LiteError if a step's reward is not finite or too large for fp32.
    """

    by_step: list[float]
    parts: dict[str, float | None] = field(default_factory=dict)
    answer_reward: float | None = None

    def __post_init__(self):
        for reward in self.by_step:
            if not abs(reward) <= LARGEST_REWARD:  # also true if the reward is NaN
                cause = f"the reward of a step is {reward}; it must be finite and at most {LARGEST_REWARD:.0e}"
                raise R3LiteError(
                    cause, "Lower the weights of the rewards, such as --outcome-em.", code="reward-out-of-range"
                )

    @property
    def total(self) -> float:
        return sum(self.by_step)

    @property
    def signal(self) -> float:
        """The number by which we tell whether the episodes of a group differ: `answer_reward`, if the run has one.

        Without rewards for answers it is the total. The signals decide which groups a refill replaces and which are
        expanded first, and give the metric frac_reward_zero_std. Advantages always come from the total. But the total
        would not serve here: a group of wrong answers that differ only in recall would count as varied, and would not
        be replaced by a better group.
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

    The total does not show this, because format and recall are rewarded for wrong answers, too.
    """
    return reward.parts["outcome"] / highest_outcome(settings)


def score(
    episode: Episode,
    settings: RewardSettings,
    verdict: Verdict | None = None,
) -> EpisodeReward | None:
    """Returns the reward of an episode: at each step, the sum of all reward functions of the settings.

    The functions are `format`, `process`, `search` and `outcome` (parts.py), and those that --rewards names
    (registry.py). Each function chooses the steps that it rewards.

    Returns None, a missing reward, if the retriever failed, if the last turn searched although it had to answer, if a
    function needs a verdict and there is none, or if a function returns None.
    """
    if episode.is_void:
        return None
    if verdict is None and needs_verdict(settings):
        return None
    assert verdict is None or len(verdict.steps) == len(episode.steps), "a verdict has one opinion per step"
    rewards = rewards_of(settings)
    step_rewards_by_name = {reward.name: reward.step_rewards(episode, verdict) for reward in rewards}
    if None in step_rewards_by_name.values():
        return None
    by_step = [0.0] * len(episode.steps)
    # Keep the order of `rewards_of`: sums in another order differ in the last bits.
    for step_rewards in step_rewards_by_name.values():
        by_step = [total + reward for total, reward in zip(by_step, step_rewards, strict=True)]
    totals = {name: sum(step_rewards) for name, step_rewards in step_rewards_by_name.items()}
    parts = {name: totals[name] for name in ALWAYS} | totals  # all of `totals`, in another order: ALWAYS first
    answer_reward = None
    # Of --rewards alone: `pays_answer` is False for the rewards that have flags, also for `outcome`.
    answer_names = [reward.name for reward in rewards if reward.pays_answer]
    if highest_outcome(settings) or answer_names:
        answer_reward = parts["outcome"] + sum(parts[name] for name in answer_names)
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
    """Returns the reward of each episode, or None where it is missing (see `score`). Asks the judge if there is one.

    Raises R3LiteError if every episode lacks its reward because one of --rewards is missing, and the episodes are of at
    least MIN_QUESTIONS questions (see `check_all_missing`). That is only checked if there are episodes of every data
    set of the run, whose names are `run_sources`: the questions of another data set may have what the reward needs.
    """
    verdicts = judge.verdicts(episodes) if judge else [None] * len(episodes)
    pairs = zip(episodes, verdicts, strict=True)
    rewards = [score(episode, settings, verdict) for episode, verdict in pairs]
    sources = {episode.question.source for episode in episodes}
    if all(reward is None for reward in rewards) and run_sources <= sources:
        check_all_missing(episodes, verdicts, settings)
    return rewards
