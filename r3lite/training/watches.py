"""The quantities of a round that the guard watches, by name, and which changes of them are beyond a limit.

Where they come from in a round's metrics is in `watched`. The limits and the reasons for them are in docs/collapse.md.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LEAST_RIGHT = 8  # episodes with a right answer, whose likelihood is compared
Numbers = dict[str, float | None]


@dataclass(frozen=True)
class Watch:
    """A quantity of each round, how its limit is meant, and how it is worded."""

    limit: str  # the setting
    quantity: str  # a key of `watched`
    beyond: Callable[[float, float, float, float], bool]  # of (now, start, limit, least)
    message: str  # with the place of the figure
    form: str  # of the figure
    least: float = 0.0  # a change that is smaller than this is never beyond the limit

    def crossed(self, now: float, start: float, limit: float) -> str | None:
        """What is wrong; None if nothing is."""
        if not self.beyond(now, start, limit, self.least):
            return None
        return f"{self.message.format(self.form.format(now))} ({self.form.format(start)} at the start)"


def risen(now: float, start: float, limit: float, least: float) -> bool:
    return now - start > limit


def grown(now: float, start: float, limit: float, least: float) -> bool:
    return now > start * limit and now - start >= least


def shrunk(now: float, start: float, limit: float, least: float) -> bool:
    return now < start / limit and start - now >= least


def changed(now: float, start: float, limit: float, least: float) -> bool:
    return grown(now, start, limit, least) or shrunk(now, start, limit, least)


def above(now: float, start: float, limit: float, least: float) -> bool:
    return now > limit


WATCHES = (
    Watch("guard_malformed", "malformed", risen, "{} of the episodes are malformed or cut off", "{:.0%}"),
    Watch("guard_queries", "queries", risen, "{} of the episodes have a blank or repeated query", "{:.0%}"),
    Watch("guard_searches", "searches", changed, "there are {} searches per episode", "{:.2f}", least=0.5),
    Watch("guard_length", "length", changed, "the episodes have {} sampled tokens", "{:.0f}", least=32),
    Watch("guard_repetition", "repetition", risen, "{} of the 4-grams within a turn are repeated", "{:.0%}"),
    Watch("guard_entropy_rise", "entropy", grown, "the entropy is {} nats per token", "{:.3g}", least=0.2),
    Watch("guard_entropy_fall", "entropy", shrunk, "the entropy is {} nats per token", "{:.3g}"),
    Watch("guard_kl", "kl", above, "the KL divergence is {} nats per token", "{:.3g}"),
)


def watched(record: dict) -> Numbers:
    """The watched quantities of a round, from its metrics; None for those that it lacks."""

    def total(*names: str) -> float | None:
        values = [record.get(name) for name in names]
        return None if None in values else sum(values)

    found = {
        "malformed": total("malformed_ratio", "completions/clipped_ratio"),
        "queries": total("queries/blank_ratio", "queries/repeated_ratio"),
        "searches": record.get("searches"),
        "length": record.get("completions/mean_length"),
        "repetition": record.get("completions/repeated_ngrams"),
        "entropy": record.get("entropy"),
        "kl": record.get("kl"),
        "variance": without_variance(record),
        "mixed": record.get("groups/mixed"),
        "reward": record.get("reward"),
        "reward_std": record.get("reward_std"),
        "f1": record.get("rewards/f1/mean"),
        "outcome": record.get("rewards/outcome/mean"),
        "right": record.get("completions/right"),
        "right_likelihood": record.get("logps/right"),
    }
    return {name: None if x is None or not math.isfinite(x) else float(x) for name, x in found.items()}


def without_variance(record: dict) -> float | None:
    """Share of a round's groups whose rewards are all equal, those that were replaced included."""
    if sampled := record.get("refill/groups"):
        return 1 - record["refill/kept"] / sampled
    return record.get("frac_reward_zero_std")


def right_likelihood(rounds: Sequence[Numbers]) -> float | None:
    """Mean over the right episodes of as few of the newest rounds as have LEAST_RIGHT; None if all have fewer."""
    total = count = 0.0
    for numbers in reversed(rounds):
        if (mean := numbers.get("right_likelihood")) is not None:
            total, count = total + numbers["right"] * mean, count + numbers["right"]
        if count >= LEAST_RIGHT:
            return total / count
    return None
