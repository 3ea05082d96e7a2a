"""Weights of rewards that change as training goes on: the curriculum of R-Search (arXiv 2506.08352), which first pays
more for the form of what is written, and then more for right answers.
"""

from dataclasses import replace

from r3lite.settings import RewardSettings
from r3lite.settings.rewards import FIRST_WEIGHT, RewardEntry


def of_round(settings: RewardSettings, number: int) -> RewardSettings:
    """The settings with the weights of round `number`, from 1 on.

    With a curriculum of N rounds, round n has `first_weight` if n <= N (hard), or the mean of both weights in which the
    last one has the share min((n - 1) / N, 1) (linear).
    """
    if not settings.rewards:
        return settings
    rounds, share = settings.curriculum_rounds, 1.0
    if number <= rounds:
        share = (number - 1) / rounds if settings.curriculum_switch == "linear" else 0.0
    rewards = []
    for entry in settings.rewards:
        kept = {key: value for key, value in entry.items() if key != FIRST_WEIGHT}
        if FIRST_WEIGHT in entry:
            kept["weight"] = share * entry["weight"] + (1 - share) * entry[FIRST_WEIGHT]
        rewards.append(RewardEntry(kept))
    return replace(settings, rewards=tuple(rewards))


def changing_weights(settings: RewardSettings, number: int) -> dict[str, float]:
    """The weights of round `number` that are not the same in every round, as metrics; none without a curriculum."""
    if not settings.rewards or not settings.curriculum_rounds:
        return {}
    entries = zip(settings.rewards, of_round(settings, number).rewards, strict=True)
    return {f"rewards/{entry['name']}/weight": now["weight"] for entry, now in entries if FIRST_WEIGHT in entry}


def changes_at(settings: RewardSettings, number: int) -> bool:
    """Whether round `number` has other weights than the one before it."""
    return number > 1 and changing_weights(settings, number) != changing_weights(settings, number - 1)
