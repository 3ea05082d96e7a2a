"""Requests to a remote model, its replies, and the interface of a `Service`: how one kind of server is asked.

Knows no network. A reply that failed is a `Reply` with the kind of its failure, not an exception.
"""

import itertools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from r3lite.core import records
from r3lite.core.errors import R3LiteError
from r3lite.core.records import InvalidRecord, Record, Source

# The beginning of a fenced block with JSON, which models write where nothing holds them to a schema.
FENCED = re.compile(r"```\w*\s*(?=[\[{])")
THINKING_ROOM = 8192  # further output tokens for a model that thinks, since thoughts count against the limit
BYTES_PER_TOKEN = 3  # English has about 4: estimates are too high rather than too low

FAILURES = {
    "timeout": "no reply in time",
    "connection": "no connection, or it was closed",
    "rate_limited": "the server limits the rate of requests (429)",
    "server": "the server failed (5xx)",
    "refused": "the server refused the request (4xx)",
    "blocked": "the prompt or the reply was blocked",
    "cut": "the reply was cut at the output limit",
    "empty": "the reply has no text",
    "malformed": "the reply is not valid JSON",
    "schema": "the reply is JSON, but not of the requested form",
    "too_large": "the reply is longer than 4 MiB",
    "too_long": "request and reply do not fit in --judge-max-length or in the model's context",
    "capped": "--judge-max-calls or --judge-max-cost is reached",
}


@dataclass(frozen=True)
class Request:
    """One prompt, or the last turn of a chat. With a `schema`, a JSON schema as a dictionary, the reply is such JSON.

    `earlier` are the turns before the prompt, alternately the user's and the model's. `read` makes a typed value of the
    JSON value, or raises ValueError if it is not what was asked for. `nonce` sets apart requests that are otherwise
    equal: equal requests get one reply, so each of several samples needs a nonce of its own.
    """

    prompt: str
    system: str | None = None
    earlier: tuple[str, ...] = ()
    schema: dict[str, Any] | None = None
    read: Callable[[Any], Any] | None = None  # None exactly if there is no schema
    max_output_tokens: int = 2048
    nonce: str = ""

    def __post_init__(self):
        assert (self.schema is None) == (self.read is None), "a schema and its reader come together"
        assert len(self.earlier) % 2 == 0, "the prompt is the user's turn"

    def turns(self, model_role: str) -> list[tuple[str, str]]:
        """Returns the turns as (role, text), the prompt last. Roles alternate between "user" and `model_role`."""
        roles = itertools.cycle(("user", model_role))
        return list(zip(roles, (*self.earlier, self.prompt)))

    @property
    def parts(self) -> dict[str, Any]:
        """The parts of the request that a reply depends on, by name."""
        names = ("prompt", "system", "earlier", "max_output_tokens", "nonce", "schema")
        return {name: getattr(self, name) for name in names}

    @property
    def texts(self) -> tuple[str, ...]:
        """All text of the request but the schema."""
        return (self.system or "", *self.earlier, self.prompt)


@dataclass(frozen=True)
class Reply:
    """`text` of the reply and, with a schema, its `value`; or the kind of `failure` (see FAILURES) and its `detail`."""

    value: Any = None
    text: str = ""
    failure: str | None = None
    detail: str = ""
    cached: bool = False


@dataclass(frozen=True)
class Answer:
    """The text of a server's reply without thoughts, the kind of its failure (see FAILURES), and its tokens.

    Thoughts count as output. A blank text has no failure here: the client turns it into the failure "empty".
    """

    text: str
    failure: str | None
    detail: str
    input_tokens: float
    output_tokens: float


def estimated_tokens(*texts: str) -> float:
    """Returns an estimate, rather too high, of how many tokens the texts have together."""
    return sum(len(text.encode(errors="replace")) for text in texts) / BYTES_PER_TOKEN


def token_count(usage: Record, key: str) -> int | None:
    """Returns a count of tokens, 0 if it is missing; None if it is not a count."""
    try:
        return usage.whole(key, 0)
    except InvalidRecord:
        return None


def parse(text: str, request: Request) -> Reply:
    """Returns the reply to a request that has this text. Its JSON may stand after thoughts or in a fenced block."""
    if request.read is None:
        return Reply(text=text)
    try:
        data = records.parse(_json_of(text))
    except InvalidRecord as error:
        return Reply(text=text, failure="malformed", detail=str(error))
    try:
        return Reply(request.read(data), text)
    except ValueError as error:
        return Reply(text=text, failure="schema", detail=str(error))


def _json_of(text: str) -> str:
    """Returns the part of a reply that should be JSON: what a fenced block holds, or else all that follows thoughts."""
    body = text.strip()
    if body.startswith(("{", "[")):
        return body
    body = body.rpartition("</think>")[2]
    fence = FENCED.search(body)
    if not fence:
        return body
    return body[fence.end() : body.rfind("```")]


def recalled(record: Record, request: Request) -> Reply:
    """Returns the reply in a record of the cache; raises InvalidRecord if it is not of the form that is requested."""
    reply = parse(record.text("text"), request)
    if reply.failure:
        raise record.error(f"not of the requested form: {reply.detail}")
    return replace(reply, cached=True)


class Service(Protocol):
    """Asks one kind of server, and reads its answers."""

    secret: str  # the key; empty if there is none
    key_remedy: str  # what to do if the key is not accepted
    room: int  # output tokens that a request is given beyond its own, for the model's thoughts
    # What a reply depends on beside the request and the settings that all services have: part of its name in the cache.
    # Nothing for Gemini, with which the cache began.
    circumstances: ClassVar[dict] = {}

    async def send(self, request: Request, limit: int) -> str:
        """Returns the body of the server's reply; at most `limit` tokens are to be written."""

    def read_answer(self, body: str, prompt_tokens: float, limit: int) -> Answer:
        """Returns what the body of a reply says; raises InvalidRecord if the body is not that of a reply."""

    def gives_way(self, reason: str) -> str | None:
        """Changes how requests are made, after a refusal with the message `reason`; returns the change in words.

        Returns None if nothing can be changed.
        """
        return None


def read_complaint(body: str) -> tuple[str, str, tuple[str, ...]]:
    """Returns what the body of an error says: the name of its status, its message, and texts such as "11s" that name
    the seconds to wait.

    The body is {"error": {"message", "code" or "status"}}; some servers send the inner object alone, or a text as
    "error". A body of another form is the message itself.
    """
    try:
        record = Record(records.parse(body), Source(""))
        if isinstance(record.values.get("error"), str):
            return "", record.text("error"), ()
        error = record.record("error") if "error" in record else record
        names = [error.values.get(key) for key in ("status", "code")]
        name = next((name for name in names if isinstance(name, str)), "")
        details = error.records("details", [])  # of Gemini
        delays = tuple(detail.text("retryDelay", "", blank=True) for detail in details)
        return name, error.text("message", body, blank=True), delays
    except InvalidRecord:
        return "", body, ()


def read_key(service: str, names: tuple[str, ...], remedy: str) -> str:
    """Returns the key in the first of these variables of the environment that has one; empty if none has.

    Raises R3LiteError if the value cannot be a key.
    """
    values = [os.environ.get(name, "").strip() for name in names]
    key = next(filter(None, values), "")
    if not re.fullmatch(r"[!-~]*", key):  # a header with it fails, and the error would show it
        raise R3LiteError(f"the key for {service} has invalid characters, such as spaces", remedy, code="key-malformed")
    return key
