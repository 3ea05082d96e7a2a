"""Streamed layers: they stay in the host's memory, and each is copied to the device while the one before it computes.

The device has two places, each with memory for one layer. Layers with even numbers take turns in one place, layers with
odd numbers in the other, so that the address of a tensor never changes. Copies run on a CUDA stream of their own; a
copy begins as soon as the layer that was in its place is done. The last two layers stay on the device between a forward
pass and its backward pass, and the first two layers after the backward pass, so that no layer is copied twice in a
pass. An embedding that is not the head stays in the host's memory, too; its rows are looked up there. On a CPU the
layers are copied in the same way: this saves no memory, and results are the same to the bit.
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
ALIGNED = 512  # bytes: each piece begins at a multiple of this in its layer's memory


@dataclass(frozen=True)
class Piece:
    """The part of a layer's memory that one stack of tensors takes, see models/stacks.py."""

    names: list[str]
    shapes: list[Sequence[int]]
    dtype: torch.dtype
    start: int  # in bytes, from the beginning of the layer's memory

    @property
    def end(self) -> int:
        """In bytes, from the beginning of the layer's memory."""
        numbers = sum(map(prod, self.shapes))
        return self.start + numbers * self.dtype.itemsize

    def tensors(self, memory: Tensor) -> dict[str, Tensor]:
        """Returns the tensors, by name, as views of the memory [bytes] of a layer."""
        stack = memory[self.start : self.end].view(self.dtype)
        stack = stack.view(-1, *self.shapes[0][1:])  # the shapes differ in their first size alone
        rows = [shape[0] for shape in self.shapes]
        return dict(zip(self.names, stack.split(rows), strict=True))


class HostLayers(StackMemory):
    """Memory for the tensors of a model: the layers, and an embedding that is not the head, are on the host.

    For a CUDA device the layers' memory is pinned. WSL and containers may refuse that; then copies are slower.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(tensors, dtype, device)
        self.pinned = device.type == "cuda"
        self.layers: dict[int, Tensor] = {}  # for each layer, its memory [bytes]
        self.pieces: dict[int, list[Piece]] = {}  # for each layer, what its memory holds

    def __getitem__(self, name: str) -> Tensor:
        """Returns a tensor's memory. The first tensor of a layer that is asked for allocates the whole layer."""
        if name not in self.allocated:
            layer = LAYER.match(name)
            if layer:
                self._allocate_layer(int(layer[1]))
            elif name == EMBEDDING and HEAD in self.tensors:
                shape = self.tensors[name].shape
                table = torch.empty(shape, dtype=self.dtype)  # not pinned: the CPU looks up its rows
                self.allocated[name] = _as_host_memory(table)
        return super().__getitem__(name)

    def _allocate_layer(self, layer: int) -> None:
        prefix = f"model.layers.{layer}."
        layer_stacks: list[list[str]] = []
        for name in self.tensors:
            stack = self.stack_names[name]
            if name.startswith(prefix) and stack not in layer_stacks:
                layer_stacks.append(stack)
        pieces = []
        end = 0
        for stack in layer_stacks:
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
        """Returns new memory [size] on the host, pinned if possible."""
        if self.pinned:
            try:
                return _as_host_memory(torch.empty(size, dtype=torch.uint8, pin_memory=True))
            except RuntimeError:
                self.pinned = False
                print("warning: memory cannot be pinned here; layers are copied more slowly", file=sys.stderr)
        return _as_host_memory(torch.empty(size, dtype=torch.uint8))


def _as_host_memory(tensor: Tensor) -> Tensor:
    """Marks a tensor as the host's part and returns it: devices.live_tensors counts it as `host`, on a CPU too."""
    tensor.untyped_storage().is_host_part = True
    return tensor


class LayerStream:
    """The layers of a model, two of which are on its device at a time."""

    def __init__(self, memory: HostLayers):
        self.device = memory.device
        self.pinned = memory.pinned
        self.pieces = memory.pieces
        self.host = [memory.layers[layer] for layer in sorted(memory.layers)]
        self.places = []  # memory [bytes] on the device: first for the layers with even numbers, then for the others
        for parity in range(min(2, len(self.host))):
            size = max(map(len, self.host[parity::2]))
            self.places.append(torch.empty(size, dtype=torch.uint8, device=self.device))
        self.layer_in: list[int | None] = [None] * len(self.places)  # for each place, the last layer copied there
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.arrived: list[torch.cuda.Event] = []  # for each place, the end of the last copy to it
        if self.stream is not None:
            self.arrived = [torch.cuda.Event() for _ in self.places]
            for place in self.places:
                place.record_stream(self.stream)

    def attach(self, model: nn.Module) -> None:
        """Makes the tensors of all layers views of the two places on the device.

        From then on models.activation_checkpointing must run the layers: it calls `in_forward` and `in_backward` before
        each layer, and keeps no activations.
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
        """Ensures that all work queued on the device until the next call finds the layer's weights in its place.

        Also begins to copy `next_layer`, the layer that computes next (None: this one again), unless both layers have
        the same place.
        """
        self._begin_copy(layer)
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrived[layer % 2])
        if next_layer is not None and next_layer % 2 != layer % 2:
            self._begin_copy(next_layer)

    def in_forward(self, layer: int) -> None:
        """Enters a layer of a forward pass."""
        if layer < len(self.host) - 1:
            next_layer = layer + 1
        elif torch.is_grad_enabled():
            next_layer = None  # the backward pass begins with this layer
        else:
            next_layer = 0  # of another pass, which may follow
        self.enter(layer, next_layer)

    def in_backward(self, layer: int) -> None:
        """Enters a layer of a backward pass. After layer 0 comes the next forward pass, which begins with layer 0."""
        next_layer = layer - 1 if layer else None
        self.enter(layer, next_layer)

    def upload(self, x: Tensor) -> Tensor:
        """Returns rows x of the embedding on the device; if they can be pinned, the host does not wait for the copy."""
        if x.device.type == self.device.type:
            return x
        if self.pinned:
            x = x.pin_memory()
        return x.to(self.device, non_blocking=True)

    def _begin_copy(self, layer: int) -> None:
        """Begins to copy a layer to its place, unless it is there already."""
        if self.layer_in[layer % 2] == layer:
            return
        self.layer_in[layer % 2] = layer
        self._copy(layer)

    def _copy(self, layer: int) -> None:
        """Queues the copy of a layer; on CUDA it waits for what is queued so far, which may use the place."""
        source = self.host[layer]
        place = self.places[layer % 2]
        if self.stream is None:
            place[: len(source)].copy_(source)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            place[: len(source)].copy_(source, non_blocking=self.pinned)
            self.arrived[layer % 2].record(self.stream)
