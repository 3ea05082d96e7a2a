"""Takes requests: checks limits, selects mode and adapter, remembers conversations, and passes on the answer.

Knows of HTTP only the status of a refusal.
"""

import asyncio
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from r3lite.core.errors import R3LiteError
from r3lite.serving.asks import Ask, Message, Refusal, ServedAnswer
from r3lite.serving.routing import route
from r3lite.serving.worker import AnsweringThread, Job
from r3lite.settings import LimitSettings, ModeSettings

AUTO = "auto"
TOO_LONG = ("prompt-too-long", "length-too-small")  # codes of errors: no room for an answer; none for a document, too
CLIENTS = 10_000  # maximum clients whose rates are remembered


def refusal_of(error: R3LiteError) -> Refusal:
    """Returns what a client is told of an error of `prepare`.

    If the request is not the reason, the error is printed: it may have paths, which clients are not to see.
    """
    if error.code in TOO_LONG:
        return Refusal(400, "context_length_exceeded", "The question is too long for this model.")
    if error.code.startswith("template-"):
        message = "The model's chat template refuses messages of these roles in this order."
        return Refusal(400, "invalid_request", message)
    print(f"a request failed: {error}", file=sys.stderr)
    return Refusal(500, "failed", "Internal error. See the server's log.")


@dataclass
class ClientRates:
    """A bucket for each client (RFC 2697's idea): it holds `per_minute` requests, and fills up as time passes."""

    per_minute: int
    clock: Callable[[], float]  # returns seconds
    # By client: the requests that are left, and the time at which there were so many.
    _buckets: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)

    def seconds_to_wait(self, client: str) -> float:
        """Returns 0 if the client may ask now, and counts the request; else the seconds until it may ask."""
        time = self.clock()
        requests, updated = self._buckets.pop(client, (float(self.per_minute), time))
        requests += (time - updated) * self.per_minute / 60
        requests = min(float(self.per_minute), requests)
        seconds = 0.0
        if requests >= 1:
            requests -= 1
        else:
            seconds = (1 - requests) * 60 / self.per_minute
        self._buckets[client] = (requests, time)
        if len(self._buckets) > CLIENTS:
            self._buckets.popitem(last=False)  # the client that was silent longest
        return seconds


@dataclass
class Places:
    """Limits how many requests may be waiting or in progress at the same time, in total and for each client."""

    limit: int
    limit_of_client: int
    taken: Counter[str] = field(default_factory=Counter)  # places by client

    def take(self, client: str) -> None:
        """Takes a place; raises Refusal if there is none."""
        if self.taken.total() >= self.limit:
            raise Refusal(
                503,
                code="overloaded",
                message="The server is busy. Try again soon.",
                retry_after=5,
            )
        if self.taken[client] >= self.limit_of_client:
            raise Refusal(
                429,
                code="too_many_at_once",
                message="You have too many questions in progress. Wait for an answer.",
                retry_after=5,
            )
        self.taken[client] += 1

    def free(self, client: str) -> None:
        """Frees a place."""
        self.taken -= Counter((client,))  # -= also drops a client whose count becomes 0


@dataclass
class Conversations:
    """The last turns of each conversation, by its id. The one that was silent longest is forgotten first."""

    max_turns: int  # of one conversation
    max_conversations: int
    max_bytes: int  # of text, in all conversations
    # By the id of the conversation: its turns, each a question and its answer.
    _turns_of: dict[str, deque[tuple[str, str]]] = field(default_factory=dict)

    @property
    def text_bytes(self) -> int:
        """Bytes of text that are remembered."""
        total = 0
        for turns in self._turns_of.values():
            for question, answer in turns:
                total += len(question.encode("utf-8", "replace")) + len(answer.encode("utf-8", "replace"))
        return total

    def messages(self, id: str | None, all_but_last: bool = False) -> tuple[Message, ...]:
        """Returns the messages of a conversation so far; with `all_but_last`, without those of its last turn."""
        turns = list(self._turns_of.get(id, ()))
        if all_but_last:
            turns = turns[:-1]
        messages = []
        for question, answer in turns:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        return tuple(messages)

    def add(self, id: str, question: str, answer: str, in_place_of_last: bool = False) -> None:
        """Remembers a turn, and forgets what exceeds the limits.

        With `in_place_of_last`, the turn replaces the last one.
        """
        turns = self._turns_of.pop(id, deque(maxlen=self.max_turns))
        self._turns_of[id] = turns  # as the newest conversation
        if in_place_of_last and turns:
            turns.pop()
        turns.append((question, answer))
        while self._turns_of and (len(self._turns_of) > self.max_conversations or self.text_bytes > self.max_bytes):
            oldest = next(iter(self._turns_of))
            if oldest == id and len(turns) > 1:  # this conversation alone is too long: its first turns go
                turns.popleft()
            else:
                del self._turns_of[oldest]


class Desk:
    """Takes asks, as far as the limits allow, and passes on their answers."""

    def __init__(self, worker: AnsweringThread, limits: LimitSettings, modes: ModeSettings, clock: Callable[[], float]):
        self.worker = worker
        self.limits = limits
        self.clock = clock
        self.modes = worker.answering.modes
        self.adapters = worker.answering.adapters
        self.rates = ClientRates(limits.requests_per_minute, clock)
        self.places = Places(limits.max_requests, limits.max_requests_per_client)
        # Prepares asks away from the event loop: tokenizing a long text takes a moment, and some modes search first.
        self.preparer = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        self.conversations = Conversations(modes.memory_turns, modes.conversations, modes.memory_kib << 10)

    def resolve(
        self, text: str, mode: str, adapter: str | None, conversation: str | None = None, retry: bool = False
    ) -> Ask:
        """Returns the ask of a request: mode auto becomes the mode that fits, and adapter None that mode's adapter.

        It has the conversation's messages so far, without the last turn if that is tried again (`retry`). Raises
        Refusal.
        """
        if not text.strip():
            raise Refusal(400, "empty", "The question is empty.")
        if mode == AUTO:
            mode = route(text, self.worker.answering.learned_modes)
        if mode not in self.modes:
            problem = self.worker.answering.missing.get(mode) or f"Unknown mode {mode[:40]!r}"
            raise Refusal(400, "unknown_mode", f"{problem}; choose from {', '.join((*self.modes, AUTO))}.")
        if adapter is not None and adapter not in self.adapters:
            names = ", ".join(self.adapters)
            raise Refusal(400, "unknown_adapter", f"Unknown adapter {adapter[:40]!r}; choose from {names}.")
        return Ask(
            text,
            mode=mode,
            adapter=adapter or self.modes[mode],
            earlier=self.conversations.messages(conversation, all_but_last=retry),
            conversation=conversation,
            retry=retry,
        )

    async def answer(self, client: str, ask: Ask, follows: bool) -> AsyncGenerator[dict[str, Any] | ServedAnswer, None]:
        """Yields `{"type": "start"}` once the ask is accepted, then its progress if `follows` is true, then the answer.

        Raises Refusal. When this generator ends, or is closed, the ask is stopped and its place is free.
        """
        self.places.take(client)
        job = Job(ask)
        deadline = self.clock() + self.limits.request_seconds
        try:
            tell = job.put if follows else None
            loop = asyncio.get_running_loop()
            # Preparing may take its time, too: a retriever may be slow, and other asks may be prepared before.
            preparing = loop.run_in_executor(self.preparer, self.worker.answering.prepare, ask, tell)
            job.prepared = await asyncio.wait_for(preparing, max(0.0, deadline - self.clock()))
            self.worker.submit(job)
            yield {"type": "start", "mode": ask.mode, "adapter": ask.adapter}
            while True:
                event = await asyncio.wait_for(job.events.get(), max(0.0, deadline - self.clock()))
                if event is None:
                    raise Refusal(500, "failed", "Internal error. See the server's log.")
                if isinstance(event, ServedAnswer):
                    self._remember(ask, event)
                yield event
                if isinstance(event, ServedAnswer):
                    return
        except R3LiteError as error:  # of `prepare`
            raise refusal_of(error) from error
        except TimeoutError as error:
            message = f"The answer was stopped after {self.limits.request_seconds:g} seconds."
            raise Refusal(504, "timeout", message) from error
        finally:
            job.stopped = True
            self.places.free(client)

    def _remember(self, ask: Ask, answer: ServedAnswer) -> None:
        """Adds the turn to its conversation, if it has one and there is an answer."""
        if answer.final_answer and ask.conversation is not None:
            self.conversations.add(
                ask.conversation,
                question=ask.text,
                answer=answer.final_answer,
                in_place_of_last=ask.retry,
            )

    def check_rate(self, client: str) -> None:
        """Counts a request; raises Refusal if there were too many."""
        seconds = self.rates.seconds_to_wait(client)
        if seconds:
            raise Refusal(
                429,
                code="too_many_requests",
                message=f"Too many requests. Wait {max(1, round(seconds))} s.",
                retry_after=seconds,
            )
