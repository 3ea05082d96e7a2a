"""Answers over HTTP: whole or as server-sent events, and stopped when nobody listens."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from r3lite.serving.asks import Answer, Ask, Refusal
from r3lite.serving.desk import Desk
from r3lite.serving.guard import client_of

Event = dict[str, Any] | Answer | Refusal  # the last of an ask is its answer or why there is none
Events = AsyncIterator[dict[str, Any] | Answer]
Texts = Callable[[Event], Iterable[str]]


async def respond(
    request: Request, desk: Desk, ask: Ask, whole: Callable[[Answer], dict], texts: Texts | None
) -> Response:
    """The answer to an ask: with `texts` as a stream of these texts of each event, one line each, else `whole`."""
    events = desk.answer(client_of(request.scope), ask, texts is not None)
    start = await anext(events)  # what refuses the ask does so while there is a status to say it with
    if texts is None:
        return JSONResponse(whole(await answer_of(request, events)))
    sent = (f"data: {text}\n\n" async for event in _with_refusal(start, events) for text in texts(event))
    return StreamingResponse(sent, media_type="text/event-stream")


async def _with_refusal(start: dict[str, Any], events: Events) -> AsyncIterator[Event]:
    """All events; a refusal is the last one."""
    async with aclosing(events):
        yield start
        try:
            async for event in events:
                yield event
        except Refusal as refusal:
            yield refusal


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
