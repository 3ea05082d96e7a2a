"""Refuses a run whose rewards are missing for every episode: it would learn nothing."""

from r3lite.core.episode import Episode
from r3lite.core.errors import R3LiteError
from r3lite.rewards.registry import named_rewards, needs_verdict
from r3lite.rewards.verdict import Verdict
from r3lite.settings import RewardSettings

MIN_QUESTIONS = 8  # if no episode of so many questions has a reward, that is not by chance


def check_all_missing(
    episodes: list[Episode],
    verdicts: list[Verdict | None],
    settings: RewardSettings,
) -> None:
    """Raises R3LiteError if a named reward is missing for all episodes. Called if no episode has a total reward.

    Episodes whose retriever failed, or whose verdict is missing, do not count. With fewer than MIN_QUESTIONS questions
    nothing is checked.
    """
    if len({episode.question.id for episode in episodes}) < MIN_QUESTIONS:
        return
    verdict_needed = needs_verdict(settings)
    pairs = []
    for episode, verdict in zip(episodes, verdicts, strict=True):
        lacks_verdict = verdict_needed and verdict is None
        if not episode.failure and not lacks_verdict:
            pairs.append((episode, verdict))
    if not pairs:
        return
    for function in named_rewards(settings):
        if all(function.step_rewards(episode, verdict) is None for episode, verdict in pairs):
            remedy = "The questions lack what it needs, such as gold paragraphs: remove it, or pass other --data."
            raise R3LiteError(
                f"the reward {function.name} is missing for all {len(pairs)} episodes", remedy, code="reward-missing"
            )
