"""Answers over HTTP: whole or as server-sent events, and stopped when nobody listens."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import Request

from r3lite.serving.asks import Answer, Refusal

STREAM = "text/event-stream"
Events = AsyncIterator[dict[str, Any] | Answer]


async def server_sent(texts: AsyncIterator[str]) -> AsyncIterator[str]:
    """Texts of one line each, as server-sent events."""
    async with aclosing(texts):
        async for text in texts:
            yield f"data: {text}\n\n"


async def answer_of(request: Request, events: Events) -> Answer:
    """The answer that ends the events. If the client goes away before, they are closed: nobody reads the Refusal."""
    answering, gone = asyncio.ensure_future(_last(events)), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise Refusal(499, "gone", "The client closed the connection.")
        return answering.result()
    finally:
        for task in (answering, gone):
            task.cancel()
        await asyncio.gather(answering, gone, return_exceptions=True)


async def _last(events: Events) -> Answer:
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Answer):
                return event
    raise AssertionError("an answer comes last")


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
