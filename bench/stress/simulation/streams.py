"""Streams and events of the simulated device, and the check that streams wait for each other where they must.

The simulated device runs each piece of work as soon as it is queued, so results are right even if a wait is missing. On
a real card the result would then depend on the speed of the streams. To find missing waits, every stream counts the
pieces of work that are queued on it, and records how many pieces of every other stream are finished before its own next
piece. The host counts as a stream, too.

Unordered is raised if work uses memory that another stream may still be writing, if work writes memory that another
stream may still be reading, and if memory is freed that another stream may still be using.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

# A piece of work: the stream on which it is queued, and its number in that stream. The first piece has the number 1.
Piece = tuple["Stream", int]


class Unordered(RuntimeError):
    """On a real card, the result would depend on which of two streams is faster."""


class Stream:
    """A queue of work. The host, whose own `host` is itself, is one, too."""

    def __init__(self, host: "Stream | None" = None):
        self.host = host or self
        self.ended = False  # used for the host only: all work of all streams is finished
        # By stream: the number of its pieces that are finished before the next piece of this stream begins.
        self.done: dict[Stream, int] = {self: 0}

    def wait_stream(self, stream: "Stream") -> None:
        """Lets the next piece of this stream begin after all work that is now queued on the other stream."""
        self.learn(stream.done)

    def wait_event(self, event: "Event") -> None:
        """Lets the next piece of this stream begin after all work that was queued before the event."""
        self.learn(event.done)

    def learn(self, done: "dict[Stream, int]") -> None:
        """Records that at least `done[stream]` pieces of each stream are finished before this stream's next piece."""
        for stream, count in done.items():
            self.done[stream] = max(count, self.done.get(stream, 0))

    def follows(self, piece: Piece) -> bool:
        """Returns whether a piece of work of any stream is finished before the next piece of this stream begins."""
        stream, number = piece
        return self.done.get(stream, 0) >= number or stream.host.ended

    def queue(self, reads: "list[Use]", writes: "list[Use]") -> None:
        """Queues a piece of work that uses memory; raises Unordered if it should first wait for another stream."""
        self.done[self] += 1
        piece = (self, self.done[self])
        for use in (*reads, *writes):
            if use.writer and not self.follows(use.writer):
                raise Unordered("memory is used by one stream that another stream may still be writing")
        for use in writes:
            if not all(map(self.follows, use.readers.items())):
                raise Unordered("memory is written by one stream that another stream may still be reading")
            use.writer = piece
            use.readers.clear()
        for use in reads:
            use.readers[self] = self.done[self]


class Event:
    """A position in the queue of a stream."""

    def __init__(self):
        # By stream: the number of its pieces that are finished at this position.
        self.done: dict[Stream, int] = {}


@dataclass
class Use:
    """The pieces of work that last used a block of memory, on the device or pinned on the host."""

    # Of device memory: the stream that allocated it. The allocator reuses freed memory for tensors of the same stream.
    home: Stream | None = None
    writer: Piece | None = None  # the last piece that wrote the memory
    readers: dict[Stream, int] = field(default_factory=dict)  # by stream: number of its last read since `writer`
    recorded: set[Stream] = field(default_factory=set)  # by record_stream: memory is reused only after their work

    def free(self) -> None:
        """Raises Unordered if a stream may still use this memory when the allocator gives it to the next tensor."""
        pieces = list(self.readers.items())
        if self.writer:
            pieces.append(self.writer)
        if self.home and not all(piece[0] in self.recorded or self.home.follows(piece) for piece in pieces):
            raise Unordered("memory is given back while another stream may still use it: record_stream is missing")


def use_of(tensor: Tensor) -> Use | None:
    """Returns the record of who used a tensor's memory; None for memory of the host that is not pinned."""
    return getattr(tensor.untyped_storage(), "use", None)


def uses_of(tensors: Iterable[Tensor]) -> list[Use]:
    """Returns the records of the tensors whose memory has one: memory of the device and pinned memory."""
    return [use for tensor in tensors if (use := use_of(tensor)) is not None]
