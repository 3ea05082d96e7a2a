"""The reward of each step of an episode: the sum of all rewards of the settings, see `registry.py`.

Takes an episode, the weights of the settings and, if there is a judge, its `Verdict`.
"""

from dataclasses import dataclass, field

from r3lite.core.answer_match import answer_scores
from r3lite.core.episode import SEARCHING, Episode
from r3lite.core.errors import R3LiteError
from r3lite.rewards.judge import Judge
from r3lite.rewards.judged import judged_answer
from r3lite.rewards.registry import LARGEST_REWARD, named_rewards, needs_verdict, rewards_of
from r3lite.rewards.verdict import Verdict
from r3lite.settings import RewardSettings

ALWAYS = ("format", "process", "outcome")  # the parts of every reward, the first in the records of episodes
MIN_QUESTIONS = 8  # a reward that is missing for all episodes of so many questions is not missing by chance


@dataclass(frozen=True)
class Scored:
    """The rewards of an episode.

    `steps[k]` is the reward at the end of step k. `parts` has the weighted parts, which add up to the total: `format`,
    `process`, `outcome`, `search` if searches are rewarded, and each named reward. And, for the log, `em`, `f1`,
    `recall` (None if the question has no gold paragraphs) and, with a judge, `judge` (1 if it says that the answer is
    right). `answer` is what the answer alone is paid: `outcome` and the named rewards that pay for answers; None if the
    run pays for none. Raises R3LiteError if a reward is not finite or too large for fp32.
    """

    steps: list[float]
    parts: dict[str, float | None] = field(default_factory=dict)
    answer: float | None = None

    def __post_init__(self):
        for reward in self.steps:
            if not abs(reward) <= LARGEST_REWARD:  # true of NaN, too
                cause = f"the reward of a step is {reward}; it must be finite and at most {LARGEST_REWARD:.0e}"
                raise R3LiteError(
                    cause, "Lower the weights of the rewards, such as --outcome-em.", code="reward-out-of-range"
                )

    @property
    def total(self) -> float:
        return sum(self.steps)

    @property
    def signal(self) -> float:
        """Returns what the episodes of a group are compared by: the reward of the answer, or the total if none is paid.

        Otherwise wrong answers that differ in recall only would count as something to learn from.
        """
        return self.total if self.answer is None else self.answer

    @property
    def right(self) -> bool:
        """True if the answer is right: by the judge if there is one, else by exact match."""
        return self.parts.get("judge", self.parts["em"]) == 1.0

    def failed(self, below: float | None = None) -> bool:
        """Returns True if the answer is wrong or, with a threshold, if the outcome reward is below it."""
        if below is None:
            return not self.right
        return self.parts["outcome"] < below


def highest_outcome(settings: RewardSettings) -> float:
    """Returns the highest outcome reward."""
    return settings.outcome_em + settings.outcome_f1 + settings.outcome_judge


def outcome_share(scored: Scored, settings: RewardSettings) -> float:
    """Returns the outcome reward as a share of the highest possible one, from 0 to 1.

    It shows how right an answer is; the total does not, because format and recall are rewarded for wrong answers, too.
    """
    return scored.parts["outcome"] / highest_outcome(settings)


def score(
    episode: Episode,
    settings: RewardSettings,
    verdict: Verdict | None = None,
) -> Scored | None:
    """Returns the rewards of an episode: each step's is the sum over the rewards of the settings.

    These are `format`, `process`, `search` and `outcome` (parts.py), and each of `rewards`, at the steps that its
    function rewards (registry.py). It is None, a missing reward, if the retriever failed, if the episode is an end that
    searches instead of answering, if there is no verdict although a reward needs one, or if a named reward is missing.
    """
    if episode.failure or episode.finish == SEARCHING:
        return None
    if verdict is None and needs_verdict(settings):
        return None
    assert verdict is None or len(verdict.steps) == len(episode.steps), "a verdict has one opinion per step"
    rewards = rewards_of(settings)
    by_name = {reward.name: reward.rewards(episode, verdict) for reward in rewards}
    if None in by_name.values():
        return None
    steps = [0.0] * len(episode.steps)
    for step_rewards in by_name.values():  # in the order of `rewards_of`: another one would change the last bits
        steps = [total + reward for total, reward in zip(steps, step_rewards, strict=True)]
    totals = {name: sum(step_rewards) for name, step_rewards in by_name.items()}
    parts = {name: totals[name] for name in ALWAYS} | totals  # those of ALWAYS first
    answer = None
    answer_rewards = [reward.name for reward in rewards if reward.pays_answer]
    if highest_outcome(settings) or answer_rewards:
        answer = parts["outcome"] + sum(parts[name] for name in answer_rewards)
    em, f1 = answer_scores(episode)
    parts |= {"em": em, "f1": f1, "recall": episode.recall}
    if verdict is not None:
        parts["judge"] = judged_answer(episode, verdict)
    return Scored(steps, parts, answer)


def score_all(
    episodes: list[Episode],
    settings: RewardSettings,
    judge: Judge | None,
) -> list[Scored | None]:
    """Returns the rewards of each episode, by the judge's verdicts if there is a judge; None: a missing one, see
    `score`."""
    verdicts = judge.verdicts(episodes) if judge else [None] * len(episodes)
    pairs = zip(episodes, verdicts, strict=True)
    scored = [score(episode, settings, verdict) for episode, verdict in pairs]
    if all(reward is None for reward in scored):
        questions = {episode.question.id for episode in episodes}
        if len(questions) >= MIN_QUESTIONS:
            _refuse_always_missing(episodes, verdicts, settings)
    return scored


def _refuse_always_missing(
    episodes: list[Episode],
    verdicts: list[Verdict | None],
    settings: RewardSettings,
) -> None:
    """Raises R3LiteError if a named reward is missing for all episodes: a run would go on without learning anything."""
    with_verdict = needs_verdict(settings)
    pairs = []
    for episode, verdict in zip(episodes, verdicts, strict=True):
        lacks_verdict = with_verdict and verdict is None
        if not episode.failure and not lacks_verdict:
            pairs.append((episode, verdict))
    if not pairs:
        return
    for reward in named_rewards(settings):
        if all(reward.rewards(episode, verdict) is None for episode, verdict in pairs):
            remedy = "The questions lack what it needs, such as gold paragraphs: remove it, or pass other --data."
            raise R3LiteError(
                f"the reward {reward.name} is missing for all {len(pairs)} episodes", remedy, code="reward-missing"
            )
