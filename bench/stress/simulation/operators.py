"""What an operator of PyTorch does on a device: whether it is a kernel, its bytes, and why the host waits for it."""

import functools
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tag, Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from bench.stress.simulation.streams import use_of
from r3lite.devices.live_tensors import tensors_in

aten = torch.ops.aten
# Dispatch keys under which PyTorch registers implementations that call other operators, the same on every device.
# A dispatch mode sees operators with the last key only in inference mode.
COMPOSITES = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
# Operators that run no kernel although their schemas do not say that they are views: they allocate memory or return
# a view of it.
NO_KERNEL = {
    aten.alias,
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.lift_fresh,
    aten.new_empty,
    aten.new_empty_strided,
    aten.resize_,
    aten.set_,
    aten._unsafe_view,
}
COPIES = {aten.copy_, aten._to_copy}
# Operators with a list of index tensors as second argument, which may be tensors of the host, too.
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
# Operators that also take tensors of the host if these have no dimensions, as do all that are tagged pointwise.
HOST_SCALARS = INDEXING | {aten.fill_, aten.masked_fill, aten.masked_fill_, aten.where}
# Operators that work in place and do not read what they overwrite.
OVERWRITING = {aten.copy_, aten.fill_, aten.zero_}
# Operators that read only some elements of their first argument: as many as the result has.
PICKING = {aten.embedding, aten.index_select, aten.gather, aten.index}
# Operators that write only some elements of their first argument: as many as the source has.
PLACING = {aten._index_put_impl_, aten.scatter_, aten.scatter_add_, aten.index_add_, aten.index_copy_}
# Operators for which PyTorch has no formula of floating-point operations, and an operator whose formula applies.
COUNTED_AS = {
    aten.addmm_: aten.addmm,
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


def on_card(tensor: Tensor) -> bool:
    """Returns whether a tensor has the label of the device."""
    use = use_of(tensor)
    return use is not None and use.home is not None


def size_of(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's elements in memory; elements that an expanded tensor repeats count once."""
    if not tensor.numel():
        return 0
    stored_sizes = [size for size, stride in zip(tensor.shape, tensor.stride()) if stride]
    return prod(stored_sizes) * tensor.element_size()


def bytes_of(tensors: list[Tensor]) -> int:
    """Returns the sum of the tensors' bytes."""
    return sum(map(size_of, tensors))


@functools.cache
def is_kernel(function: OpOverload) -> bool:
    """Returns whether an operator runs a kernel. Views and allocations do not."""
    return not function.is_view and function.overloadpacket not in NO_KERNEL


@functools.cache
def composite_key(function: OpOverload) -> torch._C.DispatchKey | None:
    """Returns the key of the implementation that computes an operator by others; None if it counts as a kernel.

    Three kinds of operators have such an implementation, or may have it, but count as kernels: operators on lists of
    tensors, which only a CPU computes tensor by tensor; copies; and the norm of models/functions.py (namespace r3lite),
    which is one kernel on CUDA, forward and backward, if its weight is frozen.
    """
    has_kernel = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, function.name())
    is_on_lists = function.name().startswith("aten::_foreach")
    if has_kernel("CPU") or function.namespace == "r3lite" or is_on_lists or function.overloadpacket in COPIES:
        return None
    return next((getattr(torch._C.DispatchKey, key) for key in COMPOSITES if has_kernel(key)), None)


@functools.cache
def takes_generator(function: OpOverload) -> bool:
    """Returns whether an operator has an argument for a generator of random numbers."""
    return any(argument.name == "generator" for argument in function._schema.arguments)


def callable_for(function: OpOverload, args: tuple) -> Callable:
    """Returns the overload itself, or all overloads of its operator if a number takes the place of a tensor in `args`.

    Inside a composite operator PyTorch wraps a number in a tensor and chooses the overload for tensors. But a dispatch
    mode receives the number without its wrapper, and the overload for tensors refuses numbers.
    """
    for argument, value in zip(function._schema.arguments, args):
        if isinstance(argument.type, torch.TensorType) and isinstance(value, int | float | complex):
            return function.overloadpacket
    return function


def written_by(function: OpOverload, args: tuple, kwargs: dict) -> list[Tensor]:
    """Returns the input tensors that an operator changes."""
    changed = []
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            changed += tensors_in(value)
    return changed


def traffic(
    function: OpOverload, args: tuple, inputs: list[Tensor], mutated: list[Tensor], results: list[Tensor]
) -> tuple[int, int]:
    """Returns the bytes that a kernel reads and the bytes that it writes. Each tensor counts once.

    `mutated` has the inputs that the operator changes, `results` the tensors that it returns.
    """
    operator = function.overloadpacket
    mutated_ids = set(map(id, mutated))
    only_read = list({id(tensor): tensor for tensor in inputs if id(tensor) not in mutated_ids}.values())
    new_results = [tensor for tensor in results if id(tensor) not in mutated_ids]
    output_bytes = bytes_of([*mutated, *new_results])
    if operator in PICKING:
        picked_bytes = min(size_of(args[0]), output_bytes)
        index_bytes = bytes_of([tensor for tensor in only_read if tensor is not args[0]])
        return picked_bytes + index_bytes, output_bytes
    if operator in PLACING:
        # The elements that are written have no tensor of their own: there are as many as in the largest other input.
        placed_elements = max((tensor.numel() for tensor in only_read), default=0)
        placed_bytes = placed_elements * args[0].element_size()
        accumulates = operator is aten._index_put_impl_ and True in args[3:4]  # its argument `accumulate`
        reads_target = operator in (aten.scatter_add_, aten.index_add_) or accumulates
        return bytes_of(only_read) + placed_bytes * reads_target, placed_bytes
    is_random = Tag.nondeterministic_seeded in function.tags  # such as normal_, which does not read what it overwrites
    is_in_place = operator._qualified_op_name.endswith("_")
    reads_mutated = is_in_place and operator not in OVERWRITING and not is_random
    return bytes_of(only_read) + bytes_of(mutated) * reads_mutated, output_bytes


def operations(function: OpOverload, args: tuple, kwargs: dict, result: Any) -> int:
    """Returns the floating-point operations of a matrix product or of attention; 0 for every other operator."""
    operator = function.overloadpacket
    formula = flop_registry.get(COUNTED_AS.get(operator, operator))
    return formula(*args, **kwargs, out_val=result) if formula else 0


def refuse_mixed(function: OpOverload, args: tuple, inputs: list[Tensor]) -> None:
    """Raises RuntimeError if an operator of the device has an input on the host that CUDA would refuse."""
    operator = function.overloadpacket
    takes_host_scalars = Tag.pointwise in function.tags or operator in HOST_SCALARS
    indices = args[1] if operator in INDEXING else ()
    for tensor in inputs:
        is_index = any(tensor is index for index in indices)
        if on_card(tensor) or is_index or (takes_host_scalars and tensor.dim() == 0):
            continue
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"({function} was given {tensor.dtype} {list(tensor.shape)} of the host; simulated)"
        )


def waits(function: OpOverload, args: tuple) -> Iterator[tuple[str, Tensor | None]]:
    """Yields each reason why the host waits before an operator can run.

    With the reason comes the tensor of the host that is copied to the device, or None if nothing is copied.
    """
    operator = function.overloadpacket
    if operator in INDEXING:
        for index in args[1]:
            if index is not None and not on_card(index):
                yield "indices of the host", index
            elif index is not None and index.dtype in (torch.bool, torch.uint8):
                yield "a mask as index", None  # the size of the result depends on the mask's values
    elif Tag.data_dependent_output in function.tags or Tag.dynamic_output_shape in function.tags:
        yield str(operator).removeprefix("aten."), None
