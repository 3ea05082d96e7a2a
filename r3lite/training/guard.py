"""Notices the collapse of a run from the metrics of its rounds and its validations.

Raises alarms and does nothing else: `oversight.py` acts on them. Knows no model and no files. The limits and the
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

SURE = 2.0  # a change counts if it is larger, by this many standard errors, than what chance explains
START_EPISODES = 32  # the first rounds, with which later ones are compared, have at least this many episodes in all
STATE = (  # attributes of a guard that a checkpoint keeps under their names; `best` is kept, too
    "rounds",
    "first",
    "recent",
    "right_start",
    "peak",
    "best_reward",
    "beyond",
    "validations",
    "rollbacks",
)


@dataclass(frozen=True)
class Alarm:
    """A limit has been crossed often enough to act on it."""

    limit: str | None  # the name of the limit's setting; None: the model's numbers are not finite
    message: str  # what has happened, as a clause without a capital or a stop


def standard_error(differences: Sequence[float]) -> float:
    """Returns the standard error of the mean of paired differences; it is infinite for a single one."""
    count = len(differences)
    if count < 2:
        return math.inf
    return statistics.stdev(differences) / math.sqrt(count)


@dataclass
class Best:
    """The best validation so far. Checkpoints keep it, under the names of its fields."""

    step: int
    each: list[float]  # F1 of each question
    reward: float | None  # mean reward of the rounds that were recent then; None: not known

    @property
    def f1(self) -> float:
        """The mean F1 of the questions."""
        return statistics.fmean(self.each)


class Guard:
    """Checks each round. Its state is part of the run's checkpoints."""

    def __init__(self, settings: GuardSettings, episodes: int):
        """Prepares for rounds of `episodes` episodes each."""
        self.settings = settings
        self.start_rounds = math.ceil(START_EPISODES / episodes)
        self.rounds = 0  # the number of rounds that were checked
        # The watched numbers of the first `start_rounds` rounds, and of the newest rounds since the last rollback, at
        # most `guard_patience` of them.
        self.first: list[Numbers] = []
        self.recent: list[Numbers] = []
        # `right_likelihood` of the recent rounds at the end of the first rounds; if there were too few right answers
        # then, as soon as there are enough.
        self.right_start: float | None = None
        self.peak: list[Numbers] | None = None  # F1 and reward of the rounds in `recent` when their mean F1 was highest
        self.best_reward: float | None = None  # the highest mean reward that `recent` has had
        self.beyond: dict[str, int] = {}  # by limit: the number of rounds or validations in a row that crossed it
        self.best: Best | None = None
        self.validations = 0  # numbers of validations and rollbacks so far
        self.rollbacks = 0

    @property
    def rate_scale(self) -> float:
        """The factor of the learning rates after the rollbacks so far."""
        return self.settings.guard_rate_factor**self.rollbacks

    @property
    def kl_scale(self) -> float:
        """The factor of --kl-beta after the rollbacks so far."""
        return self.settings.guard_kl_factor**self.rollbacks

    def check(
        self,
        step: int,
        record: dict,
        question_f1s: Sequence[float] | None = None,
    ) -> Alarm | None:
        """Checks a round by its metrics and, after a validation, by the F1 of each question; returns an alarm or None.

        There is an alarm when a limit has been crossed as often in a row as the settings say. The same limit raises
        another alarm only after a round or validation that did not cross it, or after a rollback.
        """
        numbers = watched(record)
        self.rounds += 1
        if len(self.first) < self.start_rounds:
            self.first.append(numbers)
        self.recent = [*self.recent, numbers][-self.settings.guard_patience :]
        self._note_peaks()
        crossed: dict[str, str | None] = {}  # by limit that was checked: a message if it was crossed, else None
        if len(self.first) == self.start_rounds:
            if self.right_start is None:
                self.right_start = right_likelihood(self.recent)
            crossed |= self._crossed_in_round(numbers)
        if question_f1s is not None:
            crossed |= self._crossed_in_validation(question_f1s)
            self.take_validation(step, question_f1s)  # after the check, which compares it with earlier ones
        alarms = self._count_crossings(crossed)
        if not alarms or self.settings.guard == "off":
            return None
        for alarm in alarms[1:]:
            self.beyond[alarm.limit] -= 1  # so that the next round that crosses this limit raises its alarm
        return alarms[0]

    def _count_crossings(self, crossed: dict[str, str | None]) -> list[Alarm]:
        """Counts how often in a row each limit was crossed; returns an alarm for each count that just became enough."""
        alarms = []
        for limit, message in crossed.items():
            if message is None:
                self.beyond[limit] = 0
                continue
            self.beyond[limit] = self.beyond.get(limit, 0) + 1
            if limit == "guard_f1_drop":
                patience = self.settings.guard_validations
                unit = "validations"
            else:
                patience = self.settings.guard_patience
                unit = "rounds"
            if self.beyond[limit] == patience:
                if patience > 1:
                    message += f", {patience} {unit} in a row"
                alarms.append(Alarm(limit, message))
        return alarms

    def first_rounds(self, record: dict) -> list[Numbers]:
        """Returns the watched numbers of the first rounds if the current round is the last of them, else an empty list.

        `record` has the metrics of the current round, which `check` has not counted yet.
        """
        if self.rounds + 1 != self.start_rounds:
            return []
        return [*self.first, watched(record)]

    def take_validation(self, step: int, question_f1s: Sequence[float]) -> None:
        """Counts a validation, and notes it as the best one if its F1 is higher than that of all before.

        Of validations with equal F1 the first stays the best, because the earlier policy is the safer one.
        """
        self.validations += 1
        if self.best is None or statistics.fmean(question_f1s) > self.best.f1:
            self.best = Best(step, list(question_f1s), self._mean_of_recent("reward"))

    def rolled_back(self) -> None:
        """Counts a rollback, and forgets the recent rounds, which say nothing about the restored weights."""
        self.rollbacks += 1
        self.forget()

    def forget(self) -> None:
        """Forgets the recent rounds, and how many in a row were beyond a limit."""
        self.recent = []
        self.beyond = {}

    def forget_rewards(self) -> None:
        """Forgets the highest and the recent rewards, because the rewards of the next round have other weights.

        The standard deviation of the rewards in the first rounds stays, as a measure of the size of rewards.
        """
        self.recent = [numbers | {"reward": None} for numbers in self.recent]
        self.peak = None
        self.best_reward = None
        if self.best is not None:
            self.best.reward = None

    def _crossed_in_round(self, numbers: Numbers) -> dict[str, str | None]:
        """Returns, by limit, a message if this round crossed it, else None.

        Limits that are switched off, and those of quantities that this round or the first rounds lack, are left out.
        """
        crossed: dict[str, str | None] = {}
        for watch in WATCHES:
            limit = getattr(self.settings, watch.limit)  # `watch.limit` is the name of a setting
            value = numbers[watch.quantity]
            start = self._at_start(watch.quantity)
            if limit is None or value is None or start is None:
                continue
            crossed[watch.limit] = watch.crossed(value, start, limit)
        crossed |= self._check_right_likelihood(numbers)
        crossed |= self._check_variance(numbers)
        crossed |= self._check_hacking()
        return crossed

    def _check_right_likelihood(self, numbers: Numbers) -> dict[str, str | None]:
        """Checks whether right answers become less likely, which is how GRPO begins to collapse.

        A round without a right answer is not checked. Returns a dictionary as `_crossed_in_round` does.
        """
        limit = self.settings.guard_right_likelihood
        start = self.right_start
        mean = right_likelihood(self.recent)
        if limit is None or start is None or mean is None or not numbers["right"]:
            return {}
        message = None
        if start - mean > limit:
            message = f"correct answers have a log-probability of {mean:.3g} per token ({start:.3g} at the start)"
        return {"guard_right_likelihood": message}

    def _check_variance(self, numbers: Numbers) -> dict[str, str | None]:
        """Checks the share of groups without variance, if the reward is low.

        While the reward is at its best, equal rewards mean that all is learned. The reward is low if it is below its
        best by more than a quarter of the rewards' standard deviation in the first rounds. If the share was beyond the
        limit from the start, it is not checked. Returns a dictionary as `_crossed_in_round` does.
        """
        limit = self.settings.guard_variance
        without_variance = numbers["variance"]  # the share of the groups without variance
        start = self._at_start("variance")
        best = self.best_reward
        reward = self._mean_of_recent("reward")
        spread = self._at_start("reward_std")
        if None in (limit, without_variance, start, best, reward, spread) or start >= limit:
            return {}
        message = None
        is_low = reward < best - spread / 4
        if without_variance >= limit and is_low:
            message = (
                f"{without_variance:.0%} of the groups have equal rewards, at a mean of {reward:.3f} (best {best:.3f})"
            )
        return {"guard_variance": message}

    def _check_hacking(self) -> dict[str, str | None]:
        """Checks whether the reward has risen and F1 fallen, compared with the rounds of the highest F1.

        Reward and F1 are means over the sampled episodes of rounds, not over a validation. Both changes must be larger
        than the spread between rounds explains: that of the reward by SURE standard errors, that of F1 by
        `_required_errors`. F1 must also have fallen by more than the limit. Returns a dictionary as `_crossed_in_round`
        does.
        """
        limit = self.settings.guard_hacking
        if limit is None or self.peak is None or len(self.recent) < len(self.peak):
            return {}
        f1s = _present(self.recent, "f1")
        rewards = _present(self.recent, "reward")
        if not f1s or not rewards:
            return {}
        peak_f1s = _present(self.peak, "f1")
        peak_rewards = _present(self.peak, "reward")
        f1 = statistics.fmean(f1s)
        reward = statistics.fmean(rewards)
        peak_f1 = statistics.fmean(peak_f1s)
        peak_reward = statistics.fmean(peak_rewards)
        # The highest F1 was chosen from about this many stretches of rounds that do not overlap.
        stretches = self.rounds // self.settings.guard_patience
        noise = self._required_errors(stretches) * _error_of_difference(f1s, peak_f1s)
        reward_rose = reward - peak_reward > SURE * _error_of_difference(rewards, peak_rewards)
        f1_fell = peak_f1 - f1 > max(limit, noise)
        message = None
        if reward_rose and f1_fell:
            message = f"the reward rose from {peak_reward:.3f} to {reward:.3f} while "
            message += f"F1 fell from {peak_f1:.3f} to {f1:.3f}"
        return {"guard_hacking": message}

    def _crossed_in_validation(self, question_f1s: Sequence[float]) -> dict[str, str | None]:
        """Compares a validation with the best one, question by question.

        A drop must exceed both the limit and `_required_errors` standard errors. Returns a dictionary as
        `_crossed_in_round` does.
        """
        limit = self.settings.guard_f1_drop
        best = self.best
        if limit is None or best is None:
            return {}
        f1 = statistics.fmean(question_f1s)
        reward = self._mean_of_recent("reward")
        drops = [best_f1 - question_f1 for best_f1, question_f1 in zip(best.each, question_f1s, strict=True)]
        noise = self._required_errors(self.validations) * standard_error(drops)
        if best.f1 - f1 <= max(limit, noise):
            return {"guard_f1_drop": None}
        message = f"validation F1 fell from {best.f1:.3f} to {f1:.3f}"
        if best.reward is not None and reward is not None and reward > best.reward:
            message += f" while the reward rose from {best.reward:.3f} to {reward:.3f}"
        return {"guard_f1_drop": message}

    def _required_errors(self, tries: int) -> float:
        """Returns the number of standard errors that a drop from the best of `tries` must exceed.

        Tries are validations, or stretches of rounds. The best of K tries was also lucky: if all were equally good, the
        best would be about sqrt(ln K) standard errors of a difference above their mean. SURE standard errors are added.
        """
        return SURE + math.sqrt(math.log(tries))

    def _note_peaks(self) -> None:
        """Notes the recent mean reward if it is the highest so far, and the recent rounds if their mean F1 is."""
        if len(self.recent) < self.settings.guard_patience:
            return
        f1 = self._mean_of_recent("f1")
        reward = self._mean_of_recent("reward")
        if reward is None:
            return
        if self.best_reward is None or reward > self.best_reward:
            self.best_reward = reward
        if f1 is None:
            return
        # Of rounds with equal F1 the newest are noted, because later rewards are compared with theirs.
        if self.peak is None or f1 >= _mean(self.peak, "f1"):
            self.peak = [{"f1": numbers["f1"], "reward": numbers["reward"]} for numbers in self.recent]

    def _mean_of_recent(self, quantity: str) -> float | None:
        """Returns the mean of a quantity over the recent rounds; None if none has it."""
        return _mean(self.recent, quantity)

    def _at_start(self, quantity: str) -> float | None:
        """Returns the mean of a quantity over the first rounds; None if none has it."""
        return _mean(self.first, quantity)

    def state_dict(self) -> dict:
        """Returns the state for a checkpoint, as JSON values."""
        state = {name: getattr(self, name) for name in STATE}
        state["best"] = None if self.best is None else asdict(self.best)
        return copy.deepcopy(state)

    def load_state_dict(self, state: dict) -> None:
        """Restores what `state_dict` returned; raises R3LiteError if `state` is something else."""
        record = Record(state, Source("the checkpoint's guard", "Pass another checkpoint."))
        self.first = _rounds(record, "first")
        self.recent = _rounds(record, "recent")
        self.peak = None
        if record.values.get("peak"):
            self.peak = _rounds(record, "peak")
        self.right_start = record.number("right_start", None)
        self.best_reward = record.number("best_reward", None)
        beyond = record.record("beyond")
        self.beyond = {limit: beyond.whole(limit) for limit in beyond.values}
        self.best = None
        if record.values.get("best"):
            self.best = _best(record.record("best"))
        self.rounds = record.whole("rounds")
        self.validations = record.whole("validations")
        self.rollbacks = record.whole("rollbacks")


def _rounds(record: Record, key: str) -> list[Numbers]:
    """Returns the watched numbers of rounds, which a checkpoint has under `key`."""
    rounds = []
    for numbers in record.records(key):
        rounds.append({name: numbers.number(name, None) for name in numbers.values})
    return rounds


def _best(record: Record) -> Best:
    """Returns the best validation from a checkpoint's record of it."""
    each = record.items("each")
    if not each or not all(isinstance(f1, float | int) for f1 in each):
        raise record.wrong("each", "numbers")
    return Best(record.whole("step"), each, record.number("reward", None))


def _error_of_difference(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns the standard error of the difference of the means of `a` and `b`, which are not paired.

    It is infinite if either has fewer than two values.
    """
    if min(len(a), len(b)) < 2:
        return math.inf
    return math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b))


def _present(rounds: Sequence[Numbers], quantity: str) -> list[float]:
    """Returns the values of a quantity in the rounds that have it."""
    return [numbers[quantity] for numbers in rounds if numbers[quantity] is not None]


def _mean(rounds: Sequence[Numbers], quantity: str) -> float | None:
    """Returns the mean of a quantity over the rounds that have it; None if none has it."""
    values = _present(rounds, quantity)
    if not values:
        return None
    return statistics.fmean(values)
