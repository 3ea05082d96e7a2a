"""The ranks of a run, that is, the processes that torchrun has started: how they divide work and exchange data.

Every rank holds the whole batch and the whole state of the run. Only the passes of the model are divided; their
gradients are summed. All else, such as token counts and advantages, every rank computes for the whole batch.

The one rank of a run in one process is `ALONE`: it divides nothing and imports no torch.distributed.
"""

import _thread
import contextlib
import faulthandler
import io
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from r3lite.core.bars import BRIEF, TimedLines
from r3lite.core.errors import R3LiteError, explained
from r3lite.core.exit_status import Terminated
from r3lite.core.processes import World

T = TypeVar("T")
BEAT = 1.0  # seconds between a rank's signs of life
SILENCE = 18  # beats without a sign after which a rank counts as dead, once the first step has begun
GRACE = 8  # seconds that a rank has for saving and ending when another rank is gone; after them it is killed
# First words of the texts by which a rank gives a sign.
ALIVE = "alive"
OVER = "over"  # the rank has ended as planned
GONE = "gone"  # the rank has failed; the reason follows
# The time limit of operations between ranks. It is long, as a rank may wait for another's rollouts; a dead rank is
# noticed by its missing signs.
GROUP_TIMEOUT = timedelta(days=30)
GO_ON = "See its own message; without one, it was killed or its machine is down. Continue with --resume auto."


class RankLost(R3LiteError):
    """Another process of the run has ended, so that this one cannot go on."""


def shares(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Divides rows among `size` ranks by their `lengths`, in tokens; returns the sorted indices of each rank's rows.

    The rows are dealt from the longest to the shortest, each to the rank that has the fewest tokens so far.
    """
    rows_by_rank: list[list[int]] = [[] for _ in range(size)]
    tokens = [0] * size
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        rank = min(range(size), key=tokens.__getitem__)
        rows_by_rank[rank].append(row)
        tokens[rank] += lengths[row]
    return [sorted(rows) for rows in rows_by_rank]


class Ranks:
    """The ranks of a run, from the point of view of one of them. In this class it is the only rank, see `Group`.

    `gather`, `from_first`, `any`, `sum_`, `sum_gradients` and `require_same` wait until all ranks call them.
    """

    rank = 0
    size = 1

    @property
    def first(self) -> bool:
        """True for the rank that writes files and asks a judge."""
        return self.rank == 0

    def rows_of_rank(self, lengths: Sequence[int]) -> list[int]:
        """Returns the sorted indices of the rows on which this rank runs the model; `lengths`: the tokens of each."""
        if self.size == 1:
            return list(range(len(lengths)))
        return shares(lengths, self.size)[self.rank]

    def with_progress(self, items: Sequence[T], name: str, unit: str) -> Iterator[T]:
        """Yields `items`, those of this rank. In long work the first rank shows how many are done, see bars.py."""
        if not self.first:
            yield from items
            return
        with tqdm(total=len(items), desc=name, unit=unit, **BRIEF) as bar:
            lines = TimedLines(bar, name, unit)
            for item in items:
                yield item
                lines.update()

    def begin_step(self, name: str) -> None:
        """Seeds each rank's dropout from the step's name and the rank. Does nothing in a run of one process."""

    def gather(self, value: T) -> list[T]:
        """Returns the values that the ranks pass, by rank; if there are several ranks, tensors are in host memory."""
        return [value]

    def from_first(self, make: Callable[[], T]) -> T:
        """Returns, on all ranks, the result of `make`, which only the first rank calls."""
        return make()

    def any(self, flag: bool) -> bool:
        """Returns True if any rank passes True."""
        return flag

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replaces a tensor by its sum over the ranks, which has the same bits on all of them; returns it."""
        return tensor

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replaces gradients by their sums over the ranks, in one message. A gradient that no rank has stays None."""

    def require_same(self, facts: dict[str, Any]) -> None:
        """Raises R3LiteError on all ranks if a fact is not the same on all of them."""
        facts_by_rank = self.gather(facts)
        differences = []
        for name, value in facts_by_rank[0].items():
            for rank, rank_facts in enumerate(facts_by_rank):
                if rank_facts.get(name) != value:
                    differences.append(f"{name} (rank 0: {value}, rank {rank}: {rank_facts.get(name)})")
        if differences:
            remedy = "Start torchrun with the same arguments, r3lite version and files on all machines."
            raise R3LiteError(
                f"the processes of this run differ in {'; '.join(differences)}", remedy, code="processes-differ"
            )


ALONE = Ranks()


class Group(Ranks):
    """Several ranks, over torch.distributed: gloo in host memory, NCCL between CUDA cards."""

    def __init__(self, world: World, device: str):
        """Joins the other ranks. If `device`, the value of --device, means a card, takes card LOCAL_RANK.

        Raises R3LiteError if there is no such card.
        """
        import torch.distributed as dist

        self.rank = world.rank
        self.size = world.size
        self.dist = dist
        backend = "gloo"
        if device in ("auto", "cuda") and torch.cuda.is_available():
            _take_card(world.local_rank)
            if dist.is_nccl_available():
                backend = "cpu:gloo,cuda:nccl"
        self.on_cards = "nccl" in backend  # whether tensors on cards are summed there, not copied to the host first
        self.lost = ""  # why this rank cannot go on; "": it can
        self.stepping = False  # whether the first step has begun
        self._ending = threading.Event()  # set when this rank leaves, so that its watch ends
        # One connection is for `_watch`, the other for the group: a connection serves one thread at a time, and
        # `_watch` must not wait for the group. The prefix is new after a restart, as the store may still have the
        # addresses of processes that have ended.
        prefix = f"r3lite/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        self.store = _new_store(prefix)
        group_store = _new_store(prefix)
        self._keys = [f"rank {rank}" for rank in range(self.size)]
        self.store.set(self._keys[self.rank], ALIVE)
        with explained(
            RuntimeError, "the processes of this run cannot connect to each other", GO_ON, code="processes-unconnected"
        ):
            dist.init_process_group(
                backend,
                store=group_store,
                rank=self.rank,
                world_size=self.size,
                timeout=GROUP_TIMEOUT,
            )
        threading.Thread(target=self._watch, daemon=True).start()

    def begin_step(self, name: str) -> None:
        self.stepping = True
        torch.manual_seed(random.Random(f"{name}/{self.rank}").getrandbits(63))

    def gather(self, value: T) -> list[T]:
        data = _to_bytes(value)
        # The sizes come first, as all_gather needs parts of one size. Its results go into the tensors of these lists.
        sizes = list(torch.zeros(self.size, 1, dtype=torch.long))
        self._wait(self.dist.all_gather(sizes, torch.tensor([len(data)]), async_op=True))
        largest = max(map(int, sizes))
        padding = torch.zeros(largest - len(data), dtype=torch.uint8)
        parts = list(torch.zeros(self.size, largest, dtype=torch.uint8))
        self._wait(self.dist.all_gather(parts, torch.cat([data, padding]), async_op=True))
        return [_from_bytes(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]

    def from_first(self, make: Callable[[], T]) -> T:
        if self.first:
            value = make()
            data = _to_bytes(value)
            self._wait(self.dist.broadcast(torch.tensor([len(data)]), 0, async_op=True))
            self._wait(self.dist.broadcast(data, 0, async_op=True))
            return value
        size = torch.zeros(1, dtype=torch.long)
        self._wait(self.dist.broadcast(size, 0, async_op=True))
        data = torch.zeros(int(size), dtype=torch.uint8)
        self._wait(self.dist.broadcast(data, 0, async_op=True))
        return _from_bytes(data)

    def any(self, flag: bool) -> bool:
        return bool(self.sum_(torch.tensor([int(flag)])))

    def sum_(self, tensor: Tensor) -> Tensor:
        if tensor.is_cpu or (tensor.is_cuda and self.on_cards):
            self._wait(self.dist.all_reduce(tensor, async_op=True))
            return tensor
        on_host = tensor.cpu()
        self._wait(self.dist.all_reduce(on_host, async_op=True))
        return tensor.copy_(on_host)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        parameters = list(parameters)
        # The message begins with a number for each parameter: 1 if this rank has its gradient, else 0.
        has_gradient = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
        message = [has_gradient.to(parameters[0].device)]
        for parameter in parameters:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            message.append(grad.flatten().float())
        summed = self.sum_(torch.cat(message))
        rank_counts, *sums = summed.split([len(part) for part in message])
        for parameter, count, total in zip(parameters, rank_counts.tolist(), sums, strict=True):
            parameter.grad = None
            if count:
                parameter.grad = total.view_as(parameter).to(parameter.dtype)

    def _wait(self, work: Any) -> None:
        """Waits for `work` in a Python loop: a wait in C++ would not end at a signal or when another rank is lost."""
        while not work.is_completed():
            self._raise_if_lost()
            time.sleep(5e-4)
        try:
            work.wait()
        except RuntimeError as error:  # a connection was closed: `_watch` may soon learn the other rank's reason
            time.sleep(2 * BEAT)
            self._raise_if_lost()
            raise RankLost(
                f"another process of this run has ended ({str(error).splitlines()[0]})", GO_ON, code="process-lost"
            ) from error

    def _raise_if_lost(self) -> None:
        if self.lost:
            raise RankLost(self.lost, GO_ON, code="process-lost")

    def _watch(self) -> None:
        """Gives signs of life, and ends this process when another one gives none or says that it has failed.

        Runs in a thread of its own.
        """
        previous_signs = [""] * self.size
        silent_beats = [0] * self.size  # for each rank, the beats since its sign last changed
        beat = 0
        while not (self.lost or self._ending.wait(BEAT)):
            beat += 1
            try:
                self.store.set(self._keys[self.rank], f"{ALIVE} {beat}")
                signs = [sign.decode() for sign in self.store.multi_get(self._keys)]
            except RuntimeError:
                self.lost = "" if self._ending.is_set() else "rank 0, which connects the others, has ended"
                signs = []
            for rank, sign in enumerate(signs):
                if sign == previous_signs[rank] and sign != OVER:
                    silent_beats[rank] += 1
                else:
                    silent_beats[rank] = 0
                if sign.startswith(GONE):
                    self.lost = f"rank {rank} has ended: {sign[len(GONE) :].strip()}"
                elif silent_beats[rank] > SILENCE and self.stepping:
                    self.lost = f"rank {rank} has not responded for {SILENCE * BEAT:.0f} s"
            previous_signs = signs
        if self.lost:
            _end_within(GRACE)
            _thread.interrupt_main(signal.SIGTERM)

    def end(self, reason: str | None) -> None:
        """Leaves the other ranks. `reason`: why this rank has failed; None: it has ended as planned.

        If it has failed, the others end, too, and tell the reason.
        """
        if reason is None:
            self.gather(None)  # the first rank, which connects the others, may still be writing
        self._ending.set()
        with contextlib.suppress(RuntimeError):  # no other rank is left
            self.store.set(self._keys[self.rank], OVER if reason is None else f"{GONE} {reason}")
        if reason is None:
            self.dist.destroy_process_group()
        else:
            _end_within(GRACE)  # else the CUDA driver may keep this process for ever, waiting for another rank


@contextlib.contextmanager
def join_ranks(
    world: World,
    device: str,
    facts: dict[str, Any],
) -> Iterator[Ranks]:
    """Yields the ranks of the run to a `with` block; raises R3LiteError if they do not agree on `facts`."""
    if world.size == 1:
        yield ALONE
        return
    group = Group(world, device)
    try:
        group.require_same(facts)
        yield group
    except BaseException as error:
        reason = f"{type(error).__name__} {error}".strip()
        if isinstance(error, R3LiteError):
            reason = error.cause
        group.end(reason)
        if group.lost and isinstance(error, Terminated):
            raise RankLost(group.lost, GO_ON, code="process-lost") from None
        raise
    group.end(None)


def _take_card(local_rank: int) -> None:
    """Makes `cuda` mean the card of this rank."""
    count = torch.cuda.device_count()
    if local_rank >= count:
        cause = f"torchrun has started process {local_rank + 1} on this machine, but PyTorch finds {count} CUDA GPUs"
        raise R3LiteError(cause, f"Pass --nproc-per-node {count}, or --device cpu.", code="too-few-gpus")
    torch.cuda.set_device(local_rank)


def _new_store(prefix: str) -> Any:
    """Returns a connection to the store of the run; `prefix` is put before all keys."""
    import torch.distributed as dist

    store, _, _ = next(dist.rendezvous("env://"))
    return dist.PrefixStore(prefix, store)


def _end_within(seconds: float) -> None:
    """Kills this process after `seconds`, unless it ends before.

    faulthandler does this from a thread in C, which works even if the process hangs; the traceback is thrown away.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=open(os.devnull, "wb"))  # noqa: SIM115


def _to_bytes(value: Any) -> Tensor:
    """Returns any value as bytes [n]."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _from_bytes(data: Tensor) -> Any:
    """Returns the value of which `_to_bytes` made the bytes, with its tensors in host memory.

    Loading a pickle is safe here, as the bytes come from ranks of this run only.
    """
    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=False)
