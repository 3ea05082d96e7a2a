"""Samples on other machines: rollout workers (`python -m r3lite.rollout_worker`), or vLLM (`vllm.py`).

Episodes go to the servers in requests. A server that gives no answer, or a wrong one, is passed over until the next
call, and what it was to sample is sampled by another one. Knows no rounds.
"""

import sys
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from tqdm import tqdm

from r3lite.core.episode import Question, Retrieve
from r3lite.core.errors import R3LiteError
from r3lite.core.grant import Grant, Memory
from r3lite.core.records import InvalidRecord, Record
from r3lite.core.terminal import printable
from r3lite.llm.http_client import Link, Unanswered, WrongReply
from r3lite.protocols.transcript import Layout
from r3lite.rollout.sequence import Sequence
from r3lite.rollout.wire import (
    Adapter,
    Bounds,
    Ticket,
    check_beginning,
    identity_of,
    sequence_from_json,
    tickets_to_json,
)

LARGEST = 512 << 20  # bytes of a reply
REMEDY = "Check that it runs, its address in --rollout-server and R3LITE_TOKEN; then continue with --resume auto."


class Worker:
    """A rollout worker; it retrieves by itself."""

    slots = 1  # requests at a time: it computes on all cores

    def __init__(self, link: Link, facts: dict[str, str], layout_of: Callable[[Sequence], Layout]):
        self.link, self.facts, self.layout_of = link, facts, layout_of
        self.has = ""  # the version of its adapter

    def check(self) -> str:
        """Returns the server's address and dtype; raises R3LiteError if it would not sample as the trainer does."""

        def read(reply: Record) -> tuple[str, str, list[tuple[str, str, str]]]:
            theirs = reply.record("facts")
            pairs = [(name, theirs.text(name, "none", blank=True), ours) for name, ours in self.facts.items()]
            return reply.text("adapter", blank=True), reply.text("dtype"), pairs

        self.has, dtype, pairs = self.link.ask("/version", None, "a worker of this version of r3lite", read)
        if other := [f"{name} is {value} (here {ours})" for name, value, ours in pairs if value != ours]:
            remedy = "Start the worker with the flags of this run, or give both the same --config."
            raise R3LiteError(f"the rollout worker {self.link.url} has other settings: {'; '.join(other)}", remedy)
        return f"{self.link.url} (r3lite, {dtype})"

    def sample(self, tickets: list[Ticket], adapter: Adapter, retrieve: Retrieve) -> list[Sequence]:
        """The episodes of tickets, sampled with an adapter; Unanswered or WrongReply if another server has to do it."""

        def read(reply: Record) -> list[Sequence] | None:
            if "differs" in reply:
                return None
            episodes = reply.records("episodes")
            if len(episodes) != len(tickets) or {e.text("adapter") for e in episodes} != {adapter.version}:
                raise InvalidRecord(f"these are not {len(tickets)} episodes of the adapter {adapter.version}")
            return [self._episode(*pair) for pair in zip(episodes, tickets, strict=True)]

        asked = tickets_to_json(tickets) | {"identity": identity_of(self.facts), "adapter": adapter.version}
        for _ in range(2):  # a worker that was started anew has lost the adapter
            if self.has != adapter.version:
                self.link.text(f"/adapter/{adapter.version}", adapter.body)
                self.has = adapter.version
            if (made := self.link.ask("/sample", asked, "a rollout worker", read)) is not None:
                return made
            self.check()
        raise Unanswered(f"{self.link.url} is also used by another run", REMEDY, passes=True)

    def _episode(self, record: Record, ticket: Ticket) -> Sequence:
        """The episode of a ticket, which begins as it would here."""
        begun = ticket.sequence()
        layout = self.layout_of(begun)
        if not begun.tokens:
            layout.open(begun)
        sequence = sequence_from_json(record, ticket.question, Bounds.of(layout), ticket.place)
        check_beginning(sequence, begun)
        return sequence


class RemoteEngine:
    """Samples on servers, with the interface of `rollout.engine.Engine`.

    Which episodes are one request follows from their number and that of the servers, not from which server is free: in
    fp32 a run is repeated to the bit. As a part of a run's state it keeps the adapter that it samples with.
    """

    def __init__(self, servers: list[Any]):
        """Of `Worker`s and others with its attributes and methods."""
        self.servers = servers
        self.grant = Grant(Memory())  # memory is granted where it is sampled
        self.adapter: Adapter | None = None
        self.ahead: tuple[list[str], Future] | None = None  # seeds and sequences of the coming round
        self.counts: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(sum(s.slots for s in servers) + 1, thread_name_prefix="rollouts")

    def run(self, questions: list[Question], seeds: list[str], retrieve: Retrieve) -> list[Sequence]:
        """As Engine.run; episodes that were begun ahead are waited for."""
        if self.ahead and self.ahead[0] == seeds:
            ahead, self.ahead = self.ahead[1], None
            self.counts["stale_episodes"] += len(seeds)
            return ahead.result()
        return self._sampled(self._tickets(questions, seeds), self.adapter, retrieve)

    def continue_from(self, begun: list[tuple[Sequence, int]], seeds: list[str], retrieve: Retrieve) -> list[Sequence]:
        """As Engine.continue_from."""
        pairs = zip(begun, seeds, strict=True)
        tickets = [Ticket(start[0].question, seed, start[0].place, start) for start, seed in pairs]
        return self._sampled(tickets, self.adapter, retrieve)

    def go_ahead(self, questions: list[Question], seeds: list[str], retrieve: Retrieve) -> None:
        """Has a round sampled with the adapter of now, until `run` asks for it."""
        self.ahead = seeds, self._pool.submit(self._sampled, self._tickets(questions, seeds), self.adapter, retrieve)

    def close(self) -> None:
        """Breaks off what is under way: the program would wait for it."""
        for server in self.servers:
            server.link.calls.end(at_once=True)
        self._pool.shutdown(cancel_futures=True)

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call."""
        counts, self.counts = self.counts, Counter()
        return {f"rollout/{name}": counts[name] for name in ("stale_episodes", "moved_episodes")}

    def state_dict(self) -> dict:
        kept = {"adapter": torch.frombuffer(bytearray(self.adapter.body), dtype=torch.uint8)} if self.adapter else {}
        return {"tensors": kept}

    def load_state_dict(self, state: dict) -> None:
        kept = state["tensors"].get("adapter")
        self.adapter = None if kept is None else Adapter(kept.numpy().tobytes())

    @staticmethod
    def _tickets(questions: list[Question], seeds: list[str]) -> list[Ticket]:
        return [Ticket(q, seed, place) for place, (q, seed) in enumerate(zip(questions, seeds, strict=True))]

    def _sampled(self, tickets: list[Ticket], adapter: Adapter, retrieve: Retrieve) -> list[Sequence]:
        """The episodes of tickets, in their order, each of one server."""
        size = -(-len(tickets) // (2 * len(self.servers)))
        todo = deque(range(0, len(tickets), size))
        free = [server for server in self.servers for _ in range(server.slots)]
        found: dict[int, list[Sequence]] = {}
        under_way: dict[Future, tuple[Any, int]] = {}
        reason = ""
        while todo or under_way:
            while todo and free:
                server, start = free.pop(0), todo.popleft()
                work = self._pool.submit(server.sample, tickets[start : start + size], adapter, retrieve)
                under_way[work] = server, start
            if not under_way:
                raise R3LiteError(f"no rollout server is left: {reason}", REMEDY)
            for work in wait(under_way, return_when=FIRST_COMPLETED).done:
                server, start = under_way.pop(work)
                try:
                    found[start] = work.result()
                    free.append(server)
                except (Unanswered, WrongReply) as error:
                    if isinstance(error, Unanswered) and not error.passes:
                        raise
                    reason, free = error.cause, [other for other in free if other is not server]
                    todo.appendleft(start)
                    self.counts["moved_episodes"] += len(tickets[start : start + size])
                    tqdm.write(printable(f"warning: {reason}; another server samples its episodes"), file=sys.stderr)
        return [sequence for start in sorted(found) for sequence in found[start]]
