"""Forward and backward passes as CUDA graphs (sft --cuda-graphs).

A graph reads its inputs from buffers of a fixed shape, and adds to gradients whose addresses never change. So there is
one graph for each shape of padded inputs, and the gradients of parameters are buffers of this file.
"""

import math
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from r3lite.core.grant import Grant
from r3lite.devices.cuda_graphs import Capture, raise_if_out_of_memory
from r3lite.models.masked_pack import MOST_TOKENS, PassInputs

# The most by which a graph's gradients may differ from those of an ordinary pass, as a share of their norm. Other
# kernels add in another order: on a CPU, the tiny model's differ by 4e-7 in fp32, 3e-4 in fp16 and 2e-3 in bf16.
MOST_DIFFERENCE = 0.05


class CapturedPass(NamedTuple):
    """A captured pass."""

    inputs: PassInputs  # its buffers
    replay: Callable[[], object]  # adds the gradients of a pass over `inputs`
    loss: Tensor  # the buffer of its result


class CapturedPasses:
    """Adds the gradients of passes, each by the graph of its shape.

    The first pass of a shape is run in the ordinary way, too, and the graph must give the same gradients. If it does
    not, or if it cannot be captured, a warning is printed and all later passes are ordinary ones. Errors of the model
    are raised. If a capture runs out of memory, torch.OutOfMemoryError is raised.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        run: Callable[[PassInputs], Tensor],
        grant: Grant,
        capture: Callable[[], Callable] = Capture,
    ):
        """`run` adds the gradients of a pass, and returns its loss; `capture` makes what captures graphs of one pool.

        `parameters` are all those to whose gradients `run` adds.
        """
        self.parameters = list(parameters)
        self.run = run
        self.grant = grant
        self.new_capture = capture
        self.capture = capture()
        self.memory = grant.memory  # the figures for which the graphs were captured
        self.graphs: dict[tuple[int, int], CapturedPass] = {}  # by PassInputs.shape
        self.buffers: list[Tensor] = []  # of the gradients
        self.uses_graphs = True

    def add_gradients(self, inputs: PassInputs, run_ordinary: Callable[[], Tensor]) -> Tensor:
        """Adds the gradients of a pass, and returns its loss; `run_ordinary` does the same without graphs."""
        if self.grant.memory is not self.memory:  # memory ran out, so passes are divided in other ways
            self.graphs.clear()
            self.capture = self.new_capture()
            self.memory = self.grant.memory
        if self.memory.offload:
            self._give_up("the inputs of layers wait in the host's memory")
        tokens, _ = inputs.shape
        if not self.uses_graphs or tokens > MOST_TOKENS:
            return run_ordinary()
        graph = self.graphs.get(inputs.shape)
        if graph is None:
            return self._first_pass(inputs, run_ordinary)
        self._use_buffers()
        graph.inputs.copy_(inputs)
        graph.replay()
        return graph.loss.clone()

    @torch.no_grad()
    def _use_buffers(self) -> None:
        """Makes the buffers the gradients of the parameters, with the values that these have."""
        if not self.buffers:
            self.buffers = [torch.zeros_like(parameter) for parameter in self.parameters]
        cleared = []
        for parameter, buffer in zip(self.parameters, self.buffers, strict=True):
            if parameter.grad is None:
                cleared.append(buffer)
            elif parameter.grad is not buffer:
                buffer.copy_(parameter.grad)
            parameter.grad = buffer
        if cleared:
            torch._foreach_zero_(cleared)

    def _first_pass(self, inputs: PassInputs, run_ordinary: Callable[[], Tensor]) -> Tensor:
        """Captures the graph of a shape and runs it once; if it cannot be used, the pass is an ordinary one."""
        earlier = self._take_gradients()
        loss = run_ordinary()
        expected = self._take_gradients()
        norm = _norm(expected)
        graph = None
        # A pass without gradients, or with gradients that are not finite, has nothing to compare.
        if math.isfinite(norm) and norm > 0:
            graph = self._capture_graph(inputs)
        if graph is not None:
            differences = [buffer - gradient for buffer, gradient in zip(self.buffers, expected, strict=True)]
            if not _norm(differences) <= MOST_DIFFERENCE * norm:  # also true if a gradient is NaN
                self._give_up("they compute different gradients")
                graph = None
        if graph is None:
            self._set_gradients(expected)
        else:
            self.graphs[inputs.shape] = graph
            loss = graph.loss.clone()
        self._add(earlier)
        return loss

    def _capture_graph(self, inputs: PassInputs) -> CapturedPass | None:
        """Captures a graph and runs it once, so that the buffers have its gradients; None if it cannot be captured."""
        buffers = inputs.to(self.parameters[0].device)
        self._use_buffers()
        self.run(buffers)  # selects kernels, which a capture cannot do; errors of the model are raised here
        try:
            replay, loss = self.capture(lambda: self.run(buffers))
        except RuntimeError as error:
            raise_if_out_of_memory(error)
            self._give_up(str(error))
            return None
        torch._foreach_zero_(self.buffers)
        replay()
        return CapturedPass(buffers, replay, loss)

    def _take_gradients(self) -> list[Tensor]:
        """Returns copies of the gradients, zeros for those that there are not, and clears them."""
        gradients = []
        for parameter in self.parameters:
            gradients.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone())
            parameter.grad = None
        return gradients

    def _set_gradients(self, gradients: list[Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _add(self, gradients: list[Tensor]) -> None:
        torch._foreach_add_([parameter.grad for parameter in self.parameters], gradients)

    def _give_up(self, reason: str) -> None:
        """Makes all passes ordinary ones from now on, and prints a warning with the reason."""
        if self.uses_graphs:
            print(f"warning: training continues without CUDA graphs: {reason}".splitlines()[0], file=sys.stderr)
        self.uses_graphs = False


def _norm(tensors: list[Tensor]) -> float:
    """Returns the norm of all numbers of several tensors. The host waits for the device."""
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors))))
