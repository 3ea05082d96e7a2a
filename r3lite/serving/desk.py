"""Takes requests in: checks limits, selects mode and adapter, and follows the answer.

Knows the limits and the conversations, and no HTTP but a refusal's status.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from r3lite.core.errors import R3LiteError
from r3lite.serving.asks import MODES, Answer, Ask, Refusal
from r3lite.serving.conversations import Conversations
from r3lite.serving.limits import Places, Rate
from r3lite.serving.routing import route
from r3lite.serving.worker import Job, Worker
from r3lite.settings import LimitSettings, ModeSettings

AUTO = "auto"


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
            raise Refusal(400, "empty", "There is nothing to answer: the question is empty.")
        mode = route(text, self.modes) if mode == AUTO else mode
        if mode not in self.modes:
            why = "This server has nothing to search" if mode in MODES else f"There is no mode {mode[:40]!r}"
            raise Refusal(400, "unknown_mode", f"{why}; the modes are {', '.join((*self.modes, AUTO))}.")
        if adapter is not None and adapter not in self.adapters:
            named = ", ".join(self.adapters)
            raise Refusal(400, "unknown_adapter", f"There is no adapter {adapter[:40]!r}; there are {named}.")
        earlier = self.conversations.messages(conversation, all_but_last=retry)
        return Ask(text, mode, adapter or self.modes[mode], earlier, conversation, retry)

    async def answer(self, client: str, ask: Ask, follows: bool) -> AsyncIterator[dict[str, Any] | Answer]:
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
                    raise Refusal(500, "failed", "Something went wrong here. The server's log says what.")
                if isinstance(event, Answer):
                    if ask.conversation is not None and event.final_answer:
                        self.conversations.add(ask.conversation, ask.text, event.final_answer, ask.retry)
                    yield event
                    return
                yield event
        except R3LiteError as error:  # of `prepare`
            raise Refusal(400, "context_length_exceeded", "The question is too long for this model.") from error
        except TimeoutError as error:
            seconds = f"{self.limits.request_seconds:g}"
            raise Refusal(504, "timeout", f"The answer took longer than {seconds} seconds, and was stopped.") from error
        finally:
            job.stopped = True
            self.places.free(client)

    def check_rate(self, client: str) -> None:
        """Counts a request; raises Refusal if there were too many."""
        if wait := self.rate.wait(client):
            raise Refusal(429, "too_many_requests", f"Too many requests. Wait {max(1, round(wait))} s.", wait)
