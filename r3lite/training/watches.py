"""The quantities of a round that the guard watches, and the limits that their changes must not cross.

`watched` computes the quantities from a round's metrics. The values of the limits are explained in docs/collapse.md.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIN_RIGHT = 8  # right episodes that a mean of their log-probabilities needs
Numbers = dict[str, float | None]  # the quantities of a round by name; None if the round lacks one


@dataclass(frozen=True)
class Watch:
    """A quantity of each round, what it means to be beyond its limit, and the words of its alarm."""

    limit: str  # the setting that has the limit
    quantity: str  # a key of `watched`
    beyond: Callable[[float, float, float, float], bool]  # one of the functions below: risen, grown, ...
    message: str  # {} stands for the value
    form: str  # the format of the value in the message
    min_change: float = 0.0  # a change that is smaller than this is never beyond the limit

    def crossed(self, value: float, start: float, limit: float) -> str | None:
        """Returns a message if `value` is beyond the limit, given the value at the start of the run; else None."""
        if not self.beyond(value, start, limit, self.min_change):
            return None
        message = self.message.format(self.form.format(value))
        return f"{message} ({self.form.format(start)} at the start)"


# These functions return whether a value is beyond a limit. `start` is the value at the start of the run. For `grown`,
# `shrunk` and `changed`, a change that is smaller than `min_change` does not count; the others ignore `min_change`.
def risen(value: float, start: float, limit: float, min_change: float) -> bool:
    return value - start > limit


def grown(value: float, start: float, limit: float, min_change: float) -> bool:
    return value > start * limit and value - start >= min_change


def shrunk(value: float, start: float, limit: float, min_change: float) -> bool:
    return value < start / limit and start - value >= min_change


def changed(value: float, start: float, limit: float, min_change: float) -> bool:
    bounds = {"limit": limit, "min_change": min_change}
    return grown(value, start, **bounds) or shrunk(value, start, **bounds)


def above(value: float, start: float, limit: float, min_change: float) -> bool:
    return value > limit


WATCHES = (
    Watch(
        limit="guard_malformed",
        quantity="malformed",
        beyond=risen,
        message="{} of the episodes are malformed or cut off",
        form="{:.0%}",
    ),
    Watch(
        limit="guard_queries",
        quantity="queries",
        beyond=risen,
        message="{} of the episodes have a blank or repeated query",
        form="{:.0%}",
    ),
    Watch(
        limit="guard_searches",
        quantity="searches",
        beyond=changed,
        message="there are {} searches per episode",
        form="{:.2f}",
        min_change=0.5,
    ),
    Watch(
        limit="guard_length",
        quantity="length",
        beyond=changed,
        message="the episodes have {} sampled tokens",
        form="{:.0f}",
        min_change=32,
    ),
    Watch(
        limit="guard_repetition",
        quantity="repetition",
        beyond=risen,
        message="{} of the 4-grams within a turn are repeated",
        form="{:.0%}",
    ),
    Watch(
        limit="guard_entropy_rise",
        quantity="entropy",
        beyond=grown,
        message="the entropy is {} nats per token",
        form="{:.3g}",
        min_change=0.2,
    ),
    Watch(
        limit="guard_entropy_fall",
        quantity="entropy",
        beyond=shrunk,
        message="the entropy is {} nats per token",
        form="{:.3g}",
    ),
    Watch(
        limit="guard_kl",
        quantity="kl",
        beyond=above,
        message="the KL divergence is {} nats per token",
        form="{:.3g}",
    ),
)


def watched(record: dict) -> Numbers:
    """Returns the watched quantities of a round, from its metrics; None for those that it lacks."""

    def total(*names: str) -> float | None:
        values = [record.get(name) for name in names]
        if None in values:
            return None
        return sum(values)

    quantities = {
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
    numbers: Numbers = {}
    for name, value in quantities.items():
        is_number = value is not None and math.isfinite(value)
        numbers[name] = float(value) if is_number else None
    return numbers


def without_variance(record: dict) -> float | None:
    """Returns the share of a round's groups whose rewards are all equal.

    It counts all sampled groups: also those that --refill-limit replaced or that --learn answer leaves out.
    """
    if "contexts/zero_std" in record:
        return record["contexts/zero_std"]
    sampled = record.get("refill/groups")
    if not sampled:
        return record.get("frac_reward_zero_std")
    return 1 - record["refill/kept"] / sampled


def right_likelihood(rounds: Sequence[Numbers]) -> float | None:
    """Returns the mean log-probability of right episodes in the newest rounds.

    It uses only as many of the newest rounds as are needed to have MIN_RIGHT right episodes together. Returns None if
    even all rounds together have fewer.
    """
    total = 0.0
    count = 0.0
    for numbers in reversed(rounds):
        mean = numbers.get("right_likelihood")  # over the right episodes of the round, `right` in number
        if mean is not None:
            total += numbers["right"] * mean
            count += numbers["right"]
        if count >= MIN_RIGHT:
            return total / count
    return None
