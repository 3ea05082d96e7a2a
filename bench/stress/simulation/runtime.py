"""What of `torch` and `torch.cuda` a simulated device replaces while it is in use: see simulated_cuda.py."""

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

from bench.stress.simulation.operators import on_card, tensors_in
from bench.stress.simulation.streams import Event, Stream, use_of
from r3lite.devices import speed

Card = Any  # a SimulatedCuda, whose module imports this one
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BANDWIDTH = 192e9  # bytes per second, by which events tell the time
NAME, CAPABILITY, PROCESSORS = "simulated card", (7, 5), 14
BASE = torch._C.TensorBase
aten = torch.ops.aten


def is_cuda(device: Any) -> bool:
    """Whether this, as `to` and `device=` take it, names the device; a bare number does."""
    return device is not None and torch.device(device).type == "cuda"


def stand_ins(card: Card) -> Iterator[tuple[Any, str, Any]]:
    """Owner, name and what takes the name's place."""
    for make in (_of_tensors, _of_torch, _of_cuda):
        owner, found = make(card)
        for name, stand_in in found.items():
            yield owner, name, stand_in
    for name in ("dropout", "rms_norm"):  # one kernel on CUDA, several operators on a CPU
        yield F, name, _one_kernel(card, getattr(F, name))
    for owner in (torch, torch.amp, torch.amp.autocast_mode):
        yield owner, "autocast", _Autocast
    grouped = torch._C._group_tensors_by_device_and_dtype

    def by_label(lists: list, with_indices: bool = False) -> dict:
        """Optimizers take tensors in groups of one device; C++ does not see the label."""
        return {(g[0][0][0].device, dtype): g for (_, dtype), g in grouped(lists, with_indices).items()}

    yield torch._C, "_group_tensors_by_device_and_dtype", by_label
    yield torch.accelerator, "current_accelerator", _one(None)  # else optimizers of a CUDA build ask the driver
    yield speed, "measure", _no_speed


def _no_speed(*_: Any) -> None:
    raise RuntimeError("the card is simulated")


def _of_tensors(card: Card) -> tuple[type, dict[str, Any]]:
    """Methods of tensors that tell, or change, where they are."""

    def to(tensor: Tensor, *args, **kwargs) -> Tensor:
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        copy = kwargs.pop("copy", False)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        here = on_card(tensor)
        if not here and not is_cuda(device):
            return BASE.to(tensor, *args, copy=copy, **kwargs)
        there, dtype = here if device is None else is_cuda(device), dtype or tensor.dtype
        if here == there and dtype == tensor.dtype and not copy:
            return tensor
        goal = CUDA if there else device
        return aten._to_copy(tensor, dtype=dtype, device=goal, non_blocking=non_blocking)

    def numpy(tensor: Tensor, *, force: bool = False):
        if on_card(tensor) and not force:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory."
            )
        return BASE.numpy(_on_host(tensor), force=force)

    def _on_host(tensor: Tensor) -> Tensor:
        card.read_by_host(tensor)
        return tensor.cpu()

    def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor)

    return Tensor, {
        "device": property(lambda tensor: CUDA if on_card(tensor) else BASE.device.__get__(tensor)),
        "is_cuda": property(on_card),
        "get_device": lambda tensor: 0 if on_card(tensor) else -1,
        "to": to,
        "cuda": lambda tensor, device=None, non_blocking=False: tensor.to(CUDA, non_blocking=non_blocking),
        "cpu": lambda tensor: tensor.to(CPU),
        "numpy": numpy,
        "__array__": lambda tensor, dtype=None, copy=None: _array(tensor.numpy(), dtype),
        "tolist": lambda tensor: BASE.tolist(_on_host(tensor)),
        "pin_memory": pin_memory,
        "is_pinned": lambda tensor, device=None: use_of(tensor) is not None and not on_card(tensor),
        "record_stream": lambda tensor, stream: use_of(tensor).recorded.add(stream),
    }


def _array(array: Any, dtype: Any) -> Any:
    return array if dtype is None else array.astype(dtype)


def _of_torch(card: Card) -> tuple[Any, dict[str, Any]]:
    """Functions of `torch` that make tensors of the host's numbers, and those that ask what is on."""
    make, convert = torch.tensor, torch.as_tensor
    enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype

    def tensor(
        data: Any, *, device: Any = None, requires_grad: bool = False, pin_memory: bool = False, **more
    ) -> Tensor:
        made = make(data, **more)
        made = made.pin_memory() if pin_memory else made
        return (made if device is None else made.to(device)).requires_grad_(requires_grad)

    def as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        made = convert(data, dtype=dtype) if not isinstance(data, Tensor) else data
        return made.to(device or made.device, dtype or made.dtype)

    class Generator(torch.Generator):
        """A generator of the host's that is taken for the device's if it was made for it."""

        def __new__(cls, device: Any = "cpu") -> "Generator":
            made = super().__new__(cls, "cpu")
            made.place = CUDA if is_cuda(device) else CPU
            if made.place == CUDA:
                card.generators.add(made._cdata)
                weakref.finalize(made, card.generators.discard, made._cdata)
            return made

        device = property(lambda self: self.place)

    return torch, {
        "tensor": tensor,
        "as_tensor": as_tensor,
        "Generator": Generator,
        "is_autocast_enabled": lambda device_type="cuda": enabled(_host_type(device_type)),
        "get_autocast_dtype": lambda device_type="cuda": dtype_of(_host_type(device_type)),
        **{name: _without_autocast(getattr(torch, name)) for name in ("cat", "stack")},
    }


def _without_autocast(function: Callable) -> Callable:
    """Autocast has these functions take one dtype on a CPU, and leaves them alone on CUDA."""

    @functools.wraps(function)
    def run(tensors: Any, *args, **kwargs) -> Tensor:
        off = torch.autocast("cpu", enabled=False) if any(map(on_card, tensors)) else contextlib.nullcontext()
        with off:
            return function(tensors, *args, **kwargs)

    return run


def _host_type(device_type: str) -> str:
    return "cpu" if device_type == "cuda" else device_type


class _Autocast(torch.autocast):
    """Autocast of the CPU for tensors of the device."""

    def __init__(self, device_type: str, dtype: torch.dtype | None = None, *args, **kwargs):
        dtype = torch.float16 if device_type == "cuda" and dtype is None else dtype
        super().__init__(_host_type(device_type), dtype, *args, **kwargs)


def _one_kernel(card: Card, function: Callable) -> Callable:
    @functools.wraps(function)
    def run(x: Tensor, *args, **kwargs) -> Tensor:
        if not on_card(x):
            return function(x, *args, **kwargs)
        with card.one_kernel(function.__name__, (x, args, kwargs)) as results:
            results.append(function(x, *args, **kwargs))
        return results[0]

    return run


def _one(value: Any) -> Callable:
    return lambda *_, **__: value


def _of_cuda(card: Card) -> tuple[Any, dict[str, Any]]:
    """Functions of `torch.cuda`."""
    return torch.cuda, _facts(card) | _memory(card) | _random_numbers(card) | _streams_and_graphs(card)


def _facts(card: Card) -> dict[str, Any]:
    """What the card is."""

    def initialize(*_: Any) -> None:
        card.initialized = True

    properties = SimpleNamespace(
        name=NAME, major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=card.total, multi_processor_count=PROCESSORS
    )
    return {
        "is_available": _one(True),
        "device_count": _one(1),
        "current_device": _one(0),
        "get_device_name": _one(NAME),
        "get_device_capability": _one(CAPABILITY),
        "get_device_properties": _one(properties),
        "is_bf16_supported": lambda including_emulation=True: card.bf16 or including_emulation,
        "is_initialized": lambda: card.initialized,
        "init": initialize,
        "_lazy_init": initialize,
        "device": lambda _: contextlib.nullcontext(),
    }


def _memory(card: Card) -> dict[str, Any]:
    """How much of the card's memory there is, is used, and may be used."""

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        card.initialized = True
        return card.free - card.memory.live, card.total

    def reset_peak(device: Any = None) -> None:
        card.memory.peak = card.memory.live

    def set_share(fraction: float, device: Any = None) -> None:
        card.share = fraction

    return {
        "empty_cache": _one(None),
        "mem_get_info": mem_get_info,
        "set_per_process_memory_fraction": set_share,
        **{name: lambda device=None: card.memory.live for name in ("memory_allocated", "memory_reserved")},
        **{name: lambda device=None: card.memory.peak for name in ("max_memory_allocated", "max_memory_reserved")},
        "reset_peak_memory_stats": reset_peak,
    }


def _random_numbers(card: Card) -> dict[str, Any]:
    """The card's generator, seeded, saved and restored."""
    return {
        "manual_seed": card.generator.manual_seed,
        "manual_seed_all": card.generator.manual_seed,
        "get_rng_state": lambda device=None: card.generator.get_state(),
        "get_rng_state_all": lambda: [card.generator.get_state()],
        "set_rng_state": lambda state, device=None: card.generator.set_state(state),
        "set_rng_state_all": lambda states: card.generator.set_state(states[0]),
    }


def _streams_and_graphs(card: Card) -> dict[str, Any]:
    """Streams, events and graphs, and waiting for them."""

    @contextlib.contextmanager
    def stream(of: Stream) -> Iterator[None]:
        before, card.stream = card.stream, of
        try:
            yield
        finally:
            card.stream = before

    @contextlib.contextmanager
    def graph(made: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
        card.wait("before a capture")
        card.graph = made
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
        "default_stream": _one(card.stream),
        "graph_pool_handle": _one((0, 0)),
        "CUDAGraph": functools.partial(Graph, card),
        "graph": graph,
        "is_current_stream_capturing": lambda: card.graph is not None,
    }


class CardStream(Stream):
    """A stream as torch.cuda.Stream makes it."""

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
    """Its time is what the bytes moved until then take at BANDWIDTH."""

    def __init__(self, card: Card, enable_timing: bool = False, **_: Any):
        super().__init__()
        self.card, self.milliseconds = card, 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.done = dict((stream or self.card.stream).done)
        self.milliseconds = 1000 * (self.card.counts.read + self.card.counts.written) / BANDWIDTH

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.card.stream).wait_event(self)

    def synchronize(self) -> None:
        self.card.wait("an event", self.done)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "CardEvent") -> float:
        return other.milliseconds - self.milliseconds


class Graph:
    """A captured graph: the operators that ran, to be done again on the same memory, and what their kernels cost."""

    def __init__(self, card: Card):
        self.card = card
        self.work: list[tuple[Callable, tuple, dict, list[Tensor]]] = []  # with the results
        self.kernels: list[tuple[str, int, int, int]] = []  # as Counts.kernel takes them

    def add(self, function: Callable, args: tuple, kwargs: dict, results: list[Tensor]) -> None:
        self.work.append((function, args, kwargs, results))

    def replay(self) -> None:
        self.card.counts.launches += 1
        for kernel in self.kernels:
            self.card.counts.kernel(*kernel)
        with torch.no_grad(), _disable_current_modes():
            for function, args, kwargs, results in self.work:
                for old, new in zip(results, tensors_in(function(*args, **kwargs)), strict=True):
                    if old is not new:  # as it is if the operator works in place
                        old.copy_(new)
        used = [t for _, args, kwargs, results in self.work for t in (*tensors_in((args, kwargs)), *results)]
        self.card.order(used, used)
