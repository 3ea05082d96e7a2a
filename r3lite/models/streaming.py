"""Layers that wait in the host's memory: each is copied to the device while the one before it computes.

The device holds two layers, the even ones in one piece of memory and the odd ones in another, so that each tensor of a
layer keeps its place. A copy runs on a stream of its own, as soon as the layer that was in its place is done. At the
turn from a forward pass to its backward pass the last two layers stay, at the end of that the first two, so that no
layer is copied twice in a pass. An embedding that is not the head, too, waits in the host's memory, where rows of it
are looked up. On a CPU the copies are plain ones: nothing is saved there, and results are the same to the bit.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from r3lite.models.stacks import StackMemory

LAYER = re.compile(r"model\.layers\.(\d+)\.")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ALIGNED = 512  # bytes: where tensors of a layer begin


@dataclass(frozen=True)
class Piece:
    """Tensors of a layer that lie one after another, and where in the layer's memory."""

    names: list[str]
    shapes: list[Sequence[int]]
    dtype: torch.dtype
    start: int  # bytes

    @property
    def end(self) -> int:
        return self.start + sum(map(prod, self.shapes)) * self.dtype.itemsize

    def tensors(self, memory: Tensor) -> dict[str, Tensor]:
        """The tensors, by name, in the memory [bytes] of a layer."""
        together = memory[self.start : self.end].view(self.dtype).view(-1, *self.shapes[0][1:])
        return dict(zip(self.names, together.split([shape[0] for shape in self.shapes]), strict=True))


class HostLayers(StackMemory):
    """Memory for the tensors of a model, of which the layers and an embedding that is not the head are on the host.

    It is pinned for a CUDA device if the system allows it; WSL and containers may refuse, and then copies are slower.
    """

    def __init__(self, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device):
        super().__init__(tensors, dtype, device)
        self.pinned = device.type == "cuda"
        self.layers: dict[int, Tensor] = {}  # [bytes] each
        self.pieces: dict[int, list[Piece]] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.found:
            if layer := LAYER.match(name):
                self._add(int(layer[1]))
            elif name == EMBEDDING and HEAD in self.tensors:
                shape = self.tensors[name].shape
                table = torch.empty(shape, dtype=self.dtype)  # its rows are gathered by the CPU: not pinned
                self.found[name] = _as_host_memory(table)
        return super().__getitem__(name)

    def _add(self, layer: int) -> None:
        """Makes room for a layer."""
        names = [name for name in self.tensors if name.startswith(f"model.layers.{layer}.")]
        pieces, end = [], 0
        for beside in {id(self.beside[name]): self.beside[name] for name in names}.values():
            like = self.tensors[beside[0]]
            dtype = self.dtype if isinstance(like, nn.Parameter) else like.dtype
            start = -(-end // ALIGNED) * ALIGNED
            pieces.append(Piece(beside, [self.tensors[n].shape for n in beside], dtype, start))
            end = pieces[-1].end
        self.layers[layer], self.pieces[layer] = self._bytes(end), pieces
        for piece in pieces:
            self.found |= piece.tensors(self.layers[layer])

    def _bytes(self, size: int) -> Tensor:
        if self.pinned:
            try:
                return _as_host_memory(torch.empty(size, dtype=torch.uint8, pin_memory=True))
            except RuntimeError:
                self.pinned = False
                print("warning: memory cannot be pinned here; layers are copied more slowly", file=sys.stderr)
        return _as_host_memory(torch.empty(size, dtype=torch.uint8))


def _as_host_memory(tensor: Tensor) -> Tensor:
    """The same tensor, which devices.live_tensors counts as the host's on a CPU, too, from now on."""
    tensor.untyped_storage().is_host_part = True
    return tensor


class LayerStream:
    """The layers of a model, two of which are on its device at a time."""

    def __init__(self, memory: HostLayers):
        self.device, self.pinned, self.pieces = memory.device, memory.pinned, memory.pieces
        self.host = [memory.layers[layer] for layer in sorted(memory.layers)]
        turns = [self.host[turn::2] for turn in range(min(2, len(self.host)))]
        self.places = [torch.empty(max(map(len, turn)), dtype=torch.uint8, device=self.device) for turn in turns]
        self.there: list[int | None] = [None] * len(self.places)  # the layer in each place, or on its way to it
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.arrived: list[torch.cuda.Event] = []
        if self.stream is not None:
            self.arrived = [torch.cuda.Event() for _ in self.places]
            for place in self.places:
                place.record_stream(self.stream)

    def attach(self, model: nn.Module) -> None:
        """From now on the tensors of the model's layers are those on its device, where two layers take turns.

        They must be run by models.activation_checkpointing, which has each copied in time and keeps no activations.
        """
        for layer, pieces in self.pieces.items():
            for piece in pieces:
                for name, tensor in piece.tensors(self.places[layer % 2]).items():
                    owner, _, attribute = name.rpartition(".")
                    module = model.get_submodule(owner)
                    is_parameter = attribute in module._parameters
                    setattr(module, attribute, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)

    def enter(self, layer: int, then: int | None) -> None:
        """Call it before a layer computes: it is on the device for what is queued next, until the next call.

        `then`: the layer that computes after it, if that is known; its copy is begun.
        """
        self._bring(layer)
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrived[layer % 2])
        if then is not None and then % 2 != layer % 2:
            self._bring(then)

    def in_forward(self, layer: int) -> None:
        """`enter` of a pass forward; one with gradients turns round at the last layer, and others may follow others."""
        last = layer == len(self.host) - 1
        turns = last and torch.is_grad_enabled()
        self.enter(layer, None if turns else 0 if last else layer + 1)

    def in_backward(self, layer: int) -> None:
        """`enter` of a pass backward, which ends where the next one begins."""
        self.enter(layer, layer - 1 if layer else None)

    def upload(self, x: Tensor) -> Tensor:
        """Rows of the embedding, on the device; the host does not wait if they can be pinned."""
        if x.device.type == self.device.type:
            return x
        return (x.pin_memory() if self.pinned else x).to(self.device, non_blocking=True)

    def _bring(self, layer: int) -> None:
        """Begins to copy a layer to its place, unless it is there: after what is queued, which may use the place."""
        if self.there[layer % 2] == layer:
            return
        self.there[layer % 2] = layer
        self._copy(layer)

    def _copy(self, layer: int) -> None:
        source, place = self.host[layer], self.places[layer % 2]
        if self.stream is None:
            place[: len(source)].copy_(source)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            place[: len(source)].copy_(source, non_blocking=self.pinned)
            self.arrived[layer % 2].record(self.stream)
