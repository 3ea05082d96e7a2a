"""What every request passes before it is read: its host, its token, its rate, the size of its body."""

import asyncio
import hmac
import math
from typing import Annotated, Any

from fastapi.responses import JSONResponse
from pydantic import AfterValidator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from r3lite.serving.asks import Refusal
from r3lite.serving.desk import Desk

OPEN_PATHS = ("/", "/api/health")  # without a token: the page asks for it
BODY_SECONDS = 30.0  # that a client may take to send its body


def whole(text: str) -> str:
    """The text, if it is one: JSON can escape half of a character, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("it holds half a character") from error
    return text


Text = Annotated[str, AfterValidator(whole)]


def failure(refusal: Refusal) -> JSONResponse:
    """A refusal as OpenAI's API words it."""
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    error = {"message": refusal.message, "type": kind, "param": None, "code": refusal.code}
    wait = {"Retry-After": str(math.ceil(refusal.retry_after))} if refusal.retry_after else {}
    return JSONResponse({"error": error}, refusal.status, headers=wait)


class Guard:
    """ASGI middleware that refuses, or hands the whole body on."""

    def __init__(self, app: ASGIApp, desk: Desk, token: str | None, max_body: int):
        self.app, self.desk, self.token, self.max_body = app, desk, token, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._check(scope, Headers(scope=scope))
            body = await asyncio.wait_for(self._body(scope, receive), BODY_SECONDS)
        except (Refusal, TimeoutError) as error:
            late = Refusal(408, "timeout", "The request took too long to arrive.")
            await failure(error if isinstance(error, Refusal) else late)(scope, receive, send)
            return
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        await self.app(scope, replay, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        if scope["method"] == "POST":
            self.desk.check_rate(client_of(scope))
        if self.token is None or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self.token.encode())
        if scheme.lower() != "bearer" or not right:
            raise Refusal(401, "invalid_api_key", "This server needs a token: Authorization: Bearer ...")

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The body; Refusal if it is too large, before more of it is read."""
        large = Refusal(413, "too_large", f"The request is larger than {self.max_body >> 10} KiB.")
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced[:20]) > self.max_body:
            raise large
        body = bytearray()
        while True:
            message: Any = await receive()
            body += message.get("body", b"")
            if len(body) > self.max_body:
                raise large
            if message["type"] == "http.disconnect" or not message.get("more_body"):
                return bytes(body)


def client_of(scope: Scope) -> str:
    """The address that a request comes from."""
    return scope["client"][0] if scope.get("client") else ""
