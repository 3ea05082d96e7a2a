"""What an operator of PyTorch asks of a device: whether it is a kernel, which bytes it moves, why the host waits."""

import functools
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tag, Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from bench.stress.simulation.streams import use_of

aten = torch.ops.aten
# Keys of the kernels by which PyTorch's dispatcher makes operators of others; the last is seen in inference mode alone.
COMPOSITES = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
# Operators that allocate, or only look at memory in another way, though their schema does not say that they are views.
NO_KERNEL = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.lift_fresh}
NO_KERNEL |= {aten.resize_, aten.set_, aten._unsafe_view, aten.alias}
COPIES = {aten.copy_, aten._to_copy}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}  # take indices of the host, too
HOST_SCALARS = INDEXING | {
    aten.fill_,
    aten.masked_fill,
    aten.masked_fill_,
    aten.where,
}  # and operators tagged pointwise
OVERWRITING = {aten.copy_, aten.fill_, aten.zero_}  # in place, and what was there is not read
PICKING = {aten.embedding, aten.index_select, aten.gather, aten.index}  # read no more of a tensor than the result has
PLACING = {aten._index_put_impl_, aten.scatter_, aten.scatter_add_, aten.index_add_, aten.index_copy_}
COUNTED_AS = {  # whose floating-point operations another's formula counts
    aten.addmm_: aten.addmm,
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


def on_card(tensor: Tensor) -> bool:
    """Whether a tensor bears the label of the device."""
    use = use_of(tensor)
    return use is not None and use.home is not None


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor's numbers; those that an expanded one repeats are there once."""
    if not tensor.numel():
        return 0
    return prod(n for n, stride in zip(tensor.shape, tensor.stride()) if stride) * tensor.element_size()


def bytes_of(tensors: list[Tensor]) -> int:
    return sum(map(size_of, tensors))


@functools.cache
def is_kernel(function: OpOverload) -> bool:
    return not function.is_view and function.overloadpacket not in NO_KERNEL


@functools.cache
def composite_key(function: OpOverload) -> torch._C.DispatchKey | None:
    """The key of the kernel that makes an operator of others, on every device; None if each device has its own kernel.

    Lists of tensors are taken one by one on a CPU alone. A copy is made of no others. The norm of models/functions.py
    is one kernel of CUDA's, forward and backward, if its weight is frozen.
    """
    has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, function.name())
    alone = function.namespace == "r3lite" or function.name().startswith("aten::_foreach")
    if has("CPU") or alone or function.overloadpacket in COPIES:
        return None
    return next((getattr(torch._C.DispatchKey, key) for key in COMPOSITES if has(key)), None)


@functools.cache
def takes_generator(function: OpOverload) -> bool:
    return any(argument.name == "generator" for argument in function._schema.arguments)


def taking_numbers(function: OpOverload, args: tuple) -> Callable:
    """What to call an operator by: its other overloads, too, if it is handed a number in place of a tensor.

    Where PyTorch makes an operator of others, it wraps a number in a tensor, and a mode is handed the number again.
    """
    for argument, value in zip(function._schema.arguments, args):
        if isinstance(argument.type, torch.TensorType) and isinstance(value, int | float | complex):
            return function.overloadpacket
    return function


def written_by(function: OpOverload, args: tuple, kwargs: dict) -> list[Tensor]:
    """The inputs that an operator changes."""
    found = []
    for i, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in(args[i] if i < len(args) else kwargs.get(argument.name))
    return found


def traffic(
    function: OpOverload, args: tuple, inputs: list[Tensor], written: list[Tensor], results: list[Tensor]
) -> tuple[int, int]:
    """Bytes that a kernel reads and writes, each once."""
    packet, changed = function.overloadpacket, set(map(id, written))
    given = list({id(t): t for t in inputs if id(t) not in changed}.values())
    fresh = [t for t in results if id(t) not in changed]
    made = [*written, *fresh]
    if packet in PICKING:
        picked = min(size_of(args[0]), bytes_of(made))
        return picked + bytes_of([t for t in given if t is not args[0]]), bytes_of(made)
    if packet in PLACING:
        place = args[0]
        placed = max((t.numel() for t in given), default=0) * place.element_size()
        adds = packet in (aten.scatter_add_, aten.index_add_) or (packet is aten._index_put_impl_ and True in args[3:4])
        return bytes_of(given) + placed * adds, placed
    random = Tag.nondeterministic_seeded in function.tags
    read_first = function.overloadpacket._qualified_op_name.endswith("_") and packet not in OVERWRITING and not random
    return bytes_of(given) + bytes_of(written) * read_first, bytes_of(made)


def operations(function: OpOverload, args: tuple, kwargs: dict, result: Any) -> int:
    """Floating-point operations of a matrix product or of attention; 0 of what has none to speak of."""
    packet = function.overloadpacket
    formula = flop_registry.get(COUNTED_AS.get(packet, packet))
    return formula(*args, **kwargs, out_val=result) if formula else 0


def refuse_mixed(function: OpOverload, args: tuple, inputs: list[Tensor]) -> None:
    """Raises RuntimeError if an operator of the device is given a tensor of the host that CUDA would not take."""
    packet = function.overloadpacket
    scalars = Tag.pointwise in function.tags or packet in HOST_SCALARS
    indices = args[1] if packet in INDEXING else ()
    for tensor in inputs:
        if on_card(tensor) or any(tensor is i for i in indices) or (scalars and tensor.dim() == 0):
            continue
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"({function} was given {tensor.dtype} {list(tensor.shape)} of the host; simulated)"
        )


def waits(function: OpOverload, args: tuple) -> Iterator[tuple[str, Tensor | None]]:
    """Why the host waits before an operator can run, and what is copied from it, if anything."""
    packet = function.overloadpacket
    if packet in INDEXING:
        for index in args[1]:
            if index is not None and not on_card(index):
                yield "indices of the host", index
            elif index is not None and index.dtype in (torch.bool, torch.uint8):
                yield "a mask as index", None
    elif Tag.data_dependent_output in function.tags or Tag.dynamic_output_shape in function.tags:
        yield str(packet).removeprefix("aten."), None
