"""Layers that wait in the host's memory: each is copied to the device while the one before it computes.

The device holds two layers, the even ones in one piece of memory and the odd ones in another, so that each tensor of a
layer keeps its place. Copies run on a stream of their own; a copy begins as soon as the layer that was in its place is
done. The last two layers stay on the device between a forward pass and its backward pass, and the first two after the
backward pass, so that no layer is copied twice in a pass. An embedding that is not the head waits in the host's memory,
too; its rows are looked up there. On a CPU the copies are plain ones: they save no memory, and results are the same to
the bit.
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
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
ALIGNED = 512  # bytes: where tensors of a layer begin


@dataclass(frozen=True)
class Piece:
    """Tensors of a layer that lie one after another, and their place in the layer's memory."""

    names: list[str]
    shapes: list[Sequence[int]]
    dtype: torch.dtype
    start: int  # bytes

    @property
    def end(self) -> int:
        numbers = sum(map(prod, self.shapes))
        return self.start + numbers * self.dtype.itemsize

    def tensors(self, memory: Tensor) -> dict[str, Tensor]:
        """Returns the tensors, by name, in the memory [bytes] of a layer."""
        stack = memory[self.start : self.end].view(self.dtype)
        stack = stack.view(-1, *self.shapes[0][1:])
        rows = [shape[0] for shape in self.shapes]
        return dict(zip(self.names, stack.split(rows), strict=True))


class HostLayers(StackMemory):
    """Memory for the tensors of a model: the layers, and an embedding that is not the head, are on the host.

    The layers' memory is pinned for a CUDA device if the system allows it; WSL and containers may refuse, and then
    copies are slower.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(tensors, dtype, device)
        self.pinned = device.type == "cuda"
        self.layers: dict[int, Tensor] = {}  # [bytes] each
        self.pieces: dict[int, list[Piece]] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.allocated:
            layer = LAYER.match(name)
            if layer:
                self._allocate_layer(int(layer[1]))
            elif name == EMBEDDING and HEAD in self.tensors:
                shape = self.tensors[name].shape
                table = torch.empty(shape, dtype=self.dtype)  # its rows are gathered by the CPU: not pinned
                self.allocated[name] = _as_host_memory(table)
        return super().__getitem__(name)

    def _allocate_layer(self, layer: int) -> None:
        prefix = f"model.layers.{layer}."
        names = [name for name in self.tensors if name.startswith(prefix)]
        layer_stacks = {id(self.stack_names[name]): self.stack_names[name] for name in names}
        pieces = []
        end = 0
        for stack in layer_stacks.values():
            piece = Piece(
                names=stack,
                shapes=[self.tensors[name].shape for name in stack],
                dtype=self.dtype_of(stack[0]),
                start=-(-end // ALIGNED) * ALIGNED,
            )
            pieces.append(piece)
            end = piece.end
        self.layers[layer] = self._bytes(end)
        self.pieces[layer] = pieces
        for piece in pieces:
            self.allocated |= piece.tensors(self.layers[layer])

    def _bytes(self, size: int) -> Tensor:
        if self.pinned:
            try:
                return _as_host_memory(torch.empty(size, dtype=torch.uint8, pin_memory=True))
            except RuntimeError:
                self.pinned = False
                print("warning: memory cannot be pinned here; layers are copied more slowly", file=sys.stderr)
        return _as_host_memory(torch.empty(size, dtype=torch.uint8))


def _as_host_memory(tensor: Tensor) -> Tensor:
    """Returns a tensor, marked as the host's part: devices.live_tensors counts it apart, also where all is on a CPU."""
    tensor.untyped_storage().is_host_part = True
    return tensor


class LayerStream:
    """The layers of a model, two of which are on its device at a time."""

    def __init__(self, memory: HostLayers):
        self.device = memory.device
        self.pinned = memory.pinned
        self.pieces = memory.pieces
        self.host = [memory.layers[layer] for layer in sorted(memory.layers)]
        self.places = []
        for turn in range(min(2, len(self.host))):
            size = max(map(len, self.host[turn::2]))
            self.places.append(torch.empty(size, dtype=torch.uint8, device=self.device))
        self.layer_in: list[int | None] = [None] * len(self.places)  # the layer in each place, or on its way to it
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.arrived: list[torch.cuda.Event] = []
        if self.stream is not None:
            self.arrived = [torch.cuda.Event() for _ in self.places]
            for place in self.places:
                place.record_stream(self.stream)

    def attach(self, model: nn.Module) -> None:
        """Makes the tensors of all layers views of the two places on the device, in which the layers take turns.
        From then on models.activation_checkpointing must run the layers: it has each copied in time and keeps no
        activations.
        """
        for layer, pieces in self.pieces.items():
            for piece in pieces:
                for name, tensor in piece.tensors(self.places[layer % 2]).items():
                    owner, _, attribute = name.rpartition(".")
                    module = model.get_submodule(owner)
                    if attribute in module._parameters:
                        tensor = nn.Parameter(tensor, requires_grad=False)
                    setattr(module, attribute, tensor)

    def enter(self, layer: int, next_layer: int | None) -> None:
        """Brings a layer to the device before it computes; it stays there for what is queued before the next call.

        The copy of `next_layer`, the layer that computes next if that is known, is begun, unless both have one place.
        """
        self._bring(layer)
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrived[layer % 2])
        if next_layer is not None and next_layer % 2 != layer % 2:
            self._bring(next_layer)

    def in_forward(self, layer: int) -> None:
        """Enters a layer of a forward pass.

        At the last layer a pass with gradients turns round; after one without, another pass may begin at layer 0.
        """
        if layer < len(self.host) - 1:
            self.enter(layer, layer + 1)
        elif torch.is_grad_enabled():
            self.enter(layer, None)
        else:
            self.enter(layer, 0)

    def in_backward(self, layer: int) -> None:
        """Enters a layer of a backward pass, which ends where the next pass begins."""
        self.enter(layer, layer - 1 if layer else None)

    def upload(self, x: Tensor) -> Tensor:
        """Returns rows of the embedding on the device; the host does not wait if they can be pinned."""
        if x.device.type == self.device.type:
            return x
        if self.pinned:
            x = x.pin_memory()
        return x.to(self.device, non_blocking=True)

    def _bring(self, layer: int) -> None:
        """Begins to copy a layer to its place, unless it is there; the copy waits for what is queued on the device."""
        if self.layer_in[layer % 2] == layer:
            return
        self.layer_in[layer % 2] = layer
        self._copy(layer)

    def _copy(self, layer: int) -> None:
        source = self.host[layer]
        place = self.places[layer % 2]
        if self.stream is None:
            place[: len(source)].copy_(source)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            place[: len(source)].copy_(source, non_blocking=self.pinned)
            self.arrived[layer % 2].record(self.stream)
