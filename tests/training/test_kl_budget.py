"""The KL budget against numbers worked by hand, on a policy of three weights and a critic of two."""

import json
import math

import pytest
import torch

from r3lite.core.errors import R3LiteError
from r3lite.devices.precision import Precision
from r3lite.training import optim
from r3lite.training.kl_budget import KlBudget

PEAK, CRITIC_PEAK = 1e-2, 1e-1


class Run:
    """Rounds whose updates have random gradients, and whose KL a test says."""

    def __init__(self, rates: list[float], target: float = 0.04):
        policy = optim.ParameterGroup({"a": torch.nn.Parameter(torch.ones(3))}, PEAK)
        critic = optim.ParameterGroup({"v": torch.nn.Parameter(torch.ones(2))}, CRITIC_PEAK, is_policy=False)
        self.optimizer = optim.adamw([policy, critic], weight_decay=0.0)
        self.precision = Precision(torch.float32, torch.device("cpu"))
        self.rates, self.round = rates, 0
        self.budget = KlBudget(target, rates, self.optimizer, self.precision)

    def take(self, kl: float, error: float = 0.0) -> bool:
        """One round as the loop and the learner take it; whether there was an update."""
        self.round += 1
        optim.set_rate(self.optimizer, self.rates[self.round - 1])
        self.budget.begin(self.round)
        if not self.budget.judge_last_update(kl, error):
            return False
        generator = torch.Generator().manual_seed(self.round)
        weights = optim.parameters(self.optimizer).values()
        sum((p * torch.randn(p.shape, generator=generator)).sum() for p in weights).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return True

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of weights and moments."""
        both = optim.parameters(self.optimizer) | optim.state_tensors(self.optimizer)
        return {name: x.detach().clone() for name, x in both.items()}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(x, second[name]) for name, x in first.items())


def test_the_rate_follows_the_slope_of_the_distance_by_hand():
    """The KL of the first round is that of rounding. Of the second, 0.0025 is left, the distance 0.05 after a path of
    1: at a distance of 0.2 the path will be 4, and 3 rounds are left for 3. Then 0.01 is left after a path of 2: the
    slope^2 is (0.9 * 0.0025 + 0.01) / (0.9 + 4) = 0.0025, and all goes as planned. Then 0.04 after a path of 3: it is
    (0.9 * 0.01225 + 0.04) / (0.9 * 4.9 + 9) = 0.0038049, the path 3.2423 at its end, and 0.2423 is left for one round;
    it is a quarter of the planned path of a round at least, and half of the last scale."""
    run = Run([1.0] * 4)
    kls, scales, allowed, estimates = (0.001, 0.0035, 0.011, 0.041), [], [], []
    for kl in kls:
        assert run.take(kl)
        scales.append(run.budget.metrics["kl_budget/scale"])
        allowed.append(run.budget.metrics["kl_budget/allowed"])
        estimates.append(run.budget.metrics["kl_budget/estimate"])
    assert scales == pytest.approx([1, 1, 1, 0.5])
    assert allowed == pytest.approx([0, 0.04 / 16, 0.04 / 4, 0.04 * 9 / 16])
    assert estimates == pytest.approx([0, 0.0025, 0.01, 9 * 0.0038049], rel=1e-4)
    assert run.budget.metrics["kl_budget/kl"] == pytest.approx(0.04)
    assert run.budget.path == pytest.approx(3.5)


def test_the_remaining_path_is_divided_as_the_schedule_divides_the_rates():
    """The distance is 0.05 after a path of 0.5: 0.2 is reached after 2, and 1.5 are left for 0.5 + 1 + 0.5 + 0.5."""
    run = Run([0.5, 0.5, 1.0, 0.5, 0.5])
    run.take(0.0)
    run.take(0.0025)
    assert run.budget.scale == pytest.approx(1.5 / 2.5)
    assert [group["lr"] for group in run.optimizer.param_groups] == pytest.approx([0.3 * PEAK, 0.5 * CRITIC_PEAK])
    assert run.budget.path == pytest.approx(0.8)
    run.budget.begin(3)
    assert run.budget.allowed == pytest.approx(0.04 * (1 / 3) ** 2)


def test_the_scale_changes_by_a_factor_of_two_at_most_and_ends_at_four():
    """Without rewards nothing moves, and without a bound the first reward would be met with a rate of 2^20."""
    run, scales = Run([1.0] * 8), []
    for kl in (0.0, 0.0, 0.0, 0.0, 0.0):
        run.take(kl)
        scales.append(run.budget.scale)
    assert scales == [1, 2, 4, 4, 4]
    assert run.take(0.05, error=1.0)
    assert run.budget.scale == 2


def test_what_was_saved_is_not_spent_at_the_end():
    """A slope of 0.01 would need a path of 20. It is planned evenly, 5 a round, and twice that at most."""
    run = Run([1.0] * 4)
    run.budget.path, run.budget.sum_kl, run.budget.sum_squares = 1.0, 1e-4, 1.0
    assert run.budget._scale_for([1.0]) == pytest.approx(10)
    assert run.budget._scale_for([1.0] * 3) == pytest.approx(19 / 3)


def test_a_spent_budget_leaves_a_quarter_of_the_planned_rate():
    run = Run([1.0] * 4)
    run.budget.path, run.budget.sum_kl, run.budget.sum_squares = 3.0, 0.09, 9.0  # a path of 2 was to be the end
    assert run.budget._scale_for([1.0]) == pytest.approx(0.125)


@pytest.mark.parametrize("first", [True, False], ids=["the first update", "a later one"])
def test_an_update_that_went_too_far_is_taken_back_with_its_moments(first):
    """The limit is a quarter of the target, 0.01, or twice what is allowed: 0.005 after one of four rounds."""
    run = Run([1.0] * 4)
    run.take(0.0)
    if not first:
        run.take(0.0025)
    twin = Run([1.0] * 4)
    tensors_before = twin.tensors()
    if not first:
        twin.take(0.0)
        tensors_before = twin.tensors()
    assert not equal(tensors_before, run.tensors())
    run.precision.changed_weights = False
    assert not run.take(0.05)
    assert run.precision.changed_weights
    assert equal(tensors_before, run.tensors()) and (".exp_avg" in "".join(tensors_before)) != first
    assert run.budget.metrics["kl_budget/taken_back"] == 1 and run.budget.path == (0 if first else 1)
    assert run.take(0.05)  # the update before it stays
    assert run.budget.metrics["kl_budget/taken_back"] == 0


def test_the_rate_after_an_update_that_was_taken_back_by_hand():
    """0.36 after a path of 1 is a slope of 0.6: the budget of 0.2 lasts for a third. Two rounds are left of four, for
    which a sixth was planned, and twice that may be used: a sixth each."""
    run = Run([1.0] * 4)
    run.take(0.0)
    assert not run.take(0.36)
    assert run.budget.scale == pytest.approx(1 / 6)
    second_run = Run([1.0] * 4)
    second_run.take(0.0)
    assert not second_run.take(0.0101)  # little more than the limit: half at least
    assert second_run.budget.scale == 0.5


def test_a_kl_that_is_not_surely_too_large_takes_nothing_back():
    """Nearly all of the KL of a round may be that of one question."""
    run = Run([1.0] * 4)
    run.take(0.0)
    assert run.take(0.03, error=0.021)
    assert run.budget.scale == 0.5


@pytest.mark.parametrize("kl", [math.inf, math.nan])
def test_a_first_round_without_a_finite_kl_says_nothing_of_later_ones(kl):
    """It was taken for the KL of rounding: later ones, less it, were no numbers, and their updates were taken back."""
    run = Run([1.0] * 4)
    assert [run.take(measured) for measured in (kl, 0.0025, 0.01, 0.0225)] == [True] * 4
    assert run.budget.rounding == 0.0 and run.budget.scale == pytest.approx(1.0)


@pytest.mark.parametrize("kl", [math.inf, math.nan, 1e30])
def test_a_kl_without_a_figure_counts_as_a_hundred_targets(kl):
    run = Run([1.0] * 4)
    run.take(0.0)
    assert not run.take(kl, error=math.nan)
    assert run.budget.metrics["kl_budget/kl"] == 4 and run.budget.sum_kl == 4
    assert run.budget.scale == pytest.approx(0.0625)  # a tenth of the path is left over, but it falls to 1 / 16 at most


def test_after_a_rollback_of_the_guard_nothing_is_taken_back():
    """The weights before the last update are those of the collapse."""
    run = Run([1.0] * 4)
    start = run.budget.state_dict()
    run.take(0.0)
    run.budget.go_back(start)
    assert run.take(0.05)
    assert not run.take(0.05)


def test_after_a_rollback_of_the_guard_the_path_is_that_to_the_older_weights():
    """It kept the length of the path to the weights of the collapse, so the older weights seemed to be far too near.

    The distance is 0.05 times the path, so 0.2 is reached after a path of 4: 1, then 0.6 in each of five rounds. After
    three updates the weights are those after one again: a path of 3 is left for three rounds.
    """
    run = Run([1.0] * 6)
    run.take(0.0)
    after_one_update = run.budget.state_dict()
    run.take(0.0025)
    run.take(0.0064)
    assert run.budget.path == pytest.approx(2.2)
    run.budget.go_back(after_one_update)
    assert run.budget.path == pytest.approx(1)
    assert run.take(0.0025)
    assert run.budget._slope() == pytest.approx(0.05)
    assert run.budget.scale == pytest.approx(1)


@pytest.mark.parametrize("stop", range(1, 6))
def test_its_state_is_all_that_it_needs(stop):
    """The copies too: an update may be taken back in the first round after a resume."""
    kls = (0.001, 0.003, 0.05, 0.004, 0.02, 0.03)
    uninterrupted, run = Run([1.0] * 6), Run([1.0] * 6)
    for kl in kls:
        uninterrupted.take(kl)
    for kl in kls[:stop]:
        run.take(kl)
    state = run.budget.state_dict()
    tensors = {name: x.clone() for name, x in state.pop("tensors", {}).items()}
    resumed = Run([1.0] * 6)
    resumed.round = stop
    with torch.no_grad():
        for name, parameter in optim.parameters(resumed.optimizer).items():
            parameter.copy_(optim.parameters(run.optimizer)[name])
    optim.load_state_tensors(resumed.optimizer, optim.state_tensors(run.optimizer))
    resumed.budget.load_state_dict(json.loads(json.dumps(state)) | ({"tensors": tensors} if tensors else {}))
    taken_back = 0
    for kl in kls[stop:]:
        taken_back += not resumed.take(kl)
    assert equal(uninterrupted.tensors(), resumed.tensors())
    assert uninterrupted.budget.metrics == resumed.budget.metrics
    assert taken_back == (stop < 3)


@pytest.mark.parametrize("broken", [{"scale": 0}, {"path": "long"}, {"sum_squares": -1}])
def test_a_state_that_is_none_is_refused(broken):
    state = Run([1.0]).budget.state_dict() | broken
    with pytest.raises(R3LiteError, match=f"KL budget: {next(iter(broken))} is"):
        Run([1.0]).budget.load_state_dict(state)
