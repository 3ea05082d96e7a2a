"""Requests to a remote model, its replies, and the replies kept on disk.

Knows no network. A reply that failed is a `Reply` with the kind of its failure; failures are never kept.
"""

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from r3lite.errors import R3LiteError
from r3lite.files import write_text

FAILURES = {
    "timeout": "no reply in time",
    "connection": "no connection, or a broken one",
    "rate_limited": "the server asked to come back later (429)",
    "server": "the server failed (5xx)",
    "refused": "the server refused the request (4xx)",
    "blocked": "the prompt or the reply was blocked",
    "cut": "the reply was cut at the output limit",
    "empty": "the reply holds no text",
    "malformed": "the reply is no JSON, or no reply at all",
    "schema": "the reply is JSON of another form than was asked for",
    "capped": "a cap on requests or cost forbade the request",
}


@dataclass(frozen=True)
class Request:
    """One prompt. With a `schema`, a pydantic model, the reply is JSON of that form.

    `check` may refuse a value that has the right form. `nonce` sets apart requests that are otherwise equal: equal
    requests get one reply, so each sample at a temperature above 0 needs its own.
    """

    prompt: str
    system: str | None = None
    schema: type | None = None
    temperature: float = 0.0
    max_output_tokens: int = 2048
    nonce: str = ""
    check: Callable[[Any], bool] | None = None


@dataclass(frozen=True)
class Reply:
    """`text` of the reply and, with a schema, its `value`; or the kind of `failure` (see FAILURES) and its `detail`."""

    value: Any = None
    text: str = ""
    failure: str | None = None
    detail: str = ""
    cached: bool = False


def parse(text: str, request: Request) -> Reply:
    """A reply's text as what the request asked for."""
    if request.schema is None:
        return Reply(text=text)
    try:
        data = json.loads(text)
    except ValueError as error:
        return Reply(text=text, failure="malformed", detail=str(error))
    try:
        value = request.schema.model_validate(data)
    except ValueError as error:  # pydantic.ValidationError
        return Reply(text=text, failure="schema", detail=str(error))
    if request.check and not request.check(value):
        return Reply(text=text, failure="schema", detail="the right form, but not about what was asked")
    return Reply(value, text)


def digest(request: Request, circumstances: dict) -> str:
    """A name for all that a reply depends on: the request and the circumstances (model, address, ...)."""
    parts = {k: getattr(request, k) for k in ("prompt", "system", "temperature", "max_output_tokens", "nonce")}
    parts["schema"] = request.schema and request.schema.model_json_schema()
    return hashlib.sha256(json.dumps(circumstances | parts, sort_keys=True).encode()).hexdigest()


class ReplyCache:
    """A folder of replies, one JSON file each, by digest; without a folder it keeps nothing."""

    def __init__(self, folder: Path | None):
        self.folder = folder
        self._lock = threading.Lock()

    def recall(self, key: str, request: Request) -> Reply | None:
        """The reply kept under a key; None where there is none, or where the file holds something else."""
        if self.folder is None:
            return None
        try:
            record = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
            reply = parse(record["text"], request)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return replace(reply, cached=True) if reply.failure is None else None

    def store(self, key: str, reply: Reply) -> None:
        """Keeps a reply; raises R3LiteError where the folder cannot be written."""
        if self.folder is None:
            return
        try:
            with self._lock:  # equal requests of two threads would share a temporary file
                write_text(self.folder / f"{key}.json", json.dumps({"text": reply.text}, ensure_ascii=False) + "\n")
        except OSError as error:
            remedy = "Make room, or pass --judge-cache FOLDER."
            raise R3LiteError(f"replies cannot be cached in {self.folder}: {error}", remedy) from error
