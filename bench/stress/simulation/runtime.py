"""Stand-ins for functions and classes of `torch` and `torch.cuda`, by which PyTorch works on a simulated device.

SimulatedCuda (simulated_cuda.py) puts them in place of the originals while it is in use.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from bench.stress.simulation.operators import on_card
from bench.stress.simulation.streams import Event, Stream, use_of
from r3lite.devices import speed
from r3lite.devices.live_tensors import tensors_in

Card = Any  # a SimulatedCuda: its class cannot be imported, because its module imports this one
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
NAME = "simulated card"
CAPABILITY = (7, 5)  # compute capability
PROCESSORS = 14  # streaming multiprocessors
BANDWIDTH = 192e9  # bytes of memory per second; the times of events follow from it
TensorBase = torch._C.TensorBase  # has the original methods of torch.Tensor
aten = torch.ops.aten


def is_cuda(device: Any) -> bool:
    """Returns whether an argument of `to` or `device=` names the device. A bare device index does."""
    return device is not None and torch.device(device).type == "cuda"


def stand_ins(card: Card) -> Iterator[tuple[Any, str, Any]]:
    """Yields a module or class, the name of its attribute that is replaced, and the stand-in for the attribute."""
    for replacements_of in (_tensor_methods, _torch_functions, _cuda_functions):
        owner, replacements = replacements_of(card)
        for name, stand_in in replacements.items():
            yield owner, name, stand_in
    for name in ("dropout", "rms_norm"):  # one kernel on CUDA, several operators on a CPU
        yield F, name, _as_one_kernel(card, getattr(F, name))
    for owner in (torch, torch.amp, torch.amp.autocast_mode):
        yield owner, "autocast", _Autocast
    group_tensors = torch._C._group_tensors_by_device_and_dtype

    def group_by_label(lists: list, with_indices: bool = False) -> dict:
        """Groups an optimizer's tensors by device and dtype. The original, in C++, does not see the device's label."""
        groups = {}
        for (_, dtype), group in group_tensors(lists, with_indices).items():
            first_tensor = group[0][0][0]
            groups[first_tensor.device, dtype] = group
        return groups

    yield torch._C, "_group_tensors_by_device_and_dtype", group_by_label
    # With a CUDA build of PyTorch, optimizers would otherwise call the driver of a card that is not there.
    yield torch.accelerator, "current_accelerator", _constant(None)
    yield speed, "measure", _refuse_measuring


def _refuse_measuring(*_: Any) -> None:
    """Stands in for speed.measure: the speed of the CPU would be taken for the card's."""
    raise RuntimeError("the card is simulated")


def _tensor_methods(card: Card) -> tuple[type, dict[str, Any]]:
    """Returns the methods and properties of tensors that tell or change where a tensor is."""

    def to(tensor: Tensor, *args, **kwargs) -> Tensor:
        if args and isinstance(args[0], Tensor):  # tensor.to(like)
            args = (args[0].device, args[0].dtype, *args[1:])
        copy = kwargs.pop("copy", False)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        from_card = on_card(tensor)
        if not from_card and not is_cuda(device):
            return TensorBase.to(tensor, *args, copy=copy, **kwargs)
        to_card = from_card if device is None else is_cuda(device)
        dtype = dtype or tensor.dtype
        if from_card == to_card and dtype == tensor.dtype and not copy:
            return tensor
        target = CUDA if to_card else device
        return aten._to_copy(tensor, dtype=dtype, device=target, non_blocking=non_blocking)

    def numpy(tensor: Tensor, *, force: bool = False):
        if on_card(tensor) and not force:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory."
            )
        return TensorBase.numpy(on_host(tensor), force=force)

    def on_host(tensor: Tensor) -> Tensor:
        """Returns the tensor, or its copy on the host if it is on the device."""
        card.read_by_host(tensor)
        return tensor.cpu()

    def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor)

    return Tensor, {
        "device": property(lambda tensor: CUDA if on_card(tensor) else TensorBase.device.__get__(tensor)),
        "is_cuda": property(on_card),
        "get_device": lambda tensor: CUDA.index if on_card(tensor) else -1,
        "to": to,
        "cuda": lambda tensor, device=None, non_blocking=False: tensor.to(CUDA, non_blocking=non_blocking),
        "cpu": lambda tensor: tensor.to(CPU),
        "numpy": numpy,
        "__array__": lambda tensor, dtype=None, copy=None: _with_dtype(tensor.numpy(), dtype),
        "tolist": lambda tensor: TensorBase.tolist(on_host(tensor)),
        "pin_memory": pin_memory,
        "is_pinned": lambda tensor, device=None: use_of(tensor) is not None and not on_card(tensor),
        "record_stream": lambda tensor, stream: use_of(tensor).recorded.add(stream),
    }


def _with_dtype(array: Any, dtype: Any) -> Any:
    """Returns a NumPy array, converted to `dtype` unless that is None."""
    return array if dtype is None else array.astype(dtype)


def _torch_functions(card: Card) -> tuple[Any, dict[str, Any]]:
    """Returns the functions and classes of `torch` that take a device, and those that autocast concerns."""
    torch_tensor = torch.tensor
    torch_as_tensor = torch.as_tensor
    is_autocast_enabled = torch.is_autocast_enabled
    get_autocast_dtype = torch.get_autocast_dtype

    def tensor(
        data: Any, *, device: Any = None, requires_grad: bool = False, pin_memory: bool = False, **options
    ) -> Tensor:
        result = torch_tensor(data, **options)
        if pin_memory:
            result = result.pin_memory()
        if device is not None:
            result = result.to(device)
        return result.requires_grad_(requires_grad)

    def as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        result = data if isinstance(data, Tensor) else torch_as_tensor(data, dtype=dtype)
        return result.to(device or result.device, dtype or result.dtype)

    class Generator(torch.Generator):
        """A generator of the host. It reports the simulated device as its own if it was requested for that device."""

        def __new__(cls, device: Any = "cpu") -> "Generator":
            generator = super().__new__(cls, "cpu")
            generator.requested_device = CUDA if is_cuda(device) else CPU
            if generator.requested_device == CUDA:
                card.generators.add(generator._cdata)
                weakref.finalize(generator, card.generators.discard, generator._cdata)
            return generator

        device = property(lambda self: self.requested_device)

    return torch, {
        "tensor": tensor,
        "as_tensor": as_tensor,
        "Generator": Generator,
        "is_autocast_enabled": lambda device_type="cuda": is_autocast_enabled(_host_type(device_type)),
        "get_autocast_dtype": lambda device_type="cuda": get_autocast_dtype(_host_type(device_type)),
        **{name: _without_autocast(getattr(torch, name)) for name in ("cat", "stack")},
    }


def _without_autocast(function: Callable) -> Callable:
    """Returns the function with autocast switched off for tensors of the device.

    Autocast converts the inputs of cat and stack to one dtype on a CPU, but not on CUDA.
    """

    @functools.wraps(function)
    def run(tensors: Any, *args, **kwargs) -> Tensor:
        is_card_call = any(map(on_card, tensors))
        with torch.autocast("cpu", enabled=False) if is_card_call else contextlib.nullcontext():
            return function(tensors, *args, **kwargs)

    return run


def _host_type(device_type: str) -> str:
    """Returns the device type whose autocast state applies: for "cuda" that of the CPU, which computes for the card."""
    return "cpu" if device_type == "cuda" else device_type


class _Autocast(torch.autocast):
    """Autocast for the device, which is the CPU's autocast with the default dtype of CUDA."""

    def __init__(self, device_type: str, dtype: torch.dtype | None = None, *args, **kwargs):
        if device_type == "cuda" and dtype is None:
            dtype = torch.float16
        super().__init__(_host_type(device_type), dtype, *args, **kwargs)


def _as_one_kernel(card: Card, function: Callable) -> Callable:
    """Returns the function, whose operators count as one kernel if its first argument is on the card."""

    @functools.wraps(function)
    def run(x: Tensor, *args, **kwargs) -> Tensor:
        if not on_card(x):
            return function(x, *args, **kwargs)
        with card.one_kernel(function.__name__, (x, args, kwargs)) as results:
            results.append(function(x, *args, **kwargs))
        return results[0]

    return run


def _constant(value: Any) -> Callable:
    """Returns a function that takes any arguments and returns the value."""
    return lambda *_, **__: value


def _cuda_functions(card: Card) -> tuple[Any, dict[str, Any]]:
    """Returns the functions and classes of `torch.cuda`."""
    return torch.cuda, _properties(card) | _memory(card) | _random_numbers(card) | _streams_and_graphs(card)


def _properties(card: Card) -> dict[str, Any]:
    """Returns the functions that describe the card or initialize CUDA."""

    def initialize(*_: Any) -> None:
        card.initialized = True

    device_properties = SimpleNamespace(
        name=NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=card.total,
        multi_processor_count=PROCESSORS,
    )
    return {
        "is_available": _constant(True),
        "device_count": _constant(1),
        "current_device": _constant(CUDA.index),
        "get_device_name": _constant(NAME),
        "get_device_capability": _constant(CAPABILITY),
        "get_device_properties": _constant(device_properties),
        "is_bf16_supported": lambda including_emulation=True: card.bf16 or including_emulation,
        "is_initialized": lambda: card.initialized,
        "init": initialize,
        "_lazy_init": initialize,
        "device": lambda _: contextlib.nullcontext(),
    }


def _memory(card: Card) -> dict[str, Any]:
    """Returns the functions that report or limit the card's memory, in bytes."""

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        card.initialized = True
        return card.free - card.memory.live, card.total

    def reset_peak(device: Any = None) -> None:
        card.memory.peak = card.memory.live

    def set_share(fraction: float, device: Any = None) -> None:
        card.share = fraction

    return {
        "empty_cache": _constant(None),
        "mem_get_info": mem_get_info,
        "set_per_process_memory_fraction": set_share,
        **{name: lambda device=None: card.memory.live for name in ("memory_allocated", "memory_reserved")},
        **{name: lambda device=None: card.memory.peak for name in ("max_memory_allocated", "max_memory_reserved")},
        "reset_peak_memory_stats": reset_peak,
    }


def _random_numbers(card: Card) -> dict[str, Any]:
    """Returns the functions that seed, save and restore the card's default generator."""
    return {
        "manual_seed": card.generator.manual_seed,
        "manual_seed_all": card.generator.manual_seed,
        "get_rng_state": lambda device=None: card.generator.get_state(),
        "get_rng_state_all": lambda: [card.generator.get_state()],
        "set_rng_state": lambda state, device=None: card.generator.set_state(state),
        "set_rng_state_all": lambda states: card.generator.set_state(states[0]),
    }


def _streams_and_graphs(card: Card) -> dict[str, Any]:
    """Returns the functions and classes of streams, events and graphs."""

    @contextlib.contextmanager
    def stream(new_stream: Stream) -> Iterator[None]:
        previous_stream = card.stream
        card.stream = new_stream
        try:
            yield
        finally:
            card.stream = previous_stream

    @contextlib.contextmanager
    def graph(
        cuda_graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        card.wait("before a capture")
        card.graph = cuda_graph
        try:
            yield
        finally:
            card.graph = None

    return {
        "synchronize": lambda device=None: card.wait("synchronize"),
        "Stream": functools.partial(CardStream, card),
        "Event": functools.partial(CardEvent, card),
        "stream": stream,
        "current_stream": lambda device=None: card.stream,
        "default_stream": _constant(card.stream),
        "graph_pool_handle": _constant((0, 0)),
        "CUDAGraph": functools.partial(Graph, card),
        "graph": graph,
        "is_current_stream_capturing": lambda: card.graph is not None,
    }


class CardStream(Stream):
    """A stream of the card, with the methods of torch.cuda.Stream."""

    def __init__(self, card: Card, device: Any = None, priority: int = 0):
        super().__init__(card.host)
        self.card = card

    def record_event(self, event: "CardEvent | None" = None) -> "CardEvent":
        event = event or CardEvent(self.card)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.card.wait("a stream", self.done)

    def query(self) -> bool:
        return True


class CardEvent(Event):
    """An event of the card, with the methods of torch.cuda.Event.

    Its time is computed from the kernels that were counted before it was recorded: it is the time in which their bytes
    are moved at BANDWIDTH.
    """

    def __init__(self, card: Card, enable_timing: bool = False, **_: Any):
        super().__init__()
        self.card = card
        self.milliseconds = 0.0  # since the card's counts began

    def record(self, stream: Stream | None = None) -> None:
        recorded_stream = stream or self.card.stream
        self.done = dict(recorded_stream.done)
        counts = self.card.counts
        self.milliseconds = 1000 * (counts.read + counts.written) / BANDWIDTH

    def wait(self, stream: Stream | None = None) -> None:
        waiting_stream = stream or self.card.stream
        waiting_stream.wait_event(self)

    def synchronize(self) -> None:
        self.card.wait("an event", self.done)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: "CardEvent") -> float:
        """Returns the milliseconds from this event to another."""
        return end_event.milliseconds - self.milliseconds


class Graph:
    """A captured graph: calls of operators, which a replay repeats on the same memory, and the costs of its kernels."""

    def __init__(self, card: Card):
        self.card = card
        self.calls: list[tuple[Callable, tuple, dict, list[Tensor]]] = []  # function, args, kwargs, captured results
        self.kernels: list[tuple[str, int, int, int]] = []  # the arguments of Counts.kernel

    def add(self, function: Callable, args: tuple, kwargs: dict, results: list[Tensor]) -> None:
        """Records a call of an operator, and the tensors that it returned during the capture."""
        self.calls.append((function, args, kwargs, results))

    def replay(self) -> None:
        """Repeats all calls, and puts their results into the tensors of the capture."""
        self.card.counts.launches += 1
        for kernel in self.kernels:
            self.card.counts.kernel(*kernel)
        used_tensors = []
        with torch.no_grad(), _disable_current_modes():
            for function, args, kwargs, captured_results in self.calls:
                new_results = tensors_in(function(*args, **kwargs))
                for captured, new in zip(captured_results, new_results, strict=True):
                    if captured is not new:  # they are the same tensor if the operator works in place
                        captured.copy_(new)
                used_tensors += [*tensors_in((args, kwargs)), *captured_results]
        self.card.order(used_tensors, used_tensors)
