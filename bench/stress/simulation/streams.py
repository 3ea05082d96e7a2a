"""Streams and events of the simulated device, and whether work on one comes after what it needs of another.

Nothing runs late here: work is done when it is queued, so results are right in any case. What would go wrong on a card
is found by counting: every stream, and the host, knows how much of every other stream's work is done before its own
next piece. Work that touches memory which another stream may still be writing or reading raises Unordered, and so does
memory that is given back while a stream may still use it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor


class Unordered(RuntimeError):
    """On a card, the result would depend on which of two streams is faster."""


class Stream:
    """A queue of work. The host is one, too."""

    def __init__(self, host: "Stream | None" = None):
        self.host = host or self
        self.ended = False  # of the host: everything is done, on all streams
        self.done: dict[Stream, int] = {self: 0}  # of each stream, how many pieces of work come before the next here

    def wait_stream(self, other: "Stream") -> None:
        self.learn(other.done)

    def wait_event(self, event: "Event") -> None:
        self.learn(event.done)

    def learn(self, done: "dict[Stream, int]") -> None:
        """What comes after this also comes after all that `done` counts."""
        for stream, count in done.items():
            self.done[stream] = max(count, self.done.get(stream, 0))

    def follows(self, work: "tuple[Stream, int]") -> bool:
        """Whether a piece of another stream's work, or of its own, is done before the next one here."""
        stream, count = work
        return self.done.get(stream, 0) >= count or stream.host.ended

    def work(self, reads: "list[Use]", writes: "list[Use]") -> None:
        """Queues a piece of work that touches this memory."""
        self.done[self] += 1
        for use in (*reads, *writes):
            if use.writer and not self.follows(use.writer):
                raise Unordered("memory is used by one stream that another stream may still be writing")
        for use in writes:
            if not all(map(self.follows, use.readers.items())):
                raise Unordered("memory is written by one stream that another stream may still be reading")
            use.writer = self, self.done[self]
            use.readers.clear()
        for use in reads:
            use.readers[self] = self.done[self]


class Event:
    """A place in a stream's queue."""

    def __init__(self):
        self.done: dict[Stream, int] = {}


@dataclass
class Use:
    """What is known of a piece of memory, of the device or pinned by the host: who wrote it last and read it since."""

    home: Stream | None = None  # for whose next tensors the allocator takes it when it is free; None: the host's
    writer: tuple[Stream, int] | None = None
    readers: dict[Stream, int] = field(default_factory=dict)
    recorded: set[Stream] = field(default_factory=set)  # the allocator asks these streams, too, before it reuses it

    def free(self) -> None:
        """Raises Unordered if the next tensor to get this memory could meet a stream that still uses it."""
        work = [*self.readers.items(), *([self.writer] if self.writer else [])]
        if self.home and not all(w[0] in self.recorded or self.home.follows(w) for w in work):
            raise Unordered("memory is given back while another stream may still use it: record_stream is missing")


def use_of(tensor: Tensor) -> Use | None:
    """What is known of a tensor's memory; None if it is the host's own and not pinned."""
    return getattr(tensor.untyped_storage(), "use", None)


def uses_of(tensors: Iterable[Tensor]) -> list[Use]:
    return [use for tensor in tensors if (use := use_of(tensor)) is not None]
