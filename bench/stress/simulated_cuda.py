"""Simulates a CUDA device: its tensors lie in the host's memory and have a label, so results are those of the CPU.

    with SimulatedCuda() as card:
        ...  # code that uses the device "cuda" uses the card; card.counts has what the card did
    python -m bench.stress.simulated_cuda -m r3lite.sft --preset tiny --device cuda --dtype fp32 ...

What is an error on a real card is an error here: operators that mix devices, `.numpy()` of a tensor of the device, a
generator of the other device, and during the capture of a graph all that cannot be captured.

The card counts kernels and the bytes that they read and write, copies, and waits of the host, each with the functions
of r3lite that were running. A graph records the operators that run while it is captured; a replay runs them again on
the same memory. Live tensors take memory of the card, which is limited. Work that should have waited for another stream
is an error (simulation/streams.py).

An operator counts as one kernel, unless it is a view or an allocation. A composite operator, which PyTorch computes by
other operators on every device (logsumexp, for example), counts as those operators.

Not simulated are

- the number of kernels of an operator that needs several (a sort, the backward pass of attention, an optimizer step),
- CUDA's list of operators for autocast (except for cat and stack, it is the CPU's list),
- memory that operators use inside, fragmentation by the allocator, and reuse of memory within a graph,
- operators in other threads than the one that entered the block.
"""

import contextlib
import json
import runpy
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tag, Tensor
from torch.autograd.graph import _engine_run_backward

from bench.stress.simulation import operators, runtime
from bench.stress.simulation.counts import Counts
from bench.stress.simulation.operators import bytes_of, on_card, size_of
from bench.stress.simulation.streams import Stream, Unordered, Use, use_of, uses_of
from r3lite.devices.live_tensors import LiveTensors, UncompiledMode, tensors_in

CPU = torch.device("cpu")
GIB = 1 << 30
aten = torch.ops.aten


class SimulatedCuda:
    """A card of compute capability 7.5. Within its `with` block it is the CUDA device of this thread.

    `total` and `free` are bytes; by default 3.6 of 4 GiB are free, as on a laptop. `bf16`: the card supports bfloat16.
    """

    def __init__(self, total: int = 4 * GIB, free: int = int(3.6 * GIB), bf16: bool = False):
        assert not torch.cuda.is_available(), "there is a real card: hide it by CUDA_VISIBLE_DEVICES=-1"
        self.total = total
        self.free = free
        self.bf16 = bf16
        self.counts = Counts()
        self.memory = LiveTensors()
        self.share = 1.0  # share of the total memory that this process may allocate
        self.generator = torch.Generator()  # the default generator of the device
        self.generators = {self.generator._cdata}  # addresses of all generators of the device
        self.initialized = False  # CUDA is initialized when it is first used
        self.host = Stream()
        self.stream: Stream = runtime.CardStream(self)  # the current stream: new work is queued on it
        self.graph: runtime.Graph | None = None  # the graph that is being captured
        self._operators = _Operators(self._run)
        self._in_composite = False  # while a composite operator runs
        self._in_one_kernel = False  # within a block of `one_kernel`
        self._allocations_left: int | None = None  # allocations until one fails; None: no failure is planned
        self._misuse: Unordered | None = None  # an error from freeing memory, to be raised at the next occasion
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> "SimulatedCuda":
        with contextlib.ExitStack() as stack:
            for owner, name, stand_in in runtime.stand_ins(self):
                stack.enter_context(mock.patch.object(owner, name, stand_in))
            stack.enter_context(self._operators)
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *exception) -> None:
        self._exit.__exit__(*exception)
        self.host.ended = True
        if self._misuse and exception[0] is None:
            raise self._misuse

    def run_out_of_memory(self, after_allocations: int) -> None:
        """Lets one allocation fail for lack of memory, after `after_allocations` more successful ones."""
        self._allocations_left = after_allocations

    def so_far(self) -> Counts:
        """Returns a copy of the counts, to be subtracted from later ones."""
        return self.counts - Counts()

    def wait(self, why: str, done: dict[Stream, int] | None = None) -> None:
        """The host waits for work, by default for all work on the current stream; `why` is recorded in the counts.

        `done` has for each stream how many pieces of its work are finished after the wait.
        """
        self._refuse_in_capture(why)
        self.counts.wait(why)
        self.host.learn(self.stream.done if done is None else done)

    @contextlib.contextmanager
    def one_kernel(self, name: str, inputs: Any) -> Iterator[list[Tensor]]:
        """Counts all operators within the block as one kernel; the block must append its results to the list."""
        results: list[Tensor] = []
        was_in_one_kernel = self._in_one_kernel
        self._in_one_kernel = True
        try:
            yield results
        finally:
            self._in_one_kernel = was_in_one_kernel
        self._count(name, bytes_of(tensors_in(inputs)), bytes_of(results), 0)

    def order(self, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Queues work that uses these tensors on the current stream.

        Raises Unordered if another stream may use their memory at the same time.
        """
        if self._misuse:
            raise self._misuse
        self.stream.learn(self.host.done)
        self.stream.queue(uses_of(reads), uses_of(writes))

    def read_by_host(self, tensor: Tensor) -> None:
        """Raises Unordered if the host reads a tensor that an unfinished copy may still be writing."""
        if not on_card(tensor):
            self.host.queue(uses_of([tensor]), [])

    def _run(self, function, args: tuple, kwargs: dict) -> Any:
        """Runs an operator on the host or on the card, or copies between them."""
        inputs = tensors_in((args, kwargs))
        device = kwargs.get("device")
        has_card_inputs = any(map(on_card, inputs))
        if device is None:
            result_on_card = has_card_inputs
        else:
            result_on_card = device.type == "cuda" or (device.type == "cpu" and self._is_for_card())
        if function.overloadpacket in operators.COPIES:
            in_place = function.overloadpacket is aten.copy_  # copy_(target, source)
            source = args[1] if in_place else args[0]
            to_card = on_card(args[0]) if in_place else result_on_card
            if on_card(source) != to_card:
                return self._copy(function, args, kwargs, source=source, to_card=to_card)
        if not result_on_card:
            return self._on_host(function, args, kwargs, inputs=inputs)
        if has_card_inputs:
            operators.refuse_mixed(function, args, inputs)
        if device is not None:
            kwargs = kwargs | {"device": CPU}
        if not operators.is_kernel(function):
            return self._view_or_allocate(function, args, kwargs)
        key = operators.composite_key(function)
        if key is None:
            return self._kernel(function, args, kwargs, inputs=inputs)
        was_in_composite = self._in_composite
        self._in_composite = True
        try:
            with self._operators:  # else the operators inside would not come to this method
                return function._op_dk(key, *args, **kwargs)
        finally:
            self._in_composite = was_in_composite

    def _is_for_card(self) -> bool:
        """Returns whether a new tensor that is requested for the CPU belongs on the card.

        PyTorch's C++ code does not see the labels of tensors. So it requests the CPU for tensors of the card inside
        composite operators, and when autograd handles gradients of the card.
        """
        frame = sys._getframe()
        while frame.f_code.co_filename == __file__:
            frame = frame.f_back
        is_backward = frame.f_code is _engine_run_backward.__code__
        return self._in_composite or (is_backward and on_card(frame.f_locals["t_outputs"][0]))

    def _on_host(self, function, args: tuple, kwargs: dict, inputs: list[Tensor]) -> Any:
        """Runs an operator on tensors of the host."""
        generator = kwargs.get("generator")
        if generator is not None and generator._cdata in self.generators:
            raise RuntimeError("Expected a 'cpu' device type for generator but found 'cuda'")
        uses = uses_of(tensor for tensor in inputs if not on_card(tensor))
        if uses:
            self.host.queue(uses, uses_of(operators.written_by(function, args, kwargs)))
        if kwargs.get("pin_memory"):
            return _pinned(function(*args, **kwargs | {"pin_memory": False}))
        return function(*args, **kwargs)

    def _view_or_allocate(self, function, args: tuple, kwargs: dict) -> Any:
        """Runs an operator that needs no kernel: it returns a view of a tensor, or new memory."""
        result = self._label(function(*args, **kwargs))
        if self.graph is not None and not function.is_view:
            for tensor in tensors_in(result):
                # On a card, nothing is computed during a capture. Zeros are valid values even for indices.
                tensor.zero_()
        return result

    def _kernel(self, function, args: tuple, kwargs: dict, inputs: list[Tensor]) -> Any:
        """Runs an operator that is one kernel; during a capture it becomes part of the graph."""
        if Tag.nondeterministic_seeded in function.tags:
            kwargs = self._seeded(function, kwargs)
        for why, copied in operators.waits(function, args):
            if copied is not None:
                self.counts.uploads += 1
                self.counts.upload_bytes += size_of(copied)
            self.wait(why)
        mutated = operators.written_by(function, args, kwargs)
        call = operators.callable_for(function, args)
        if self.graph is None or not any(tensor.numel() for tensor in mutated):
            result = call(*args, **kwargs)
        # A capture changes no tensor, so an operator that works in place does not run. It returns what it would write.
        elif not function._schema.returns:
            result = None
        else:
            result = mutated[0] if len(mutated) == 1 else tuple(mutated)
        self._label(result)
        results = tensors_in(result)
        self.order(inputs, [*mutated, *results])
        if self.graph is not None:
            self.graph.add(call, args, kwargs, results)
        if function.overloadpacket is aten._local_scalar_dense:
            self.counts.downloads += 1
            self.counts.download_bytes += size_of(args[0])
        elif any(tensor.numel() for tensor in (*inputs, *results)):
            name = str(function.overloadpacket).removeprefix("aten.")
            traffic = operators.traffic(function, args, inputs=inputs, mutated=mutated, results=results)
            self._count(name, *traffic, operators.operations(function, args, kwargs, result=result))
        return result

    def _copy(self, function, args: tuple, kwargs: dict, source: Tensor, to_card: bool) -> Any:
        """Copies between the host and the device; the host waits for it unless the copy is non-blocking."""
        description = "a copy to the device" if to_card else "a copy to the host"
        self._refuse_in_capture(description)
        makes_tensor = function.overloadpacket is aten._to_copy  # and not copy_, whose third argument is non_blocking
        non_blocking = kwargs.get("non_blocking") or (not makes_tensor and len(args) > 2 and args[2])
        result = function(*args, **kwargs | ({"device": CPU} if makes_tensor else {}))
        if not result.numel():  # there is nothing to wait for
            return self._label(result) if to_card else result
        if to_card:
            self._label(result)
            self.counts.uploads += 1
            self.counts.upload_bytes += size_of(result)
        else:
            self.counts.downloads += 1
            self.counts.download_bytes += size_of(result)
            if makes_tensor and non_blocking:
                _pinned(result)  # PyTorch puts the result of a non-blocking copy into pinned memory
            non_blocking = non_blocking and use_of(result) is not None  # if it is not pinned, CUDA itself waits
        # A tensor that is not contiguous is copied by way of a contiguous one on the device, which takes a kernel.
        if not (result if to_card else source).is_contiguous():
            self._count("copy_", size_of(result), size_of(result), 0)
        self.order([source], [result])
        if not non_blocking:
            self.wait(description)
        return result

    def _refuse_in_capture(self, action: str) -> None:
        if self.graph is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({action})")

    def _seeded(self, function, kwargs: dict) -> dict:
        """Returns the keyword arguments with the device's generator, if the operator takes a generator."""
        if not operators.takes_generator(function):
            return kwargs
        generator = kwargs.get("generator") or self.generator
        if generator._cdata not in self.generators:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        return kwargs | {"generator": generator}

    def _count(self, name: str, *cost: int) -> None:
        """Counts a kernel: as launched by the host, or as part of the graph that is being captured.

        The cost is bytes read, bytes written and arithmetic operations.
        """
        if self._in_one_kernel:
            return
        if self.graph is not None:
            self.graph.kernels.append((name, *cost))
        else:
            self.counts.launches += 1
            self.counts.kernel(name, *cost)

    def _label(self, result: Any) -> Any:
        """Labels the tensors of a result as tensors of the device, and returns the result. New ones take memory."""
        for tensor in tensors_in(result):
            if use_of(tensor) is None:
                storage = tensor.untyped_storage()
                self._allocate(storage.nbytes())
                storage.use = Use(self.stream)
                weakref.finalize(storage, self._free, storage.use)
            self.memory.count(tensor)
        return result

    def _allocate(self, size: int) -> None:
        """Raises OutOfMemoryError if `size` bytes are not free, or if this allocation is to fail."""
        self.initialized = True
        fails = self.memory.live + size > min(self.free, int(self.share * self.total))
        if self._allocations_left is not None:
            fails = fails or self._allocations_left == 0
            self._allocations_left -= 1
        if fails:
            self._allocations_left = None
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB. (simulated)")

    def _free(self, use: Use) -> None:
        try:
            use.free()
        except Unordered as error:  # a finalizer cannot raise it, so the next operator does
            self._misuse = self._misuse or error


class _Operators(UncompiledMode):
    """Calls a function instead of each operator of this thread."""

    def __init__(self, run: Callable[[Any, tuple, dict], Any]):
        super().__init__()
        self.run = run

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self.run(function, args, kwargs or {})


def _pinned(tensor: Tensor) -> Tensor:
    """Marks the memory of a tensor as pinned, and returns the tensor."""
    tensor.untyped_storage().use = Use()
    return tensor


def main() -> None:
    """Runs a module as `python -m` does, and prints the counts of the card to stderr."""
    if len(sys.argv) < 3 or sys.argv[1] != "-m":
        sys.exit("usage: python -m bench.stress.simulated_cuda -m MODULE [ARGUMENTS]")
    sys.argv[:] = sys.argv[2:]
    card = SimulatedCuda()
    try:
        with card:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    finally:
        counts = card.counts.report() | {"peak_mib": round(card.memory.peak_mib, 1)}
        print(json.dumps(counts, indent=1), file=sys.stderr)


if __name__ == "__main__":
    main()
