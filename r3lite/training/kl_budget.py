"""Steps sized by what they do: the policy's learning rate follows a budget of KL divergence from the reference.

The KL after an update is measured on the episodes of the next round, which the updated policy samples before it is
trained on them. For small changes it is the square of a distance from the reference, which grows by at most a multiple
of the learning rate. With path_n, the sum of the rates of all updates before round n, and KL_n, measured in round n:

    slope^2 = sum_n w_n KL_n / sum_n w_n path_n^2        the newest rounds weigh most: w falls by FORGETTING a round
    reach   = sqrt(target) / slope                       the path at whose end the budget is spent
    scale   = (reach - path) / (sum of the scheduled rates of the remaining rounds)

Rates are shares of the peak. The KL of a round is that of few questions and may be off by a factor of ten, so the rate
follows the slope of many rounds. The plan allows target * (share of the scheduled rates so far)^2 in each round; an
update is taken back if the KL is surely far above that. Knows no model and no loss.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from r3lite.core.records import Record, Source
from r3lite.devices.precision import Precision
from r3lite.training import optim

FORGETTING = 0.9
STEP_FACTOR = 2.0  # the scale changes by at most this from round to round
MAX_SCALE = 4.0  # rounds without rewards do not move the policy, and would raise its rate for ever
TAKEN_BACK_FACTOR = 16.0  # after an update that was taken back, the scale falls by a factor from STEP_FACTOR to this
# An update is taken back if the KL is above LIMIT times what the plan allows, and also above FIRST_LIMIT times the
# target, because the plan allows next to nothing for the first updates: above both by SURE standard errors over
# questions.
LIMIT = 2.0
FIRST_LIMIT = 0.25
SURE = 1.0
# Bounds of the remaining path, as multiples of what was planned for the remaining rounds. With them the policy goes on
# learning slowly when the budget is spent, and what was saved is not spent in a few long steps at the end.
MIN_REMAINING = 0.25
MAX_REMAINING = 2.0
MAX_TARGETS = 100.0  # a KL of more than this many targets, or one that is not a number, counts as this many
WEIGHTS = "weights/"  # what the names of the copied tensors begin with
MOMENTS = "moments/"
STATE = ("scale", "rounding", "path", "last_rate", "sum_kl", "sum_squares", "rollbacks")  # attributes in checkpoints


class KlBudget:
    """Scales the policy's rate before each update, and takes updates back. It is part of a run's checkpoints."""

    def __init__(
        self,
        target: float,
        rates: Sequence[float],
        optimizer: torch.optim.AdamW,
        precision: Precision,
    ):
        """`target` is the KL at the end of the run, `rates` the scheduled rates of its rounds as shares of the peak."""
        self.target = target
        self.rates = rates
        self.optimizer = optimizer
        self.precision = precision
        self.round = 1
        self.scale = 1.0  # of the scheduled rate
        self.rounding: float | None = None  # the KL before the first update, when policy and reference are equal
        self.path = 0.0
        self.last_rate = 0.0  # of the last update
        self.sum_kl = 0.0  # the sums of the slope
        self.sum_squares = 0.0
        self.rollbacks = 0  # of the guard
        self.undo: dict[str, Tensor] = {}  # weights and moments before the last update; empty: it cannot be taken back
        self.metrics: dict[str, float] = {}  # of the round

    def begin(self, number: int, rollbacks: int) -> None:
        """Called in round `number` before it is learned from, with the number of rollbacks of the guard.

        After a rollback the weights are older than the last update, so it can no longer be taken back. The path that
        led to them is shorter than `path`, so the rate is rather too low then.
        """
        self.round = number
        if rollbacks > self.rollbacks:
            self.rollbacks = rollbacks
            self.undo = {}

    @property
    def allowed(self) -> float:
        """The KL that the plan allows after the rounds before this one."""
        share = sum(self.rates[: self.round - 1]) / sum(self.rates)
        return self.target * share**2

    def judge_last_update(self, kl: float, error: float) -> bool:
        """Judges the last update by the KL on this round's episodes, in nats per token, with its standard error.

        Sets the rate of the round's update. Returns False if the last update was taken back: then the policy that
        sampled these episodes is gone, and nothing is to be learned from them.
        """
        if self.rounding is None:
            if not math.isfinite(kl):  # a pass overflowed fp16, but no update has changed the KL yet
                kl = 0.0
            self.rounding = kl
        kl -= self.rounding
        if not kl <= MAX_TARGETS * self.target:  # nan is not
            kl = MAX_TARGETS * self.target
            error = 0.0
        self.sum_kl = FORGETTING * self.sum_kl + kl
        self.sum_squares = FORGETTING * self.sum_squares + self.path**2
        estimate = self._slope() ** 2 * self.path**2
        limit = max(LIMIT * self.allowed, FIRST_LIMIT * self.target)
        taken_back = bool(self.undo) and kl - SURE * error > limit
        if taken_back:
            self._take_back()
        else:
            self._go_on()
        self.metrics = {
            "kl_budget/kl": kl,
            "kl_budget/estimate": estimate,
            "kl_budget/allowed": self.allowed,
            "kl_budget/scale": self.scale,
            "kl_budget/taken_back": int(taken_back),
        }
        return not taken_back

    def _go_on(self) -> None:
        if self.path:
            scale = min(self._scale_for(self.rates[self.round - 1 :]), MAX_SCALE)
            self.scale = _clamped(scale, low=self.scale / STEP_FACTOR, high=self.scale * STEP_FACTOR)
        self.undo = self._copies()
        self.last_rate = self._set_rate()
        self.path += self.last_rate

    def _take_back(self) -> None:
        self.path -= self.last_rate
        scale = self._scale_for(self.rates[self.round :] or self.rates[-1:])
        self.scale = _clamped(scale, low=self.scale / TAKEN_BACK_FACTOR, high=self.scale / STEP_FACTOR)
        self.precision.changed_weights = True  # an interruption waits for the end of the round
        with torch.no_grad():
            for name, parameter in optim.parameters(self.optimizer).items():
                parameter.copy_(self.undo[WEIGHTS + name])
        moments = {}
        for name, tensor in self.undo.items():
            if name.startswith(MOMENTS):
                moments[name.removeprefix(MOMENTS)] = tensor
        optim.load_state_tensors(self.optimizer, moments)
        self.undo = {}
        self._set_rate()

    def _slope(self) -> float:
        """Distance from the reference per unit of path; 0 as long as nothing is known of it."""
        if not self.sum_squares:
            return 0.0
        return math.sqrt(max(self.sum_kl, 0.0) / self.sum_squares)

    def _scale_for(self, rates: Sequence[float]) -> float:
        """The scale with which the budget is spent after rounds with these scheduled rates."""
        slope = self._slope()
        if not slope:
            return MAX_SCALE
        reach = math.sqrt(self.target) / slope
        planned = reach * sum(rates) / sum(self.rates)
        remaining_path = _clamped(reach - self.path, low=MIN_REMAINING * planned, high=MAX_REMAINING * planned)
        return remaining_path / sum(rates)

    def _set_rate(self) -> float:
        """Scales the policy's rate, which the loop has set, for this round; returns it as a share of its peak."""
        groups = [group for group in self.optimizer.param_groups if group["is_policy"]]
        for group in groups:
            group["lr"] *= self.scale
        return groups[0]["lr"] / groups[0]["peak_lr"]

    def _copies(self) -> dict[str, Tensor]:
        """Copies of weights and moments in host memory."""
        copies = {}
        for name, weight in optim.parameters(self.optimizer).items():
            copies[WEIGHTS + name] = weight.detach().to("cpu", copy=True)
        for name, moment in optim.state_tensors(self.optimizer).items():
            copies[MOMENTS + name] = moment.to("cpu", copy=True)
        return copies

    def state_dict(self) -> dict:
        """Returns the state as JSON values, and `undo` as `tensors`, which are never changed in place."""
        state = {name: getattr(self, name) for name in STATE}
        if self.undo:
            state["tensors"] = self.undo
        return state

    def load_state_dict(self, state: dict) -> None:
        """Restores `state_dict`; raises R3LiteError if it is none."""
        record = Record(state, Source("the checkpoint's KL budget", "Pass another checkpoint."))
        self.scale = record.number("scale", low=0, above=True)
        self.rounding = record.number("rounding", None)
        self.path = record.number("path")
        self.last_rate = record.number("last_rate", low=0)
        self.sum_kl = record.number("sum_kl")
        self.sum_squares = record.number("sum_squares", low=0)
        self.rollbacks = record.whole("rollbacks")
        self.undo = {}
        if "tensors" in state:
            self.undo = dict(record.record("tensors").values)


def _clamped(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
