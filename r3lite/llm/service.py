"""What the client needs of a kind of server: how it is asked, what its answers mean, where its key is."""

import os
import re
from typing import ClassVar, Protocol

from r3lite.core.errors import R3LiteError
from r3lite.core.records import InvalidRecord, Record, Source, parse
from r3lite.llm.replies import Answer, Request

# More output tokens, because thoughts count against the limit: for a model that thinks, and for one set to think
# as little as it can.
THINKING_ROOM, LEAST_THINKING_ROOM = 8192, 512


class Service(Protocol):
    """How one kind of server is asked, and what its answers mean."""

    secret: str  # the key; empty if there is none
    key_remedy: str  # what to do if it is not accepted
    room: int  # output tokens that a request is given beyond its own, for the model's thoughts
    # What a reply depends on beside the request and the settings that all services have: part of its name in the cache.
    # Nothing for Gemini, with which the cache began.
    circumstances: ClassVar[dict] = {}

    async def send(self, request: Request, limit: int) -> str:
        """The body of the server's reply; at most `limit` tokens are to be written."""

    def read_answer(self, body: str, prompt_tokens: float, limit: int) -> Answer:
        """What the body of a reply says; raises InvalidRecord if it is none."""

    def gives_way(self, reason: str) -> str | None:
        """After a refusal: how requests will be made from now on, to be said; None if there is no other way."""
        return None


def read_complaint(body: str) -> tuple[str, str, tuple[str, ...]]:
    """What the body of an error says: the name of its status, its message, and the seconds to wait that it names.

    It is {"error": {"message", "code" or "status"}}, of some servers the inner object alone or a text. One of another
    form is its own message.
    """
    try:
        whole = Record(parse(body), Source(""))
        if isinstance(whole.values.get("error"), str):
            return "", whole.text("error"), ()
        error = whole.record("error") if "error" in whole else whole
        names = [name for name in map(error.values.get, ("status", "code")) if isinstance(name, str)]
        delays = tuple(d.text("retryDelay", "", blank=True) for d in error.records("details", []))  # of Gemini
        return names[0] if names else "", error.text("message", body, blank=True), delays
    except InvalidRecord:
        return "", body, ()


def read_key(service: str, names: tuple[str, ...], remedy: str) -> str:
    """The key in the first of these variables of the environment that has one; empty if none has.

    Raises R3LiteError if it is no key.
    """
    key = next((key for name in names if (key := os.environ.get(name, "").strip())), "")
    if not re.fullmatch(r"[!-~]*", key):  # the error of a header that cannot be sent would show it
        raise R3LiteError(f"the key for {service} holds characters that no key has, such as spaces", remedy)
    return key
