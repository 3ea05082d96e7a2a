"""The KL budget: the learning rate is scaled so that the policy's KL from the reference is the target after the run.

The KL after an update is measured in the next round, on episodes that the updated policy has sampled. For small changes
of the policy, sqrt(KL) is a distance from the reference. Each update adds at most a multiple of its learning rate to
this distance. So let path_n be the sum of the learning rates that the updates before round n had, as shares of the peak
(scheduled rate times scale; updates that were taken back do not count), and KL_n the KL that is measured in round n,
less the one before the first update, which is only rounding. In round n:

    slope^2 = sum_i w_i KL_i / sum_i w_i path_i^2        over the rounds i <= n, with w_i = FORGETTING^(n - i)
    reach   = sqrt(target) / slope                       the length of the path at which the KL is the target
    scale   = (reach - path_n) / (sum of the scheduled rates from round n on)

The KL of one round is measured on few questions and may be off by a factor of ten, so the slope is that of many rounds.

The plan allows a KL of target * (share of the scheduled rates before round n)^2 in round n. An update is taken back if
the KL after it is surely far above the plan. Knows no model and no loss.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from r3lite.core.records import Record, Source
from r3lite.devices.precision import Precision
from r3lite.training import optim

FORGETTING = 0.9  # the weight of a round in the slope is multiplied by this in each later round
STEP_FACTOR = 2.0  # the scale rises or falls at most by this factor from round to round
MAX_SCALE = 4.0  # while all advantages are 0, the policy does not move: without a limit the scale would rise for ever
TAKEN_BACK_FACTOR = 16.0  # after an update was taken back, the scale falls by a factor between STEP_FACTOR and this
# An update is taken back if the KL is above PLAN_LIMIT times what the plan allows, and also above TARGET_LIMIT times
# the target, because the plan allows next to nothing for the first updates. To be sure, the KL's standard error, times
# STANDARD_ERRORS, is subtracted from the KL first.
PLAN_LIMIT = 2.0
TARGET_LIMIT = 0.25
STANDARD_ERRORS = 1.0
# Bounds of the remaining path, as multiples of the path that the plan has for the remaining rounds. With MIN_REMAINING,
# the policy still learns slowly when the target is reached early. With MAX_REMAINING, a path that was too short so far
# is not made up for in a few long steps at the end.
MIN_REMAINING = 0.25
MAX_REMAINING = 2.0
MAX_TARGETS = 100.0  # a KL above this many targets, or one that is nan, counts as this many targets
# Prefixes of the names of the copied tensors.
WEIGHTS = "weights/"
MOMENTS = "moments/"
STATE = ("scale", "rounding", "path", "last_rate", "sum_kl", "sum_squares")  # attributes in checkpoints


class KlBudget:
    """Scales the policy's learning rate before each update, and takes updates back. Checkpoints have its state."""

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
        self.scale = 1.0  # the scheduled rate is multiplied by this
        self.rounding: float | None = None  # the KL before the first update, when policy and reference are equal
        self.path = 0.0
        self.last_rate = 0.0  # the part of `path` that the last update added
        self.sum_kl = 0.0  # sum_i w_i KL_i
        self.sum_squares = 0.0  # sum_i w_i path_i^2
        self.undo: dict[str, Tensor] = {}  # weights and moments before the last update; empty: it cannot be taken back
        self.metrics: dict[str, float] = {}  # of the current round

    def begin(self, number: int) -> None:
        """Begins round `number`, before its update."""
        self.round = number

    def go_back(self, earlier: dict) -> None:
        """Follows the weights, which the collapse guard has restored; `earlier` is the budget's state at that time.

        `path` becomes the path to these weights. The last update is gone, so it can no longer be taken back. The slope
        stays: what was measured since then still says how far a path leads.
        """
        self.path = _record(earlier).number("path")
        self.undo = {}

    @property
    def allowed(self) -> float:
        """The KL that the plan allows in this round, after the updates of the rounds before."""
        share = sum(self.rates[: self.round - 1]) / sum(self.rates)
        return self.target * share**2

    def judge_last_update(self, kl: float, error: float) -> bool:
        """Judges the last update by the KL on this round's episodes, in nats per token, and the KL's standard error.

        Returns False if the last update was taken back: then the policy that sampled these episodes is gone, and they
        must not be learned from. Else sets the learning rate of this round's update and returns True.
        """
        if self.rounding is None:
            if not math.isfinite(kl):  # a pass overflowed fp16, but no update has changed the KL yet
                kl = 0.0
            self.rounding = kl
        kl -= self.rounding
        if not kl <= MAX_TARGETS * self.target:  # also if `kl` is nan
            kl = MAX_TARGETS * self.target
            error = 0.0
        self.sum_kl = FORGETTING * self.sum_kl + kl
        self.sum_squares = FORGETTING * self.sum_squares + self.path**2
        estimate = self._slope() ** 2 * self.path**2  # a metric: the KL according to all rounds so far
        limit = max(PLAN_LIMIT * self.allowed, TARGET_LIMIT * self.target)
        taken_back = bool(self.undo) and kl - STANDARD_ERRORS * error > limit
        if taken_back:
            self._take_back()
        else:
            self._prepare_update()
        self.metrics = {
            "kl_budget/kl": kl,
            "kl_budget/estimate": estimate,
            "kl_budget/allowed": self.allowed,
            "kl_budget/scale": self.scale,
            "kl_budget/taken_back": int(taken_back),
        }
        return not taken_back

    def _prepare_update(self) -> None:
        """Sets the learning rate of this round's update, and copies what is needed to take the update back."""
        if self.path:  # else no update has been measured, and the scale stays
            scale = min(self._scale_for(self.rates[self.round - 1 :]), MAX_SCALE)
            self.scale = _clamped(scale, low=self.scale / STEP_FACTOR, high=self.scale * STEP_FACTOR)
        self.undo = self._copies()
        self.last_rate = self._set_rate()
        self.path += self.last_rate

    def _take_back(self) -> None:
        """Restores the weights and moments from before the last update, and lowers the scale."""
        self.path -= self.last_rate
        remaining_rates = self.rates[self.round :]  # without this round's, which will have no update
        if not remaining_rates:  # this was the last round, and the scale is only a metric
            remaining_rates = self.rates[-1:]
        scale = self._scale_for(remaining_rates)
        self.scale = _clamped(scale, low=self.scale / TAKEN_BACK_FACTOR, high=self.scale / STEP_FACTOR)
        # As after an update: an interruption now waits for the end of the round, since the round cannot be undone.
        self.precision.changed_weights = True
        with torch.no_grad():
            for name, parameter in optim.parameters(self.optimizer).items():
                parameter.copy_(self.undo[WEIGHTS + name])
        moments = {}
        for name, tensor in self.undo.items():
            if name.startswith(MOMENTS):
                moments[name.removeprefix(MOMENTS)] = tensor
        optim.load_state_tensors(self.optimizer, moments)
        self.undo = {}
        self._set_rate()  # for the metric learning_rate: this round has no update

    def _slope(self) -> float:
        """The slope: distance from the reference per unit of path; 0 before the first update is measured."""
        if not self.sum_squares:
            return 0.0
        return math.sqrt(max(self.sum_kl, 0.0) / self.sum_squares)

    def _scale_for(self, rates: Sequence[float]) -> float:
        """The scale that takes the KL to the target in the remaining rounds. `rates` are their scheduled rates."""
        slope = self._slope()
        if not slope:
            return MAX_SCALE
        reach = math.sqrt(self.target) / slope
        planned_path = reach * sum(rates) / sum(self.rates)
        remaining_path = _clamped(
            reach - self.path,
            low=MIN_REMAINING * planned_path,
            high=MAX_REMAINING * planned_path,
        )
        return remaining_path / sum(rates)

    def _set_rate(self) -> float:
        """Multiplies the policy's learning rate, which the loop sets in each round, by the scale.

        Returns the product as a share of the peak.
        """
        groups = [group for group in self.optimizer.param_groups if group["is_policy"]]
        for group in groups:
            group["lr"] *= self.scale
        return groups[0]["lr"] / groups[0]["peak_lr"]

    def _copies(self) -> dict[str, Tensor]:
        """Copies of weights and moments in host memory, by prefixed names."""
        copies = {}
        for name, weight in optim.parameters(self.optimizer).items():
            copies[WEIGHTS + name] = weight.detach().to("cpu", copy=True)
        for name, moment in optim.state_tensors(self.optimizer).items():
            copies[MOMENTS + name] = moment.to("cpu", copy=True)
        return copies

    def state_dict(self) -> dict:
        """Returns the state as JSON values, except `tensors`: those of `undo`, which are never changed in place."""
        state = {name: getattr(self, name) for name in STATE}
        if self.undo:
            state["tensors"] = self.undo
        return state

    def load_state_dict(self, state: dict) -> None:
        """Restores the state that `state_dict` returned; raises R3LiteError if `state` is no such state."""
        record = _record(state)
        self.scale = record.number("scale", low=0, above=True)
        self.rounding = record.number("rounding", None)
        self.path = record.number("path")
        self.last_rate = record.number("last_rate", low=0)
        self.sum_kl = record.number("sum_kl")
        self.sum_squares = record.number("sum_squares", low=0)
        self.undo = {}
        if "tensors" in state:
            self.undo = dict(record.record("tensors").values)


def _record(state: dict) -> Record:
    """Returns the reader of a state that a checkpoint holds."""
    return Record(state, Source("the checkpoint's KL budget", "Pass another checkpoint."))


def _clamped(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
