"""The application: the page, the health, POST /generate, and what all routes share."""

import contextlib
import hashlib
import json
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from r3lite.serving.asks import Refusal, ServedAnswer
from r3lite.serving.desk import AUTO, Desk
from r3lite.serving.http import Event, RequestGuard, Text, failure, respond
from r3lite.serving.openai_api import routes_of
from r3lite.settings import LimitSettings, ServerSettings

# A key of a body. The location of a validation error also has names of types, such as list[Part], which do not match.
KEY = re.compile(r"[\w-]{1,80}")


class Generate(BaseModel, extra="forbid"):
    """The body of POST /generate."""

    query: Text
    mode: str = AUTO
    adapter: str | None = None
    conversation: Annotated[str | None, Field(pattern=r"^[\w-]{1,64}$")] = None
    retry: bool = False
    """the last turn of the conversation is tried again, and its answer replaced"""
    stream: bool = False


def build_app(desk: Desk, server: ServerSettings, limits: LimitSettings, token: str | None) -> FastAPI:
    """Returns the application in front of a desk.

    `token`, if there is one, must come with every request, except for the page and /api/health.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        desk.worker.start()
        yield
        desk.worker.close()

    # No /docs: its page loads scripts from elsewhere.
    app = FastAPI(title="r3lite", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_middleware(
        RequestGuard,
        desk=desk,
        token=token,
        max_body=limits.max_body_kib << 10,
        on_loopback=server.on_loopback,
    )
    if server.cors_origins:
        # Any header is allowed: clients send their own, such as OpenAI's x-stainless-*. That is safe, because only the
        # listed origins may ask, and no cookies are read.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=server.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    add_errors(app)
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    security = page_headers(page)

    @app.get("/", include_in_schema=False)
    async def show() -> Response:
        return HTMLResponse(page, headers=security)

    add_descriptions(app, desk, needs_token=token is not None, max_requests=limits.max_requests)

    @app.post("/generate")
    async def generate(body: Generate, request: Request) -> Response:
        ask = desk.resolve(
            body.query,
            mode=body.mode,
            adapter=body.adapter,
            conversation=body.conversation,
            retry=body.retry,
        )

        def reply(answer: ServedAnswer) -> dict[str, Any]:
            return {"question": ask.text, **asdict(answer), "conversation": body.conversation}

        def event_texts(event: Event) -> Iterator[str]:
            """Yields the JSON of an event. The last event of a stream has the type `done` or `error`."""
            if isinstance(event, ServedAnswer):
                event = {"type": "done", "question": ask.text, **asdict(event)}
            elif isinstance(event, Refusal):
                event = {"type": "error", "code": event.code, "message": event.message}
            yield json.dumps(event)

        return await respond(
            request,
            desk=desk,
            ask=ask,
            reply=reply,
            texts=event_texts if body.stream else None,
        )

    app.include_router(routes_of(desk))
    return app


def add_descriptions(app: FastAPI, desk: Desk, needs_token: bool, max_requests: int) -> None:
    """Adds two routes that describe the server.

    /api/health tells everybody its state. /api/about tells those who may ask questions what it serves.
    """

    @app.get("/api/health")
    async def health() -> dict[str, Any]:
        active = desk.places.taken.total()
        return {
            "status": "ok",
            "modes": desk.modes,
            "notes": desk.worker.answering.notes,
            "missing": desk.worker.answering.missing,
            "adapters": desk.adapters,
            "needs_token": needs_token,
            "requests": {"active": active, "free": max_requests - active},
        }

    @app.get("/api/about")
    async def about() -> dict[str, Any]:
        return desk.worker.answering.about


def add_errors(app: FastAPI) -> None:
    """Answers every error in one form, without file paths or stack traces, and with at most a name from the request."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, Refusal):
            return failure(error)
        if isinstance(error, HTTPException):
            return failure(Refusal(error.status_code, "http_error", str(error.detail)))
        if isinstance(error, RequestValidationError):
            return failure(Refusal(400, "invalid_request", problem_of(request, error)))
        return failure(Refusal(500, "failed", "Internal error. See the server's log."))

    for kind in (Refusal, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, answer)


def problem_of(request: Request, error: RequestValidationError) -> str:
    """Says what is wrong with a body, and where."""
    if "json" not in request.headers.get("content-type", ""):
        return "The header Content-Type must be application/json."
    # Where a field may have several types, there is a problem for each type. The longest location is that of the type
    # which fits best.
    problem = max(error.errors(), key=lambda each: len(each["loc"]))
    parts = map(str, problem["loc"][1:])
    place = ".".join(part for part in parts if KEY.fullmatch(part))
    if not place:
        place = "the body"
    if problem["type"] == "json_invalid":
        place = f"character {place}"
    return f"{place}: {problem['msg']}"


def page_headers(page: str) -> dict[str, str]:
    """Returns the headers that limit what a browser may do on the page.

    It may run the page's own script, use its own style, and send requests to this server.
    """
    policy = (
        "default-src 'none'",
        f"script-src {hashes_of(page, 'script')}",
        f"style-src {hashes_of(page, 'style')}",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def hashes_of(page: str, tag: str) -> str:
    """Returns the hashes of the texts in all tags of a name, as a Content-Security-Policy lists them."""
    hashes = []
    for text in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL):
        digest = hashlib.sha256(text.encode()).digest()
        hashes.append(f"'sha256-{b64encode(digest).decode()}'")
    return " ".join(hashes)
