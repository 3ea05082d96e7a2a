"""Samples a run's episodes on other machines: rollout workers (`rollout_service`) or vLLM (`vllm_rollouts`).

They get the adapter of each round. A server that gives no answer is passed over until the next request for episodes;
what it was to sample is sampled by another one.
"""

import os
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from tqdm import tqdm

from r3lite.assembly.rl_round import Round, RoundSampler
from r3lite.assembly.rollout_service import facts_of, identity_of
from r3lite.core.config import UsageError
from r3lite.core.episode import Question, Retrieve
from r3lite.core.errors import R3LiteError, explained
from r3lite.core.grant import Grant
from r3lite.core.records import InvalidRecord, Record, Source, parse
from r3lite.llm.http_client import BoundedClient
from r3lite.llm.transport import Broken, Calls, Refused, TooLarge
from r3lite.models import weights
from r3lite.retrieval.setup import Setup
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.rl.batch import Batch, Rollout
from r3lite.rl.forward import action_states
from r3lite.rl.learner import Learner
from r3lite.rollout.sequence import Sequence
from r3lite.rollout.wire import Adapter, Ticket, sequence_from_json, tickets_to_json
from r3lite.serving.listening import TOKEN
from r3lite.settings import PpoConfig
from r3lite.training.metrics import Stopwatch
from r3lite.training.state import TrainState

LARGEST = 512 << 20  # bytes of a reply
CONNECT = 10.0  # seconds
REMEDY = "See that it runs and that --rollout-server names it; the run goes on with --resume auto."


class Gone(Exception):
    """A server that gives no answer, or fails: another one may do its work."""


class Declined(R3LiteError):
    """A reply with another status than 200, and below 500."""

    def __init__(self, url: str, status: int, told: str):
        token = f" {TOKEN} must be the same on both sides." * (status == 401)
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
            if error.status >= 500:
                raise Gone(f"{self.url} fails: status {error.status}: {told}") from error
            raise Declined(self.url, error.status, told) from error

    def record(self, path: str, content: dict | bytes | None = None) -> Record:
        with explained(InvalidRecord, f"{self.url}{path} gives another reply than a rollout server", REMEDY):
            return Record(parse(self.text(path, content)), Source("the reply"))


class RolloutServer(Protocol):
    """A server that samples episodes, `slots` requests at a time."""

    link: Link
    slots: int

    def check(self) -> str:
        """Says what the server is; raises R3LiteError if it would sample something else than the trainer."""
        ...

    def sample(self, tickets: list[Ticket], adapter: Adapter, retrieve: Retrieve) -> list[Sequence]:
        """The episodes of tickets, sampled with an adapter; raises Gone if another server has to."""
        ...


class Worker:
    """A rollout worker; it retrieves by itself."""

    slots = 1  # it computes on all cores

    def __init__(self, link: Link, facts: dict[str, str]):
        self.link, self.facts, self.has = link, facts, ""

    def check(self) -> str:
        told = self.link.record("/version")
        with explained(InvalidRecord, f"{self.link.url} is another version of r3lite", REMEDY):
            theirs, self.has = told.record("facts"), told.text("adapter", blank=True)
            values = {name: theirs.text(name, "none") for name in self.facts}
        if other := [
            f"{name} is {values[name]} (here {ours})" for name, ours in self.facts.items() if values[name] != ours
        ]:
            remedy = "Start the worker with the settings of this run, such as its config.toml by --config."
            raise R3LiteError(f"the rollout worker {self.link.url} differs: {'; '.join(other)}", remedy)
        return f"{self.link.url} (r3lite, {told.text('dtype')})"

    def sample(self, tickets: list[Ticket], adapter: Adapter, retrieve: Retrieve) -> list[Sequence]:
        asked = tickets_to_json(tickets) | {"identity": identity_of(self.facts), "adapter": adapter.version}
        for _ in range(2):  # a worker that was started anew has lost the adapter
            if self.has != adapter.version:
                self.link.text("/adapter", adapter.body)
                self.has = adapter.version
            try:
                return self._read(self.link.record("/sample", asked), tickets, adapter)
            except Declined as error:
                if error.status != 409:
                    raise
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
    fp32 a run is repeated to the bit. Among the parts of the run's state it keeps the adapter that the coming round is
    sampled with, if that is the one before.
    """

    def __init__(self, servers: list[RolloutServer], save: Callable[[Path], None]):
        self.servers, self._save = servers, save
        self.grant = Grant(None)  # memory is granted where it is sampled
        self.adapter: Adapter | None = None
        self.ahead: tuple[list[str], Future] | None = None  # seeds and sequences of the coming round
        self.counts: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(sum(s.slots for s in servers) + 1, thread_name_prefix="rollouts")

    def run(self, questions: list[Question], seeds: list[str], retrieve: Retrieve) -> list[Sequence]:
        """As Engine.run; episodes that were begun ahead are waited for."""
        if self.ahead and self.ahead[0] == seeds:
            ahead, self.ahead = self.ahead[1], None
            sequences = self._or_close(ahead.result)
            self.counts["stale_episodes"] += len(sequences)
            return sequences
        return self._or_close(self._sampled, self._tickets(questions, seeds), self.adapter, retrieve)

    def run_on(self, begun: list[tuple[Sequence, int]], seeds: list[str], retrieve: Retrieve) -> list[Sequence]:
        """As Engine.run_on."""
        pairs = zip(begun, seeds, strict=True)
        tickets = [Ticket(start[0].question, seed, start[0].place, start) for start, seed in pairs]
        return self._or_close(self._sampled, tickets, self.adapter, retrieve)

    def renew(self) -> None:
        """Takes the adapter as it is now for what is sampled from here on."""
        with tempfile.TemporaryDirectory(prefix="r3lite-") as folder:
            self.adapter = Adapter.saved(self._save, Path(folder))

    def go_ahead(self, questions: list[Question], seeds: list[str], retrieve: Retrieve) -> None:
        """Has a round sampled with the adapter of now, until `run` asks for it."""
        tickets = self._tickets(questions, seeds)
        self.ahead = seeds, self._pool.submit(self._sampled, tickets, self.adapter, retrieve)

    def close(self) -> None:
        """Breaks off what is under way."""
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
        self.adapter = None if kept is None else Adapter.read(kept.numpy().tobytes())

    @staticmethod
    def _tickets(questions: list[Question], seeds: list[str]) -> list[Ticket]:
        return [Ticket(q, seed, place) for place, (q, seed) in enumerate(zip(questions, seeds, strict=True))]

    def _or_close(self, work: Callable, *args) -> list[Sequence]:
        """What `work` returns; if it is interrupted, no request goes on."""
        try:
            return work(*args)
        except BaseException:
            self.close()
            raise

    def _sampled(self, tickets: list[Ticket], adapter: Adapter, retrieve: Retrieve) -> list[Sequence]:
        """The episodes of tickets, in their order, each of one server."""
        size = -(-len(tickets) // (2 * len(self.servers)))
        todo = deque(range(0, len(tickets), size))
        free = [server for server in self.servers for _ in range(server.slots)]
        found: dict[int, list[Sequence]] = {}
        under_way: dict[Future, tuple[RolloutServer, int]] = {}
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


@dataclass
class RemoteSampler(RoundSampler):
    """Samples rounds on other machines, with --max-staleness 1 a round ahead."""

    learner: Learner | None = None
    rounds: int = 0  # of the run

    def sample(self, number: int, watch: Stopwatch) -> Round:
        engine, size, late = self.engine, self.config.rl.batch_size, self.config.remote.max_staleness
        if late and engine.adapter and not engine.ahead:  # resumed, with the adapter that the checkpoint has kept
            engine.go_ahead(*self.order.of_round(number, size), self.retrieve)
        engine.renew()
        made = super().sample(number, watch)
        if self.learner.value_head is not None:
            with watch.stage("values"):
                self._value(made)
        if late and number < self.rounds:
            engine.go_ahead(*self.order.of_round(number + 1, size), self.retrieve)
        return replace(made, told=made.told | engine.told())

    def _value(self, made: Round) -> None:
        """Gives the episodes what the critic says of them now, as it was not there when they were sampled."""
        batch = Batch.of([Rollout(s.tokens, s.action_mask, s.logprobs, s.values, [], 0) for s in made.sequences])
        found = self.learner.grant.attempt("update", state_values, self.learner, batch)
        for sequence, values, mask in zip(made.sequences, found, batch.action_mask, strict=True):
            sequence.values = values[mask].tolist()


@torch.no_grad()
def state_values(learner: Learner, batch: Batch) -> torch.Tensor:
    """The critic's values [B, T] of the states before the action tokens."""
    found = torch.zeros_like(batch.values)
    with learner.precision.autocast():
        for rows in learner.micro_batches(batch):
            part = batch.rows(rows)
            hidden, _ = action_states(learner.model, part)
            found[rows] = part.spread(learner.value_head(hidden).float().cpu())
    return found


def check(config: PpoConfig) -> None:
    """Refuses settings beside which --max-staleness 1 would not be what it says."""
    rl, late = config.rl, config.remote.max_staleness
    if late and rl.importance_cap is None:
        raise UsageError("--max-staleness 1 needs a correction: pass --importance-cap, such as 2")
    if late and ALGORITHMS[rl.algorithm].has_replay:
        raise UsageError(f"--max-staleness 1 draws a round before {rl.algorithm} knows what it replays: pass 0")
    if late and config.validation.eval_data and config.guard.guard == "roll-back":
        why = "a rollback would leave a round that was sampled before it"
        raise UsageError(f"--max-staleness 1 with --guard roll-back and --eval-data: {why}; pass --guard warn")


def plan(config: PpoConfig) -> str:
    """What a run would do, for --dry-run."""
    servers, late = ", ".join(config.remote.rollout_server), config.remote.max_staleness
    which = "the adapter of the round before, while that is learned from" if late else "the adapter of now"
    cap = f"importance weights of at most {config.rl.importance_cap:g}" if config.rl.importance_cap else "no correction"
    return f"\n\nEpisodes are sampled by {servers} (not asked now), each round with {which}; {cap}"


def build(sampler: RoundSampler, learner: Learner, state: TrainState, setup: Setup, output: Path) -> RemoteSampler:
    """The same sampler of rounds with the servers of the settings, each of which is asked what it is."""
    config, local = sampler.config, sampler.engine
    base = weights.fingerprint(weights.resolve_folder(config.model.model))
    facts = facts_of(config, base, local.grant.memory.nf4, local.layouts, setup)
    token = os.environ.get(TOKEN, "").strip() or None
    servers, told = [], []
    for url in config.remote.rollout_server:
        link = Link(url, config.remote.rollout_timeout, token)
        try:
            version = link.record("/version")
            if "r3lite" in version:
                servers.append(Worker(link, facts))
            elif "version" in version:
                from r3lite.assembly.vllm_rollouts import VllmServer

                servers.append(VllmServer(link, config, local.layout_of, output))
            else:
                raise R3LiteError(f"{link.url} is neither a rollout worker of r3lite nor vLLM", REMEDY)
            told.append(servers[-1].check())
        except Gone as error:
            raise R3LiteError(str(error), REMEDY) from error
    print(f"episodes are sampled by {', '.join(told)}", file=sys.stderr)
    engine = RemoteEngine(servers, state.save_adapter)
    if config.remote.max_staleness:
        state.parts["rollouts"] = engine
    rounds = config.rounds(len(sampler.questions))
    return RemoteSampler(
        config,
        sampler.questions,
        engine,
        sampler.retrieve,
        sampler.judge,
        sampler.guidance,
        sampler.cache,
        learner,
        rounds,
    )
