"""The processes of a run, its ranks, that torchrun has started: how work is divided and what they tell each other.

Every rank holds the whole batch and the whole state of the run; only passes of the model are divided, and gradients
summed. So a count of tokens, a group's statistics, an advantage or a decision is that of the whole batch on every rank.
A run in one process is `ALONE`, which divides nothing and imports no torch.distributed.
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

from r3lite.core.errors import R3LiteError, explained
from r3lite.core.exit_status import Terminated
from r3lite.core.processes import World

T = TypeVar("T")
BEAT = 1.0  # seconds between a rank's signs of life
SILENCE = 18  # beats without one, after which a rank counts as dead; the first steps must have begun
GRACE = 8  # seconds in which a rank saves and ends when another one is gone; then it is ended
ALIVE, OVER, GONE = "alive", "over", "gone"
LATER = timedelta(days=30)  # a rank may wait long for another's rollouts: who is dead, the signs of life tell
GO_ON = "See its own message; without one, it was killed or its machine is down. Continue with --resume auto."


class RankLost(R3LiteError):
    """Another process of the run has ended, so that this one cannot go on."""


def shares(lengths: Sequence[int], size: int) -> list[list[int]]:
    """The rows of each of `size` ranks, by the rows' tokens: the longest first, each to the rank with fewest so far."""
    made: list[list[int]] = [[] for _ in range(size)]
    tokens = [0] * size
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        least = min(range(size), key=tokens.__getitem__)
        made[least].append(row)
        tokens[least] += lengths[row]
    return [sorted(rows) for rows in made]


class Ranks:
    """The ranks of a run, as one of them sees it: here the only one. All ranks call every method but `share`."""

    rank, size = 0, 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and asks a judge."""
        return self.rank == 0

    def share(self, lengths: Sequence[int]) -> list[int]:
        """The rows that this rank runs the model on, given the tokens of each row; all of them if it is alone."""
        return list(range(len(lengths))) if self.size == 1 else shares(lengths, self.size)[self.rank]

    def begin_step(self, name: str) -> None:
        """Gives each rank a dropout of its own, which follows from the step's name. One process goes on as before."""

    def gather(self, mine: T) -> list[T]:
        """What all ranks have, in their order; tensors in host memory."""
        return [mine]

    def shared(self, make: Callable[[], T]) -> T:
        """What `make` returns on the first rank, which alone calls it."""
        return make()

    def any(self, flag: bool) -> bool:
        """Whether any rank has the flag."""
        return flag

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replaces a tensor by its sum over the ranks, which has the same bits on all of them; returns it."""
        return tensor

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replaces gradients by their sums over the ranks, in one message; a parameter without any stays without."""

    def require_same(self, facts: dict[str, Any]) -> None:
        """Raises R3LiteError on all ranks if a fact is not the same on all of them."""
        found = self.gather(facts)
        wrong = [
            f"{name} (rank 0: {value}, rank {rank}: {other.get(name)})"
            for name, value in found[0].items()
            for rank, other in enumerate(found)
            if other.get(name) != value
        ]
        if wrong:
            remedy = "Start torchrun with the same arguments, r3lite version and files on all machines."
            raise R3LiteError(
                f"the processes of this run differ in {'; '.join(wrong)}", remedy, code="processes-differ"
            )


ALONE = Ranks()


class Group(Ranks):
    """Several ranks, over torch.distributed: gloo in host memory, NCCL between CUDA cards."""

    def __init__(self, world: World, device: str):
        """Joins the others. Takes card LOCAL_RANK if `device`, that of --device, is one; R3LiteError without it."""
        import torch.distributed as dist

        self.rank, self.size, self.dist, backend = world.rank, world.size, dist, "gloo"
        if device in ("auto", "cuda") and torch.cuda.is_available():
            _take_card(world.local_rank)
            backend = "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else backend
        self.on_cards = "nccl" in backend
        self.lost, self.stepping, self._ending = "", False, threading.Event()
        # A store has one user at a time, and the watch must not wait for the group. After a restart it may still hold
        # the addresses of processes that have ended.
        start = f"r3lite/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        self.store, own = (dist.PrefixStore(start, next(dist.rendezvous("env://"))[0]) for _ in range(2))
        self._keys = [f"rank {rank}" for rank in range(self.size)]
        self.store.set(self._keys[self.rank], ALIVE)
        with explained(
            RuntimeError, "the processes of this run cannot connect to each other", GO_ON, code="processes-unconnected"
        ):
            dist.init_process_group(backend, store=own, rank=self.rank, world_size=self.size, timeout=LATER)
        threading.Thread(target=self._watch, daemon=True).start()

    def begin_step(self, name: str) -> None:
        self.stepping = True
        torch.manual_seed(random.Random(f"{name}/{self.rank}").getrandbits(63))

    def gather(self, mine: T) -> list[T]:
        data = _packed(mine)
        sizes = list(torch.zeros(self.size, 1, dtype=torch.long))
        self._wait(self.dist.all_gather(sizes, torch.tensor([len(data)]), async_op=True))
        parts = list(torch.zeros(self.size, max(map(int, sizes)), dtype=torch.uint8))
        padded = torch.cat([data, parts[0].new_zeros(len(parts[0]) - len(data))])
        self._wait(self.dist.all_gather(parts, padded, async_op=True))
        return [_unpacked(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]

    def shared(self, make: Callable[[], T]) -> T:
        made = make() if self.first else None
        data = _packed(made) if self.first else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([len(data)])
        self._wait(self.dist.broadcast(size, 0, async_op=True))
        data = data if self.first else data.new_zeros(int(size))
        self._wait(self.dist.broadcast(data, 0, async_op=True))
        return made if self.first else _unpacked(data)

    def any(self, flag: bool) -> bool:
        return bool(self.sum_(torch.tensor([int(flag)])))

    def sum_(self, tensor: Tensor) -> Tensor:
        there = tensor if tensor.is_cpu or (tensor.is_cuda and self.on_cards) else tensor.cpu()
        self._wait(self.dist.all_reduce(there, async_op=True))
        return tensor if there is tensor else tensor.copy_(there)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        some = list(parameters)
        there = torch.tensor([float(p.grad is not None) for p in some]).to(some[0].device)
        flat = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in some]
        summed = self.sum_(torch.cat([there, *(x.float() for x in flat)]))
        there, *sums = summed.split([len(some), *(p.numel() for p in some)])
        for p, has, total in zip(some, there.tolist(), sums, strict=True):
            p.grad = total.view_as(p).to(p.dtype) if has else None

    def _wait(self, work: Any) -> None:
        """Waits here and not in C++, where neither a signal nor a rank that is gone would end it."""
        while not work.is_completed():
            self._raise_if_lost()
            time.sleep(5e-4)
        try:
            work.wait()
        except RuntimeError as error:  # a connection was closed: its owner may have said why
            time.sleep(2 * BEAT)
            self._raise_if_lost()
            raise RankLost(
                f"another process of this run has ended ({str(error).splitlines()[0]})", GO_ON, code="process-lost"
            ) from error

    def _raise_if_lost(self) -> None:
        if self.lost:
            raise RankLost(self.lost, GO_ON, code="process-lost")

    def _watch(self) -> None:
        """Gives signs of life, and ends this process when another one gives none or says that it has ended."""
        seen, silent, count = [""] * self.size, [0] * self.size, 0
        while not (self.lost or self._ending.wait(BEAT)):
            count += 1
            try:
                self.store.set(self._keys[self.rank], f"{ALIVE} {count}")
                signs = [sign.decode() for sign in self.store.multi_get(self._keys)]
            except RuntimeError:
                self.lost = "" if self._ending.is_set() else "rank 0, which connects the others, has ended"
                signs = []
            for rank, sign in enumerate(signs):
                silent[rank] = silent[rank] + 1 if sign == seen[rank] and sign != OVER else 0
                if sign.startswith(GONE):
                    self.lost = f"rank {rank} has ended: {sign[len(GONE) :].strip()}"
                elif silent[rank] > SILENCE and self.stepping:
                    self.lost = f"rank {rank} has not responded for {SILENCE * BEAT:.0f} s"
            seen = signs
        if self.lost:
            _end_within(GRACE)
            _thread.interrupt_main(signal.SIGTERM)

    def end(self, reason: str | None) -> None:
        """Leaves the others; with a reason they end, too, and tell it."""
        if reason is None:
            self.gather(None)  # the first rank, which connects the others, may still be writing
        self._ending.set()
        with contextlib.suppress(RuntimeError):  # no other rank is left
            self.store.set(self._keys[self.rank], OVER if reason is None else f"{GONE} {reason}")
        if reason is None:
            self.dist.destroy_process_group()
        else:
            _end_within(GRACE)  # a driver may wait for ever for the rank that is gone


@contextlib.contextmanager
def joined(world: World, device: str, facts: dict[str, Any]) -> Iterator[Ranks]:
    """The ranks of this process's run, which must agree on `facts`."""
    if world.size == 1:
        yield ALONE
        return
    group = Group(world, device)
    try:
        group.require_same(facts)
        yield group
    except BaseException as error:
        group.end(error.cause if isinstance(error, R3LiteError) else f"{type(error).__name__} {error}".strip())
        if group.lost and isinstance(error, Terminated):
            raise RankLost(group.lost, GO_ON, code="process-lost") from None
        raise
    group.end(None)


def _take_card(local_rank: int) -> None:
    """Makes `cuda` mean the card of this rank."""
    if local_rank >= (count := torch.cuda.device_count()):
        cause = f"torchrun has started process {local_rank + 1} on this machine, but PyTorch finds {count} CUDA GPUs"
        raise R3LiteError(cause, f"Pass --nproc-per-node {count}, or --device cpu.", code="too-few-gpus")
    torch.cuda.set_device(local_rank)


def _end_within(seconds: float) -> None:
    """Ends this process after a while, from a thread that nothing holds up."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=open(os.devnull, "wb"))  # noqa: SIM115


def _packed(value: Any) -> Tensor:
    """Any value as bytes [N]."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _unpacked(data: Tensor) -> Any:
    """The inverse, with tensors in host memory. The data come from ranks of this run only."""
    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=False)
