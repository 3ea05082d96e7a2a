"""Samples on other machines: rollout workers (`python -m r3lite.rollout_worker`), or vLLM (`vllm.py`).

Each request has several episodes. A server that does not answer, or answers wrongly, gets no more requests until the
next call; another server samples its episodes.
"""

import math
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from r3lite.core.episode import Question, Retrieve
from r3lite.core.errors import R3LiteError
from r3lite.core.grant import Grant, Memory
from r3lite.core.records import InvalidRecord, Record
from r3lite.core.terminal import printable
from r3lite.llm.http_client import Link, Unanswered, WrongReply
from r3lite.protocols.layout import Layout
from r3lite.rollout.sequence import Sequence
from r3lite.rollout.wire import (
    AdapterFiles,
    EpisodeLimits,
    Ticket,
    check_start,
    identity_of,
    sequence_from_json,
    tickets_to_json,
)

LARGEST = 512 << 20  # bytes of a reply
REMEDY = "Check that it runs, its address in --rollout-server and R3LITE_TOKEN; then continue with --resume auto."


@dataclass(frozen=True)
class WorkerVersion:
    """The reply of a rollout worker to GET /version."""

    adapter: str  # version of the adapter that it samples with
    dtype: str
    facts: dict[str, str]  # by name: what a trainer and its workers must have in common, such as the model


class RolloutWorker:
    """The client of a rollout worker. The worker retrieves by itself."""

    slots = 1  # requests at a time: the worker computes on all cores

    def __init__(
        self,
        link: Link,
        facts: dict[str, str],
        layout_of: Callable[[Sequence], Layout],
    ):
        self.link = link
        self.facts = facts
        self.layout_of = layout_of
        self.adapter_version = ""  # of the adapter that the worker has; empty if it has none

    def check(self) -> str:
        """Returns the server's address and dtype; raises R3LiteError if it would not sample as the trainer does."""

        def read(reply: Record) -> WorkerVersion:
            record = reply.record("facts")
            facts = {name: record.text(name, "none", blank=True) for name in self.facts}
            return WorkerVersion(reply.text("adapter", blank=True), reply.text("dtype"), facts)

        version = self.link.ask("/version", None, server="a worker of this version of r3lite", read=read)
        self.adapter_version = version.adapter
        differences = []
        for name, ours in self.facts.items():
            theirs = version.facts[name]
            if theirs != ours:
                differences.append(f"{name} is {theirs} (here {ours})")
        if differences:
            remedy = "Start the worker with the flags of this run, or give both the same --config."
            cause = f"the rollout worker {self.link.url} has other settings: {'; '.join(differences)}"
            raise R3LiteError(cause, remedy, code="worker-differs")
        return f"{self.link.url} (r3lite, {version.dtype})"

    def sample(
        self,
        tickets: list[Ticket],
        adapter: AdapterFiles,
        retrieve: Retrieve,
    ) -> list[Sequence]:
        """Returns the episodes of tickets, sampled with an adapter.

        Raises Unanswered or WrongReply if another server has to sample them.
        """

        def read(reply: Record) -> list[Sequence] | None:
            """Returns the episodes of a reply; None if the worker has other facts or another adapter."""
            if "differs" in reply:
                return None
            episodes = reply.records("episodes")
            if len(episodes) != len(tickets) or {e.text("adapter") for e in episodes} != {adapter.version}:
                raise InvalidRecord(
                    f"these are not {len(tickets)} episodes of the adapter {adapter.version}",
                    code="worker-episode-count",
                )
            pairs = zip(episodes, tickets, strict=True)
            return [self._sequence(episode, ticket) for episode, ticket in pairs]

        request = tickets_to_json(tickets)
        request |= {"identity": identity_of(self.facts), "adapter": adapter.version}
        for _ in range(2):  # the second time if the worker was restarted, and so has lost the adapter
            if self.adapter_version != adapter.version:
                self.link.text(f"/adapter/{adapter.version}", adapter.body)
                self.adapter_version = adapter.version
            sequences = self.link.ask("/sample", request, server="a rollout worker", read=read)
            if sequences is not None:
                return sequences
            self.check()  # reads which adapter the worker has
        raise Unanswered(
            f"{self.link.url} is also used by another run", REMEDY, is_transient=True, code="worker-in-use"
        )

    def _sequence(self, episode: Record, ticket: Ticket) -> Sequence:
        """Returns the sequence of a ticket's episode; raises InvalidRecord unless it begins as the ticket says."""
        start = ticket.sequence()
        layout = self.layout_of(start)
        if not start.tokens:
            layout.open(start)
        limits = EpisodeLimits.of(layout)
        sequence = sequence_from_json(episode, ticket.question, limits=limits, index=ticket.index)
        check_start(sequence, start)
        return sequence


class RemoteEngine:
    """Samples the rounds of a run on servers, with the interface of `rollout.engine.Engine`.

    Which episodes are sampled in one request depends only on the numbers of episodes and of servers, not on which
    server is free. So in fp32 a run can be repeated to the bit. The adapter of the current round is a part of a run's
    state.
    """

    def __init__(
        self,
        servers: list[Any],
        save_adapter: Callable[[Path], None],
        draw_ahead: Callable[[int], tuple[list[Question], list[str]]] | None = None,
    ):
        """Takes `RolloutWorker`s, or other servers with the same attributes and methods.

        `save_adapter` writes the policy's adapter into a folder. `draw_ahead(number)` returns the questions and seeds
        of a round, none after the last round. With it, each round is sampled while the one before is learned from.
        """
        self.servers = servers
        self.save_adapter = save_adapter
        self.draw_ahead = draw_ahead
        self.grant = Grant(Memory())  # the servers, which sample, grant memory for themselves
        self.adapter: AdapterFiles | None = None
        self.ahead: tuple[list[str], Future] | None = None  # seeds and sequences of the round that is sampled ahead
        self.counts: Counter[str] = Counter()
        slots = sum(server.slots for server in servers)
        self._pool = ThreadPoolExecutor(slots + 1, thread_name_prefix="rollouts")

    def begin_round(self, number: int, retrieve: Retrieve) -> None:
        """Reads the policy's adapter. Round `number` is sampled with it, unless that round is sampled ahead already."""
        if self.draw_ahead and self.adapter and not self.ahead:  # resumed: this is the adapter of the checkpoint
            self._sample_ahead(number, retrieve)
        with tempfile.TemporaryDirectory(prefix="r3lite-") as folder:
            self.save_adapter(Path(folder))
            self.adapter = AdapterFiles.read(Path(folder))

    def end_round(self, number: int, retrieve: Retrieve) -> dict[str, float]:
        """Begins to sample the next round, if rounds are sampled ahead; returns metrics of the round that ends."""
        self._sample_ahead(number + 1, retrieve)
        counts = self.counts
        self.counts = Counter()
        return {f"rollout/{name}": counts[name] for name in ("stale_episodes", "moved_episodes")}

    def _sample_ahead(self, number: int, retrieve: Retrieve) -> None:
        """Begins to sample a round with the current adapter, in the background; `run` waits for it."""
        if self.draw_ahead is None:
            return
        questions, seeds = self.draw_ahead(number)
        if questions:
            tickets = self._tickets(questions, seeds)
            sequences = self._pool.submit(self._sampled, tickets, self.adapter, retrieve)
            self.ahead = seeds, sequences

    def run(
        self,
        questions: list[Question],
        seeds: list[str],
        retrieve: Retrieve,
    ) -> list[Sequence]:
        """Samples as Engine.run does; if episodes with these seeds are sampled ahead, waits for them."""
        if self.ahead:
            seeds_ahead, sequences = self.ahead
            if seeds_ahead == seeds:
                self.ahead = None
                self.counts["stale_episodes"] += len(seeds)
                return sequences.result()
        tickets = self._tickets(questions, seeds)
        return self._sampled(tickets, self.adapter, retrieve)

    def continue_from(
        self,
        starts: list[tuple[Sequence, int]],
        seeds: list[str],
        retrieve: Retrieve,
    ) -> list[Sequence]:
        """Samples as Engine.continue_from does."""
        tickets = []
        for (sequence, steps), seed in zip(starts, seeds, strict=True):
            ticket = Ticket(sequence.question, seed, index=sequence.index, start=(sequence, steps))
            tickets.append(ticket)
        return self._sampled(tickets, self.adapter, retrieve)

    def close(self) -> None:
        """Breaks off the requests under way: otherwise the program would wait for them before it ends."""
        for server in self.servers:
            server.link.calls.end(at_once=True)
        self._pool.shutdown(cancel_futures=True)

    def state_dict(self) -> dict:
        """Returns the adapter of the current round, as bytes in a tensor."""
        if self.adapter is None:
            return {"tensors": {}}
        body = torch.frombuffer(bytearray(self.adapter.body), dtype=torch.uint8)
        return {"tensors": {"adapter": body}}

    def load_state_dict(self, state: dict) -> None:
        body = state["tensors"].get("adapter")
        self.adapter = None if body is None else AdapterFiles(body.numpy().tobytes())

    @staticmethod
    def _tickets(questions: list[Question], seeds: list[str]) -> list[Ticket]:
        pairs = zip(questions, seeds, strict=True)
        return [Ticket(question, seed, index) for index, (question, seed) in enumerate(pairs)]

    def _sampled(
        self,
        tickets: list[Ticket],
        adapter: AdapterFiles,
        retrieve: Retrieve,
    ) -> list[Sequence]:
        """Returns the episodes of tickets, in their order; each request is answered by one server."""
        size = math.ceil(len(tickets) / (2 * len(self.servers)))  # tickets of a request: two requests per server
        waiting = deque(range(0, len(tickets), size))  # the index of the first ticket of each request
        free_slots = [server for server in self.servers for _ in range(server.slots)]
        sampled: dict[int, list[Sequence]] = {}  # by the index of the request's first ticket
        under_way: dict[Future, tuple[Any, int]] = {}
        failed_servers = []  # they get no more requests in this call
        reason = ""
        while waiting or under_way:
            while waiting and free_slots:
                server = free_slots.pop(0)
                start = waiting.popleft()
                part = tickets[start : start + size]
                request = self._pool.submit(server.sample, part, adapter, retrieve)
                under_way[request] = server, start
            if not under_way:
                raise R3LiteError(f"no rollout server is left: {reason}", REMEDY, code="no-worker-left")
            for request in wait(under_way, return_when=FIRST_COMPLETED).done:
                server, start = under_way.pop(request)
                try:
                    sampled[start] = request.result()
                    if server not in failed_servers:
                        free_slots.append(server)
                except (Unanswered, WrongReply) as error:
                    if isinstance(error, Unanswered) and not error.is_transient:
                        raise  # another server would refuse it, too
                    reason = error.cause
                    failed_servers.append(server)
                    free_slots = [slot for slot in free_slots if slot is not server]
                    waiting.appendleft(start)
                    self.counts["moved_episodes"] += len(tickets[start : start + size])
                    warning = f"warning: {reason}; another server samples its episodes"
                    tqdm.write(printable(warning), file=sys.stderr)
        return [sequence for start in sorted(sampled) for sequence in sampled[start]]
