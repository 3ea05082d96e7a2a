"""Passes by graphs: the gradients of ordinary passes, over several steps; if a graph's differ, it is not used."""

import math

import pytest
import torch
from torch import nn

from r3lite.core.grant import Grant, Memory
from r3lite.models.masked_pack import MOST_TOKENS, PassInputs
from r3lite.training.captured_passes import CapturedPasses
from tests.rollout import test_decoder

WARNING = "warning: training continues without CUDA graphs: "


class Replayed(test_decoder.Replayed):
    """As on a card, nothing is computed in the capture itself: the gradients that it adds are taken back."""

    def __init__(self, parameters: list[nn.Parameter]):
        super().__init__()
        self.parameters = parameters
        self.replays = 0

    def __call__(self, work):
        gradients = [parameter.grad.clone() for parameter in self.parameters]
        replay, result = super().__call__(work)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad.copy_(gradient)

        def counted_replay():
            self.replays += 1
            replay()

        return counted_replay, result


class Passes:
    """Passes of a function of two parameters, by graphs and in the ordinary way."""

    def __init__(self, memory: Memory | None = None, factor: float = 1.0):
        """The gradients of graphs are `factor` times those of ordinary passes."""
        self.parameters = [nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([[3.0]]))]
        self.factor = factor
        self.grant = Grant(memory or Memory())
        self.captures: list[Replayed] = []
        self.ordinary = 0
        self.captured = CapturedPasses(self.parameters, self.run, self.grant, self.new_capture)

    def new_capture(self) -> Replayed:
        self.captures.append(Replayed(self.parameters))
        return self.captures[-1]

    def loss(self, inputs: PassInputs) -> torch.Tensor:
        first, second = self.parameters
        return inputs.weights.sum() * (first.square().sum() * second.sum())

    def run(self, inputs: PassInputs) -> torch.Tensor:
        loss = self.factor * self.loss(inputs)
        loss.backward()
        return loss.detach()

    def add(self, weight: float, tokens: int = 10) -> torch.Tensor:
        """Adds the gradients of a pass over one row; its loss is proportional to the weight."""
        inputs = PassInputs.of([list(range(tokens))], [[False] * (tokens - 1) + [True]], weight)

        def ordinary() -> torch.Tensor:
            self.ordinary += 1
            loss = self.loss(inputs)
            loss.backward()
            return loss.detach()

        return self.captured.add_gradients(inputs, ordinary)

    def check(self, weight: float) -> None:
        """The gradients are those of passes with this weight in all; clears them as an optimizer's step does."""
        first, second = self.parameters
        assert torch.allclose(first.grad, weight * 2 * first.detach() * second.detach().sum())
        assert torch.allclose(second.grad, weight * first.detach().square().sum().expand(1, 1))
        for parameter in self.parameters:
            parameter.grad = None


def test_graphs_add_what_ordinary_passes_add():
    """Steps of one pass and of several, of one shape and of two, with weights that change in between."""
    passes = Passes()
    assert float(passes.add(0.5)) == pytest.approx(0.5 * 15)
    passes.check(0.5)
    losses = [passes.add(weight, tokens) for weight, tokens in ((1.0, 10), (0.25, 200), (2.0, 10), (0.5, 200))]
    assert [float(loss) for loss in losses] == pytest.approx([15, 3.75, 30, 7.5])  # no replay overwrites another's loss
    passes.check(3.75)
    with torch.no_grad():
        passes.parameters[0].mul_(3)
    passes.add(1.0)
    passes.add(1.0, 2 * MOST_TOKENS)
    passes.add(1.0)
    passes.check(3.0)
    (capture,) = passes.captures
    assert capture.count == 2 and capture.replays == 7  # a shape's first pass is a replay, too
    assert passes.ordinary == 3  # the first of each shape, and the long one


@pytest.mark.parametrize("factor", [1.2, -1.0, math.nan])
def test_graphs_with_other_gradients_are_not_used(capsys, factor):
    passes = Passes(factor=factor)
    passes.add(1.0)
    passes.add(1.0)
    passes.check(2.0)
    assert passes.ordinary == 2 and not passes.captured.graphs
    assert capsys.readouterr().err == WARNING + "they compute different gradients\n"


def test_gradients_of_the_step_so_far_survive_a_graph_that_is_not_used():
    passes = Passes()
    passes.add(1.0)
    passes.factor = 2.0
    passes.add(1.0, 200)
    passes.check(2.0)


@pytest.mark.parametrize("error", ["operation not permitted", "unsupported\nsecond line"])
def test_what_cannot_be_captured_is_run_in_the_ordinary_way(capsys, monkeypatch, error):
    passes = Passes()
    passes.add(1.0)

    def refuse(self, work):
        raise RuntimeError(error)

    monkeypatch.setattr(Replayed, "__call__", refuse)
    passes.add(1.0, 200)
    passes.add(1.0)
    passes.check(3.0)
    assert capsys.readouterr().err == WARNING + error.partition("\n")[0] + "\n"


def test_a_capture_that_runs_out_of_memory_is_handed_on(capsys, monkeypatch):
    """`Grant.run_within_memory` then repeats the step with smaller passes."""
    passes = Passes()

    def full(self, work):
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Replayed, "__call__", full)
        with pytest.raises(torch.OutOfMemoryError):
            passes.add(1.0)
    for parameter in passes.parameters:  # as the grant does
        parameter.grad = None
    passes.grant.memory = Memory(micro_batch_tokens=100)
    passes.add(1.0)
    passes.check(1.0)
    assert not capsys.readouterr().err


def test_other_memory_figures_make_other_graphs():
    passes = Passes()
    passes.add(1.0)
    passes.grant.memory = Memory(recompute_layers=1)
    passes.add(1.0)
    passes.add(1.0)
    passes.check(3.0)
    assert [capture.count for capture in passes.captures] == [1, 1]


def test_inputs_on_the_host_cannot_be_captured(capsys):
    passes = Passes(Memory(offload=True))
    passes.add(1.0)
    passes.add(1.0)
    passes.check(2.0)
    assert capsys.readouterr().err == WARNING + "the inputs of layers wait in the host's memory\n"
    assert passes.ordinary == 2 and not passes.captures[0].count


def test_gradients_that_are_not_finite_are_no_reason_to_give_up(capsys):
    """In fp16 the first steps overflow, until the loss scale is small enough."""
    passes = Passes()
    passes.add(math.inf)
    assert not all(parameter.grad.isfinite().all() for parameter in passes.parameters)
    for parameter in passes.parameters:
        parameter.grad = None
    passes.add(1.0)
    passes.add(1.0)
    passes.check(2.0)
    assert passes.captures[0].count == 1 and passes.ordinary == 2
    assert not capsys.readouterr().err


def test_an_error_of_the_model_is_raised(capsys):
    passes = Passes()

    def wrong(inputs):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    passes.captured.run = wrong
    with pytest.raises(RuntimeError, match="mat1"):
        passes.add(1.0)
    assert not capsys.readouterr().err
