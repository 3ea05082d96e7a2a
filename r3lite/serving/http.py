"""HTTP around an ask: the limits of a connection, the checks of every request, and how its answer is sent."""

import asyncio
import hmac
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import AfterValidator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from r3lite.core.listening import CONNECTION_LIMITS, host_of, is_loopback
from r3lite.serving.asks import Ask, Refusal, ServedAnswer
from r3lite.serving.desk import Desk

OPEN_PATHS = ("/", "/api/health")  # need no token: the page itself asks the user for it

Event = dict[str, Any] | ServedAnswer | Refusal  # the last event of an ask is a ServedAnswer or a Refusal
Events = AsyncGenerator[dict[str, Any] | ServedAnswer, None]
Texts = Callable[[Event], Iterable[str]]  # the texts that are sent for an event of a stream


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 with time limits: uvicorn itself waits without end for the head of a request, and until a
    client has read a reply.

    The time for a head begins with the connection or with the end of a reply. The time for a reply to be read begins
    when the client has left so much unread that nothing more can be sent.
    """

    limits = CONNECTION_LIMITS
    _head_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            transport.write(bytes_of(TOO_MANY_CONNECTIONS))
            transport.close()
        else:
            self._update_head_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_head_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_head_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reader_timer is None:
            self._reader_timer = self.loop.call_later(self.limits.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_reader_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        self._cancel_reader_timer()
        super().connection_lost(exc)

    def _update_head_timer(self) -> None:
        """Starts the timer if a head is awaited and no timer runs; cancels it once the head is there."""
        is_awaited = self.cycle is None or self.cycle.response_complete
        if not is_awaited:
            self._cancel_head_timer()
        elif self._head_timer is None:
            # Not `close`, which waits until the client has read all that was sent.
            self._head_timer = self.loop.call_later(self.limits.seconds, self.transport.abort)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _cancel_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None


def encodable(text: str) -> str:
    """Returns the text; raises ValueError if it has half of a surrogate pair, which only JSON can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("it contains half of a surrogate pair") from error
    return text


Text = Annotated[str, AfterValidator(encodable)]


def failure(refusal: Refusal) -> JSONResponse:
    """Returns a refusal as OpenAI's API words it."""
    headers = {}
    if refusal.retry_after:
        headers["Retry-After"] = str(math.ceil(refusal.retry_after))
    return JSONResponse({"error": error_of(refusal)}, refusal.status, headers)


def error_of(refusal: Refusal) -> dict[str, str | None]:
    """Returns what the body of a refusal has under `error`."""
    return {
        "message": refusal.message,
        "type": "server_error" if refusal.status >= 500 else "invalid_request_error",
        "param": None,
        "code": refusal.code,
    }


TOO_MANY_CONNECTIONS = Refusal(503, "overloaded", "The server has too many connections. Try again soon.", 5)


def bytes_of(refusal: Refusal) -> bytes:
    """Returns a refusal as the bytes for a connection that is closed after them, without reading a request."""
    body = json.dumps({"error": error_of(refusal)}).encode()
    head = (
        f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    return "\r\n".join((*head, "", "")).encode() + body


class RequestGuard:
    """ASGI middleware that refuses a request, or reads its whole body and hands it on."""

    def __init__(self, app: ASGIApp, desk: Desk, token: str | None, max_body: int, on_loopback: bool):
        self.app = app
        self.desk = desk
        self.token = token
        self.max_body = max_body  # bytes
        self.on_loopback = on_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            self._check(scope, headers)
            size = announced_size(headers)
            if size > self.max_body:
                raise self._too_large()
            body = await asyncio.wait_for(self._body(receive), Connection.limits.seconds_for(size))
        except Refusal as refusal:
            await failure(refusal)(scope, receive, send)
            return
        except TimeoutError:
            late = Refusal(408, "timeout", "The request took too long to arrive.")
            await failure(late)(scope, receive, send)
            return
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            """Returns the body, which was read above, as one message; then what comes after it."""
            return unread.pop() if unread else await receive()

        await self.app(scope, replay, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        # Another web page could let its own host name resolve to this machine (DNS rebinding).
        if self.on_loopback and not is_loopback(host_of(headers.get("host", ""))):
            raise Refusal(400, "unknown_host", "This server answers only requests to this machine.")
        if scope["method"] == "POST":
            self.desk.check_rate(client_of(scope))
        if self.token is None or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        matches = hmac.compare_digest(credentials.strip().encode("utf-8", "replace"), self.token.encode())
        if scheme.lower() != "bearer" or not matches:
            raise Refusal(401, "invalid_api_key", "The token is missing or wrong: send Authorization: Bearer TOKEN.")

    def _too_large(self) -> Refusal:
        return Refusal(413, "too_large", f"The request is larger than {self.max_body >> 10} KiB.")

    async def _body(self, receive: Receive) -> bytes:
        """Returns the body; raises Refusal as soon as more than `max_body` bytes have come."""
        body = bytearray()
        while True:
            message: Any = await receive()
            body += message.get("body", b"")
            if len(body) > self.max_body:
                raise self._too_large()
            if message["type"] == "http.disconnect" or not message.get("more_body"):
                return bytes(body)


def announced_size(headers: Headers) -> int:
    """Returns how many bytes the head announces for the body; 0 if it announces none."""
    text = headers.get("content-length", "0")
    return int(text[:20]) if text.isdecimal() else 0  # 20 digits are beyond any limit


def client_of(scope: Scope) -> str:
    """Returns the address that a request comes from."""
    return scope["client"][0] if scope.get("client") else ""


async def respond(
    request: Request, desk: Desk, ask: Ask, reply: Callable[[ServedAnswer], dict], texts: Texts | None
) -> Response:
    """Returns the response to an ask.

    Without `texts`, it is the JSON that `reply` makes of the answer. With `texts`, it is a stream of all events, with a
    line for each text that `texts` makes of an event.
    """
    events = desk.answer(client_of(request.scope), ask, follows=texts is not None)
    start = await anext(events)  # before the response begins, so that a Refusal still sets the status
    if texts is None:
        return JSONResponse(reply(await answer_of(request, events)))
    lines = (f"data: {text}\n\n" async for event in _with_refusal(start, events) for text in texts(event))
    return StreamingResponse(lines, media_type="text/event-stream")


async def _with_refusal(start: dict[str, Any], events: Events) -> AsyncIterator[Event]:
    """Yields `start` and all further events. A Refusal that ends them is yielded, not raised."""
    async with aclosing(events):
        yield start
        try:
            async for event in events:
                yield event
        except Refusal as refusal:
            yield refusal


async def answer_of(request: Request, events: Events) -> ServedAnswer:
    """Returns the next event, which is the answer.

    If the client goes away first, the ask is stopped. The Refusal then only ends the request: nobody reads it.
    """

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering = asyncio.ensure_future(anext(events))
    leaving = asyncio.ensure_future(disconnected())
    tasks = (answering, leaving)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise Refusal(499, "gone", "The client closed the connection.")
        return answering.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await events.aclose()
