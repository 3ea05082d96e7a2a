"""Notices the collapse of a run from the metrics of its rounds and its validations.

Decides, and does nothing: what follows an alarm is in `oversight.py`. Knows no model and no files. The limits and the
reasons for them are in docs/collapse.md.
"""

import copy
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from r3lite.core.records import Record, Source
from r3lite.settings import GuardSettings
from r3lite.training.watches import WATCHES, Numbers, right_likelihood, watched

SURE = 2.0  # standard errors, see below
START_EPISODES = 32  # least of the first rounds, which later ones are compared with
SEEN = (  # what a checkpoint keeps of a guard, beside the best validation
    "rounds", "first", "recent", "right_start", "peak", "best_reward", "beyond", "validations", "rollbacks",
)  # fmt: skip


@dataclass(frozen=True)
class Alarm:
    """A limit that was crossed: the name of its setting, and what has happened as a part of a sentence.

    The limit is None if the model's numbers are not finite, which no setting allows.
    """

    limit: str | None
    message: str


def standard_error(differences: Sequence[float]) -> float:
    """Of the mean of paired differences; infinite for a single one."""
    n = len(differences)
    return statistics.stdev(differences) / math.sqrt(n) if n > 1 else math.inf


@dataclass
class Best:
    """The best validation so far: its step, the F1 of each question, and the reward of the rounds before it."""

    step: int
    each: list[float]
    reward: float | None

    @property
    def f1(self) -> float:
        return statistics.fmean(self.each)


class Guard:
    """Looks at each round. What it has seen is part of a run's checkpoints, as are the rollbacks that were made."""

    def __init__(self, settings: GuardSettings, episodes: int):
        """`episodes` are those of a round."""
        self.settings = settings
        self.start_rounds = math.ceil(START_EPISODES / episodes)
        self.rounds = 0  # seen
        self.first: list[Numbers] = []  # the first rounds
        self.recent: list[Numbers] = []  # the newest ones, as many as patience asks for; since the last rollback
        self.right_start: float | None = None  # `right_likelihood` of the first rounds, or as soon as it is known
        self.peak: list[Numbers] | None = None  # F1 and reward of as many rounds, when their F1 was highest
        self.best_reward: float | None = None  # the highest mean of recent rounds
        self.beyond: dict[str, int] = {}  # by limit, how often in a row it was crossed
        self.best: Best | None = None
        self.validations = 0
        self.rollbacks = 0

    @property
    def rate_scale(self) -> float:
        """What the learning rates are multiplied by."""
        return self.settings.guard_rate_factor**self.rollbacks

    @property
    def kl_scale(self) -> float:
        """What --kl-beta is multiplied by."""
        return self.settings.guard_kl_factor**self.rollbacks

    def look(self, step: int, record: dict, each: Sequence[float] | None = None) -> Alarm | None:
        """Takes in a round's metrics and, after a validation, the F1 of `each` question; what is wrong, if anything.

        An alarm is raised when a limit was crossed as often in a row as the settings say, and once: a limit is reported
        again only after it has been kept.
        """
        now = watched(record)
        self.rounds += 1
        if len(self.first) < self.start_rounds:
            self.first.append(now)
        self.recent = [*self.recent, now][-self.settings.guard_patience :]
        self._take_peaks()
        if self.right_start is None and len(self.first) == self.start_rounds:
            self.right_start = right_likelihood(self.recent)
        crossed = self._crossed_in_round(now) if len(self.first) == self.start_rounds else {}
        crossed |= self._crossed_in_validation(each) if each is not None else {}
        if each is not None:
            self.validated(step, each)
        alarms = []
        for limit, message in crossed.items():
            self.beyond[limit] = self.beyond.get(limit, 0) + 1 if message else 0
            needed, unit = self.settings.guard_patience, "rounds"
            if limit == "guard_f1_drop":
                needed, unit = self.settings.guard_validations, "validations"
            if message and self.beyond[limit] == needed:
                alarms.append(Alarm(limit, message + (f", {needed} {unit} in a row" if needed > 1 else "")))
        return alarms[0] if alarms and self.settings.guard != "off" else None

    def first_rounds(self, record: dict) -> list[Numbers]:
        """The first rounds, if the round with the metrics `record` is the last of them; else an empty list."""
        return [*self.first, watched(record)] if self.rounds + 1 == self.start_rounds else []

    def validated(self, step: int, each: Sequence[float]) -> None:
        """Takes a validation for the best one if its F1 is higher. Of equal ones the first stays, as the safer one."""
        self.validations += 1
        if self.best is None or statistics.fmean(each) > self.best.f1:
            self.best = Best(step, list(each), self._mean_of_recent("reward"))

    def rolled_back(self) -> None:
        """Counts a rollback; the rounds before it say nothing about what follows."""
        self.rollbacks += 1
        self.forget()

    def forget(self) -> None:
        """Begins to count anew."""
        self.recent, self.beyond = [], {}

    def forget_rewards(self) -> None:
        """Called before a round with other weights of the rewards: rewards before and after are not to be compared."""
        self.recent = [numbers | {"reward": None} for numbers in self.recent]
        self.peak = self.best_reward = None
        if self.best is not None:
            self.best.reward = None

    def _crossed_in_round(self, now: Numbers) -> dict[str, str | None]:
        """By limit, what is beyond it in this round, or None; quantities that this round lacks are left out."""
        found: dict[str, str | None] = {}
        for watch in WATCHES:
            limit, value = getattr(self.settings, watch.limit), now[watch.quantity]
            start = self._at_start(watch.quantity)
            if limit is None or value is None or start is None:
                continue
            found[watch.limit] = watch.crossed(value, start, limit)
        return found | self._right_likelihood(now) | self._without_variance(now) | self._hacking()

    def _right_likelihood(self, now: Numbers) -> dict[str, str | None]:
        """Right answers that grow unlikely, which is how GRPO begins to collapse; a round without any says nothing."""
        limit, start, mean = self.settings.guard_right_likelihood, self.right_start, right_likelihood(self.recent)
        if limit is None or start is None or mean is None or not now["right"]:
            return {}
        message = f"correct answers have a log-probability of {mean:.3g} per token ({start:.3g} at the start)"
        return {"guard_right_likelihood": message if start - mean > limit else None}

    def _without_variance(self, now: Numbers) -> dict[str, str | None]:
        """Groups without variance while the reward is low: at its best, equal rewards mean that all is learned."""
        limit, start, best = self.settings.guard_variance, self._at_start("variance"), self.best_reward
        reward, spread = self._mean_of_recent("reward"), self._at_start("reward_std")
        if limit is None or now["variance"] is None or None in (start, best, reward, spread) or start >= limit:
            return {}
        low = reward < best - spread / 4
        message = f"{now['variance']:.0%} of the groups have equal rewards, at a mean of {reward:.3f} (best {best:.3f})"
        return {"guard_variance": message if now["variance"] >= limit and low else None}

    def _hacking(self) -> dict[str, str | None]:
        """Reward up and F1 down in the episodes that are trained on, compared with the rounds of the highest F1.

        Both must be more than the spread between rounds explains; F1 as in `_crossed_in_validation`.
        """
        limit = self.settings.guard_hacking
        if limit is None or self.peak is None or len(self.recent) < len(self.peak):
            return {}
        (f1s, rewards), (best_f1s, best_rewards) = (
            [[numbers[name] for numbers in rounds if numbers[name] is not None] for name in ("f1", "reward")]
            for rounds in (self.recent, self.peak)
        )
        f1, reward, best_f1, then = map(_mean, (f1s, rewards, best_f1s, best_rewards))
        if f1 is None or reward is None:
            return {}
        noise = self._luck(self.rounds // self.settings.guard_patience) * _error_of_difference(f1s, best_f1s)
        rose = reward - then > SURE * _error_of_difference(rewards, best_rewards)
        hacks = rose and best_f1 - f1 > max(limit, noise)
        message = f"the reward rose from {then:.3f} to {reward:.3f} while F1 fell from {best_f1:.3f} to {f1:.3f}"
        return {"guard_hacking": message if hacks else None}

    def _crossed_in_validation(self, each: Sequence[float]) -> dict[str, str | None]:
        """The same of a validation, compared with the best one question by question.

        The best of K validations is the luckiest too: if all were equally good, it would be about sqrt(ln K) standard
        errors of a difference above the mean. A drop must be larger than that and SURE standard errors more.
        """
        limit, best = self.settings.guard_f1_drop, self.best
        if limit is None or best is None:
            return {}
        f1, reward = statistics.fmean(each), self._mean_of_recent("reward")
        error = standard_error([a - b for a, b in zip(best.each, each, strict=True)])
        noise = self._luck(self.validations) * error
        message = f"validation F1 fell from {best.f1:.3f} to {f1:.3f}"
        if best.reward is not None and reward is not None and reward > best.reward:
            message += f" while the reward rose from {best.reward:.3f} to {reward:.3f}"
        return {"guard_f1_drop": message if best.f1 - f1 > max(limit, noise) else None}

    def _luck(self, tries: int) -> float:
        """How many standard errors a drop from the best of `tries` validations must exceed."""
        return SURE + math.sqrt(math.log(tries))

    def _take_peaks(self) -> None:
        if len(self.recent) < self.settings.guard_patience:
            return
        f1, reward = self._mean_of_recent("f1"), self._mean_of_recent("reward")
        if reward is not None and (self.best_reward is None or reward > self.best_reward):
            self.best_reward = reward
        if f1 is not None and reward is not None and (self.peak is None or f1 >= _mean([p["f1"] for p in self.peak])):
            self.peak = [{"f1": numbers["f1"], "reward": numbers["reward"]} for numbers in self.recent]

    def _mean_of_recent(self, quantity: str) -> float | None:
        return _mean([numbers[quantity] for numbers in self.recent])

    def _at_start(self, quantity: str) -> float | None:
        return _mean([numbers[quantity] for numbers in self.first])

    def state_dict(self) -> dict:
        """What a checkpoint keeps, as JSON values."""
        kept = {name: getattr(self, name) for name in SEEN} | {"best": self.best and asdict(self.best)}
        return copy.deepcopy(kept)

    def load_state_dict(self, state: dict) -> None:
        """Restores `state_dict`; raises R3LiteError if it is none."""
        record = Record(state, Source("the checkpoint's guard", "Pass another checkpoint."))
        self.first, self.recent = _numbers(record, "first"), _numbers(record, "recent")
        self.peak = _numbers(record, "peak") if record.values.get("peak") else None
        self.right_start, self.best_reward = (record.number(key, None) for key in ("right_start", "best_reward"))
        beyond = record.record("beyond")
        self.beyond = {limit: beyond.whole(limit) for limit in beyond.values}
        self.best = _best(record.record("best")) if record.values.get("best") else None
        self.rounds, self.validations, self.rollbacks = map(record.whole, ("rounds", "validations", "rollbacks"))


def _numbers(record: Record, key: str) -> list[Numbers]:
    return [{name: numbers.number(name, None) for name in numbers.values} for numbers in record.records(key)]


def _best(record: Record) -> Best:
    each = record.items("each")
    if not each or not all(isinstance(f1, float | int) for f1 in each):
        raise record.wrong("each", "numbers")
    return Best(record.whole("step"), each, record.number("reward", None))


def _error_of_difference(a: Sequence[float], b: Sequence[float]) -> float:
    """Standard error of the difference of two means; infinite if either is of one value."""
    if min(len(a), len(b)) < 2:
        return math.inf
    return math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
