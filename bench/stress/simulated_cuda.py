"""A CUDA device that is simulated: tensors lie in the host's memory and bear a label, so numbers are those of the CPU.

    with SimulatedCuda() as card:
        ...  # whoever asks for "cuda" gets it; card.counts tells what it did
    python -m bench.stress.simulated_cuda -m r3lite.sft --preset tiny --device cuda --dtype fp32 ...

Refused as on a card: operators that mix devices, `.numpy()` of a tensor of the device, a generator of the other device,
and in a graph whatever cannot be captured. Counted: kernels with the bytes that they read and write, copies, and waits
of the host with the functions of r3lite that they happen in. A graph holds the operators that ran while it was
captured, and does them again on the same memory. Live tensors take memory of the card, which is limited; streams are
checked to wait for one another (simulation/streams.py).

An operator is one kernel, unless it is a view or an allocation; one that PyTorch makes of others on every device, such
as logsumexp, counts as those. Not seen: how many kernels a library's operator needs (a sort, the backward pass of
attention, a step of an optimizer), CUDA's own list for autocast (it is the CPU's, but for cat and stack), memory inside
operators, fragments of the allocator, reuse of memory within a graph, and operators in other threads than the one that
entered the block.
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
from torch.utils._python_dispatch import TorchDispatchMode

from bench.stress.simulation import operators, runtime
from bench.stress.simulation.counts import Counts
from bench.stress.simulation.operators import bytes_of, on_card, size_of, tensors_in
from bench.stress.simulation.streams import Stream, Unordered, Use, use_of, uses_of
from r3lite.devices.live_tensors import LiveTensors

CPU = torch.device("cpu")
GIB = 1 << 30
aten = torch.ops.aten


class SimulatedCuda:
    """A card with so many bytes; by default 4 GiB of which 3.6 are free, as on a laptop. Compute capability 7.5.

    Within its `with` block it is the CUDA device of this thread.
    """

    def __init__(self, total: int = 4 * GIB, free: int = int(3.6 * GIB), bf16: bool = False):
        assert not torch.cuda.is_available(), "there is a real card: hide it by CUDA_VISIBLE_DEVICES=-1"
        self.total, self.free, self.bf16 = total, free, bf16
        self.counts = Counts()
        self.memory = LiveTensors()
        self.share = 1.0  # of the memory, that this process may have
        self.generator = torch.Generator()  # the device's default one
        self.generators = {self.generator._cdata}  # those that are the device's
        self.initialized = False  # as CUDA is by its first use
        self.host = Stream()
        self.stream: Stream = runtime.CardStream(self)  # that work is queued on now
        self.graph: runtime.Graph | None = None  # that is being captured
        self._operators = _Operators(self._run)
        self._inside = False  # an operator that is made of others
        self._silent = False  # what runs is counted as a whole
        self._room: int | None = None  # allocations until memory runs out
        self._misuse: Unordered | None = None  # found when memory was given back
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

    def run_out_of_memory(self, after: int) -> None:
        """After so many more tensors that take memory, the next one finds none, once."""
        self._room = after

    def so_far(self) -> Counts:
        """The counts of now, to be subtracted from later ones."""
        return self.counts - Counts()

    def wait(self, why: str, done: dict[Stream, int] | None = None) -> None:
        """The host waits for this work, by default for all that is queued on the current stream."""
        self._refuse_in_capture(why)
        self.counts.wait(why)
        self.host.learn(self.stream.done if done is None else done)

    @contextlib.contextmanager
    def one_kernel(self, name: str, inputs: Any) -> Iterator[list[Tensor]]:
        """What is done within the block is one kernel on a card; the block puts its results into the list."""
        results: list[Tensor] = []
        before, self._silent = self._silent, True
        try:
            yield results
        finally:
            self._silent = before
        self._count(name, bytes_of(tensors_in(inputs)), bytes_of(results), 0)

    def order(self, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Queues work on the current stream; raises Unordered if it may meet another stream's."""
        if self._misuse:
            raise self._misuse
        self.stream.learn(self.host.done)
        self.stream.work(uses_of(reads), uses_of(writes))

    def read_by_host(self, tensor: Tensor) -> None:
        """Raises Unordered if the host may be reading what a copy has yet to bring."""
        if not on_card(tensor):
            self.host.work(uses_of([tensor]), [])

    def _run(self, function, args: tuple, kwargs: dict) -> Any:
        """Does what an operator does, where its tensors are."""
        inputs, asked = tensors_in((args, kwargs)), kwargs.get("device")
        here = any(map(on_card, inputs))
        there = here if asked is None else asked.type == "cuda" or (asked.type == "cpu" and self._is_for_card())
        if function.overloadpacket in operators.COPIES:
            in_place = function.overloadpacket is aten.copy_
            to_card = on_card(args[0]) if in_place else there
            if on_card(args[in_place]) != to_card:
                return self._copy(function, args, kwargs, args[in_place], to_card)
        if not there:
            return self._on_host(function, args, kwargs, inputs)
        if here:
            operators.refuse_mixed(function, args, inputs)
        if asked is not None:
            kwargs = kwargs | {"device": CPU}
        if not operators.is_kernel(function):
            return self._look_or_allocate(function, args, kwargs)
        if (key := operators.composite_key(function)) is None:
            return self._kernel(function, args, kwargs, inputs)
        before, self._inside = self._inside, True
        try:
            with self._operators:
                return function._op_dk(key, *args, **kwargs)
        finally:
            self._inside = before

    def _is_for_card(self) -> bool:
        """Whether C++ asks for memory of the CPU because it does not see the label of the tensors that it works for.

        So it does within operators made of others, and in what autograd does by itself with gradients of the device.
        """
        frame = sys._getframe()
        while frame.f_code.co_filename == __file__:
            frame = frame.f_back
        backward = frame.f_code is _engine_run_backward.__code__
        return self._inside or (backward and on_card(frame.f_locals["t_outputs"][0]))

    def _on_host(self, function, args: tuple, kwargs: dict, inputs: list[Tensor]) -> Any:
        """Runs an operator of the host's own."""
        generator = kwargs.get("generator")
        if generator is not None and generator._cdata in self.generators:
            raise RuntimeError("Expected a 'cpu' device type for generator but found 'cuda'")
        if uses := uses_of(t for t in inputs if not on_card(t)):
            self.host.work(uses, uses_of(operators.written_by(function, args, kwargs)))
        if kwargs.get("pin_memory"):
            return _pinned(function(*args, **kwargs | {"pin_memory": False}))
        return function(*args, **kwargs)

    def _look_or_allocate(self, function, args: tuple, kwargs: dict) -> Any:
        """Runs an operator that is no kernel."""
        result = self._hold(function(*args, **kwargs))
        if self.graph is not None and not function.is_view:
            for tensor in tensors_in(result):
                tensor.zero_()  # it has no values in a capture; these would do as indices
        return result

    def _kernel(self, function, args: tuple, kwargs: dict, inputs: list[Tensor]) -> Any:
        """Runs a kernel, or captures it."""
        if Tag.nondeterministic_seeded in function.tags:
            kwargs = self._seeded(function, kwargs)
        for why, copied in operators.waits(function, args):
            if copied is not None:
                self.counts.uploads += 1
                self.counts.upload_bytes += size_of(copied)
            self.wait(why)
        written = operators.written_by(function, args, kwargs)
        call = operators.taking_numbers(function, args)
        if self.graph is not None and any(t.numel() for t in written):  # a capture changes nothing
            result = None if not function._schema.returns else written[0] if len(written) == 1 else tuple(written)
        else:
            result = call(*args, **kwargs)
        self._hold(result)
        results = tensors_in(result)
        self.order(inputs, [*written, *results])
        if self.graph is not None:
            self.graph.add(call, args, kwargs, results)
        if function.overloadpacket is aten._local_scalar_dense:
            self.counts.downloads += 1
            self.counts.download_bytes += size_of(args[0])
        elif any(t.numel() for t in (*inputs, *results)):
            name = str(function.overloadpacket).removeprefix("aten.")
            moved = operators.traffic(function, args, inputs, written, results)
            self._count(name, *moved, operators.operations(function, args, kwargs, result))
        return result

    def _copy(self, function, args: tuple, kwargs: dict, source: Tensor, to_card: bool) -> Any:
        """A copy between the host and the device."""
        self._refuse_in_capture("a copy to the device" if to_card else "a copy to the host")
        made = function.overloadpacket is aten._to_copy
        non_blocking = kwargs.get("non_blocking") or (not made and len(args) > 2 and args[2])
        result = function(*args, **kwargs | ({"device": CPU} if made else {}))
        if not result.numel():  # there is nothing to wait for
            return self._hold(result) if to_card else result
        if to_card:
            self._hold(result)
            self.counts.uploads += 1
            self.counts.upload_bytes += size_of(result)
        else:
            self.counts.downloads += 1
            self.counts.download_bytes += size_of(result)
            if made and non_blocking:
                _pinned(result)  # where PyTorch puts the result of such a copy
            non_blocking = non_blocking and use_of(result) is not None  # not pinned: CUDA itself waits
        if not (result if to_card else source).is_contiguous():  # by way of a contiguous copy on the device
            self._count("copy_", size_of(result), size_of(result), 0)
        self.order([source], [result])
        if not non_blocking:
            self.wait("a copy to the device" if to_card else "a copy to the host")
        return result

    def _refuse_in_capture(self, what: str) -> None:
        if self.graph is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")

    def _seeded(self, function, kwargs: dict) -> dict:
        """With the device's generator, if the operator takes one."""
        if not operators.takes_generator(function):
            return kwargs
        generator = kwargs.get("generator") or self.generator
        if generator._cdata not in self.generators:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        return kwargs | {"generator": generator}

    def _count(self, name: str, *cost: int) -> None:
        """Counts a kernel that the host launches, or that is part of the graph that is being captured."""
        if self._silent:
            return
        if self.graph is not None:
            self.graph.kernels.append((name, *cost))
        else:
            self.counts.launches += 1
            self.counts.kernel(name, *cost)

    def _hold(self, result: Any) -> Any:
        """Labels results as the device's; those that are new take memory of it."""
        for tensor in tensors_in(result):
            if use_of(tensor) is None:
                storage = tensor.untyped_storage()
                self._allocate(storage.nbytes())
                storage.use = Use(self.stream)
                weakref.finalize(storage, self._free, storage.use)
            self.memory.count(tensor)
        return result

    def _allocate(self, size: int) -> None:
        self.initialized = True
        full = self.memory.live + size > min(self.free, int(self.share * self.total))
        if self._room is not None:
            full, self._room = full or self._room == 0, self._room - 1
        if full:
            self._room = None
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB. (simulated)")

    def _free(self, use: Use) -> None:
        try:
            use.free()
        except Unordered as error:  # whatever comes next raises it: nothing can be raised from here
            self._misuse = self._misuse or error


class _Operators(TorchDispatchMode):
    """Hands every operator of this thread to a function."""

    def __init__(self, run: Callable[[Any, tuple, dict], Any]):
        super().__init__()
        self.run = run

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operator imports PyTorch's compiler, which takes seconds

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self.run(function, args, kwargs or {})


def _pinned(tensor: Tensor) -> Tensor:
    """The same tensor, whose memory counts as pinned from now on."""
    tensor.untyped_storage().use = Use()
    return tensor


def main() -> None:
    """Runs a module as `python -m` does; what the device did goes to stderr."""
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
