"""Samples on other machines: rollout workers (`python -m r3lite.rollout_worker`), or vLLM (`vllm.py`).

Episodes go to the servers in requests. A server that gives no answer is passed over until the next call, and what it
was to sample is sampled by another one. Knows no rounds.
"""

import sys
from collections import Counter, deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from tqdm import tqdm

from r3lite.core.episode import Question, Retrieve
from r3lite.core.errors import R3LiteError, explained
from r3lite.core.grant import Grant, Memory
from r3lite.core.records import InvalidRecord, Record, Source, parse
from r3lite.llm.http_client import BoundedClient
from r3lite.llm.transport import Broken, Calls, Refused, TooLarge
from r3lite.rollout.sequence import Sequence
from r3lite.rollout.wire import Adapter, Ticket, identity_of, sequence_from_json, tickets_to_json

LARGEST = 512 << 20  # bytes of a reply
CONNECT = 10.0  # seconds
REMEDY = "See that it runs and that --rollout-server names it; the run goes on with --resume auto."


class Gone(Exception):
    """A server that gives no answer, or fails: another one may do its work."""


class Declined(R3LiteError):
    """A reply with another status than 200, and below 500."""

    def __init__(self, url: str, status: int, told: str):
        token = " R3LITE_TOKEN must be the same on both sides." * (status == 401)
        super().__init__(f"{url} refuses: status {status}: {told}", REMEDY + token)
        self.status = status


class Link:
    """Requests to one server, each of at most `seconds`."""

    def __init__(self, url: str, seconds: float, token: str | None = None):
        self.url, self.seconds = url.rstrip("/"), seconds
        self._client = BoundedClient(LARGEST, {"authorization": f"Bearer {token}"} if token else None)
        self.calls = Calls(seconds)

    def text(self, path: str, content: dict | bytes | None = None) -> str:
        """The reply to a GET, or to a POST of JSON or bytes. Raises Gone or R3LiteError."""
        body = {"content": content} if isinstance(content, bytes) else {"json": content} if content is not None else {}
        method, limits = "POST" if body else "GET", (CONNECT, *[self.seconds] * 3)
        try:
            call = lambda: self._client.request(method, self.url + path, timeout=limits, **body)  # noqa: E731
            return self.calls.run(call).text
        except Broken as error:
            raise Gone(f"{self.url} gives no answer: {error}") from error
        except TooLarge as error:
            raise R3LiteError(f"{self.url} sends {error}", REMEDY) from error
        except Refused as error:
            told = " ".join(error.body.split())[:500]
            if error.status >= 500 or error.status in (408, 429):
                raise Gone(f"{self.url} fails: status {error.status}: {told}") from error
            raise Declined(self.url, error.status, told) from error

    def record(self, path: str, content: dict | bytes | None = None) -> Record:
        with explained(InvalidRecord, f"{self.url}{path} gives another reply than a rollout server", REMEDY):
            return Record(parse(self.text(path, content)), Source("the reply"))


class Worker:
    """A rollout worker; it retrieves by itself."""

    slots = 1  # requests at a time: it computes on all cores

    def __init__(self, link: Link, facts: dict[str, str]):
        self.link, self.facts, self.has = link, facts, ""

    def check(self) -> str:
        """Says what the server is; raises R3LiteError if it would sample something else than the trainer."""
        told = self.link.record("/version")
        with explained(InvalidRecord, f"{self.link.url} is another version of r3lite", REMEDY):
            theirs, self.has = told.record("facts"), told.text("adapter", blank=True)
            pairs = [(name, theirs.text(name, "none", blank=True), ours) for name, ours in self.facts.items()]
        if other := [f"{name} is {value} (here {ours})" for name, value, ours in pairs if value != ours]:
            remedy = "Start the worker with the flags of this run, or give both the same --config."
            raise R3LiteError(f"the rollout worker {self.link.url} differs: {'; '.join(other)}", remedy)
        return f"{self.link.url} (r3lite, {told.text('dtype')})"

    def sample(self, tickets: list[Ticket], adapter: Adapter, retrieve: Retrieve) -> list[Sequence]:
        """The episodes of tickets, sampled with an adapter; raises Gone if another server has to."""
        asked = tickets_to_json(tickets) | {"identity": identity_of(self.facts), "adapter": adapter.version}
        for _ in range(2):  # a worker that was started anew has lost the adapter
            if self.has != adapter.version:
                self.link.text(f"/adapter/{adapter.version}", adapter.body)
                self.has = adapter.version
            if "differs" not in (reply := self.link.record("/sample", asked)):
                return self._read(reply, tickets, adapter)
            self.check()
        raise Gone(f"{self.link.url} is given other adapters by another run")

    def _read(self, reply: Record, tickets: list[Ticket], adapter: Adapter) -> list[Sequence]:
        with explained(InvalidRecord, f"{self.link.url} gives other episodes than were asked for", REMEDY):
            episodes = reply.records("episodes")
            if len(episodes) != len(tickets) or {e.text("adapter") for e in episodes} != {adapter.version}:
                raise InvalidRecord(f"not {len(tickets)} of the adapter {adapter.version}")
            return [sequence_from_json(e, t.question, t.place) for e, t in zip(episodes, tickets, strict=True)]


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

    def run_on(self, begun: list[tuple[Sequence, int]], seeds: list[str], retrieve: Retrieve) -> list[Sequence]:
        """As Engine.run_on."""
        pairs = zip(begun, seeds, strict=True)
        tickets = [Ticket(start[0].question, seed, start[0].place, start) for start, seed in pairs]
        return self._sampled(tickets, self.adapter, retrieve)

    def go_ahead(self, questions: list[Question], seeds: list[str], retrieve: Retrieve) -> None:
        """Has a round sampled with the adapter of now, until `run` asks for it."""
        tickets = self._tickets(questions, seeds)
        self.ahead = seeds, self._pool.submit(self._sampled, tickets, self.adapter, retrieve)

    def close(self) -> None:
        """Breaks off what is under way: the program would wait for it."""
        for server in self.servers:
            server.link.calls.end(at_once=True)
        self._pool.shutdown(cancel_futures=True)

    def told(self) -> dict[str, float]:
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
                except Gone as error:
                    reason, free = str(error), [other for other in free if other is not server]
                    todo.appendleft(start)
                    self.counts["moved_episodes"] += len(tickets[start : start + size])
                    tqdm.write(f"warning: {reason}; its episodes are sampled by another server", file=sys.stderr)
        return [sequence for start in sorted(found) for sequence in found[start]]
