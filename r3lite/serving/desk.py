"""Takes requests in: checks limits, selects mode and adapter, remembers conversations, and follows the answer.

Knows no HTTP but a refusal's status.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from r3lite.core.errors import R3LiteError
from r3lite.serving.asks import MODES, Answer, Ask, Message, Refusal
from r3lite.serving.routing import route
from r3lite.serving.worker import Job, Worker
from r3lite.settings import LimitSettings, ModeSettings

AUTO = "auto"
CLIENTS = 10_000  # whose rate of requests is remembered


@dataclass
class Rate:
    """A bucket for each client (RFC 2697's idea): it holds `per_minute` requests, and fills up as time passes."""

    per_minute: int
    clock: Callable[[], float]
    _buckets: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)  # what is in it, and when

    def wait(self, client: str) -> float:
        """0 if the client may ask now, and counts it; else the seconds until it may."""
        now = self.clock()
        left, then = self._buckets.pop(client, (float(self.per_minute), now))
        left = min(float(self.per_minute), left + (now - then) * self.per_minute / 60)
        self._buckets[client] = (left - 1 if left >= 1 else left), now
        if len(self._buckets) > CLIENTS:
            self._buckets.popitem(last=False)
        return 0.0 if left >= 1 else (1 - left) * 60 / self.per_minute


@dataclass
class Places:
    """Requests that are answered or wait, in all and of each client."""

    most: int
    most_of_client: int
    taken: Counter[str] = field(default_factory=Counter)

    def take(self, client: str) -> None:
        """Takes a place; raises Refusal if there is none."""
        if self.taken.total() >= self.most:
            raise Refusal(503, "overloaded", "The server is busy. Try again soon.", 5)
        if self.taken[client] >= self.most_of_client:
            raise Refusal(429, "too_many_at_once", "You have too many questions in progress. Wait for an answer.", 5)
        self.taken[client] += 1

    def free(self, client: str) -> None:
        self.taken -= Counter((client,))  # which forgets a client that has none left


@dataclass
class Conversations:
    """The last turns of each conversation, by its id. The one that was silent longest is forgotten first."""

    turns: int  # of a conversation
    conversations: int
    size: int  # bytes of text in all
    _of: dict[str, deque[tuple[str, str]]] = field(default_factory=dict)  # what was asked and answered

    @property
    def held(self) -> int:
        """Bytes of text now."""
        turns = (turn for turns in self._of.values() for turn in turns)
        return sum(len(text.encode("utf-8", "replace")) for turn in turns for text in turn)

    def messages(self, id: str | None, all_but_last: bool = False) -> tuple[Message, ...]:
        """The messages of a conversation so far; `all_but_last`: without its last turn, which is tried again."""
        turns = list(self._of.get(id, ()))
        pairs = turns[:-1] if all_but_last else turns
        roles = ("user", "assistant")
        return tuple({"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair))

    def add(self, id: str, asked: str, answered: str, in_place_of_last: bool = False) -> None:
        """Remembers a turn, and forgets what there is no room for."""
        turns = self._of[id] = self._of.pop(id, deque(maxlen=self.turns))
        if in_place_of_last and turns:
            turns.pop()
        turns.append((asked, answered))
        while self._of and (len(self._of) > self.conversations or self.held > self.size):
            oldest = next(iter(self._of))
            if oldest == id and len(turns) > 1:  # alone it takes too much: its first turns go
                turns.popleft()
            else:
                del self._of[oldest]


class Desk:
    """Takes asks in, as far as the limits allow, and follows their answers."""

    def __init__(self, worker: Worker, limits: LimitSettings, modes: ModeSettings, clock: Callable[[], float]):
        self.worker, self.limits, self.clock = worker, limits, clock
        self.modes, self.adapters = worker.answering.modes, worker.answering.adapters
        self.rate = Rate(limits.requests_per_minute, clock)
        self.places = Places(limits.max_requests, limits.max_requests_per_client)
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="prepare")  # a long text takes a moment to tokenize
        self.conversations = Conversations(modes.memory_turns, modes.conversations, modes.memory_kib << 10)

    def settled(
        self, text: str, mode: str, adapter: str | None, conversation: str | None = None, retry: bool = False
    ) -> Ask:
        """The ask with a mode that answers it, the adapter of that mode if none is named, and what was said before it.

        With `retry` the last turn of the conversation is tried again.
        """
        if not text.strip():
            raise Refusal(400, "empty", "The question is empty.")
        mode = route(text, self.modes) if mode == AUTO else mode
        if mode not in self.modes:
            why = "This server cannot search" if mode in MODES else f"Unknown mode {mode[:40]!r}"
            raise Refusal(400, "unknown_mode", f"{why}; choose from {', '.join((*self.modes, AUTO))}.")
        if adapter is not None and adapter not in self.adapters:
            named = ", ".join(self.adapters)
            raise Refusal(400, "unknown_adapter", f"Unknown adapter {adapter[:40]!r}; choose from {named}.")
        earlier = self.conversations.messages(conversation, all_but_last=retry)
        return Ask(text, mode, adapter or self.modes[mode], earlier, conversation, retry)

    async def answer(self, client: str, ask: Ask, follows: bool) -> AsyncGenerator[dict[str, Any] | Answer, None]:
        """`{"type": "start"}` when the ask has been taken in, its progress if it `follows`, and the answer.

        Raises Refusal. When it is closed, or ends in any other way, the ask is stopped and its place is free.
        """
        self.places.take(client)
        job, deadline = Job(ask), self.clock() + self.limits.request_seconds
        try:
            tell = job.put if follows else None
            loop, prepare = asyncio.get_running_loop(), self.worker.answering.prepare
            job.prepared = await loop.run_in_executor(self.reader, prepare, ask, tell)
            self.worker.submit(job)
            yield {"type": "start", "mode": ask.mode, "adapter": ask.adapter}
            while True:
                event = await asyncio.wait_for(job.events.get(), max(0.0, deadline - self.clock()))
                if event is None:
                    raise Refusal(500, "failed", "Internal error. See the server's log.")
                is_last = isinstance(event, Answer)
                if is_last and event.final_answer and ask.conversation is not None:
                    self.conversations.add(ask.conversation, ask.text, event.final_answer, ask.retry)
                yield event
                if is_last:
                    return
        except R3LiteError as error:  # of `prepare`
            raise Refusal(400, "context_length_exceeded", "The question is too long for this model.") from error
        except TimeoutError as error:
            late = f"The answer was stopped after {self.limits.request_seconds:g} seconds."
            raise Refusal(504, "timeout", late) from error
        finally:
            job.stopped = True
            self.places.free(client)

    def check_rate(self, client: str) -> None:
        """Counts a request; raises Refusal if there were too many."""
        if wait := self.rate.wait(client):
            raise Refusal(429, "too_many_requests", f"Too many requests. Wait {max(1, round(wait))} s.", wait)
