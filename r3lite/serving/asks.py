"""What is asked of the server and what it answers, and what answers for it. Knows no HTTP and no model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

MODES = ("chat", "reasoning", "search")

Message = dict[str, str]  # role and content
Tell = Callable[[dict[str, Any]], None]


class Refusal(Exception):
    """A request that gets no answer: the HTTP status that says so, and what a person can do."""

    def __init__(self, status: int, code: str, message: str, retry_after: float | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after = retry_after  # seconds


@dataclass(frozen=True)
class Ask:
    """One request: what is asked in which mode of which adapter, after which messages. None: as the server is set.

    The answer is remembered in the `conversation`; of a `retry` in place of the last one.
    """

    text: str
    mode: str
    adapter: str
    earlier: tuple[Message, ...] = ()
    conversation: str | None = None
    retry: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None


@dataclass(frozen=True)
class NumberedPassage:
    """A passage that was found, numbered in the order in which it was first found; `cited` if it has the answer."""

    number: int
    id: str
    title: str
    text: str
    cited: bool = False


@dataclass(frozen=True)
class ServedAnswer:
    """The end of an ask. `finish` is answered, cut_off or malformed; `why` says why there is no answer."""

    final_answer: str
    reasoning_trace: str
    search_queries: list[str]
    steps: list[dict[str, Any]]
    sources: list[NumberedPassage]
    finish: str
    why: str | None
    failed: bool  # the retriever failed on a query
    prompt_tokens: int  # given: the prompt and the documents
    completion_tokens: int  # written by the model
    mode: str = field(kw_only=True)
    adapter: str = field(kw_only=True)


class Answering(Protocol):
    """The model behind the server. One thread uses it, but any may call `prepare`."""

    modes: dict[str, str]  # of those that can be asked in, the adapter
    adapters: list[str]
    learned_modes: list[str]  # of `modes`, those that `auto` chooses from
    notes: dict[str, str]  # by mode, what a person should know who chooses it
    missing: dict[str, str]  # by mode that cannot be asked in, why
    about: dict[str, Any]  # `model`, `adapters`, `documents`: what is served, by name; `examples`: questions

    def prepare(self, ask: Ask, tell: Tell | None) -> Any:
        """Returns the ask, ready to join; R3LiteError if it is too long. `tell` gets what happens while it is
        answered."""

    def join(self, prepared: Any) -> None:
        """Begins to answer it, or has it wait for its turn."""

    def leave(self, prepared: Any) -> None:
        """Has it end soon, without an answer."""

    def iterate(self) -> list[tuple[Any, ServedAnswer | None]]:
        """Goes on with all of them for a moment; returns those that ended, without an answer if one has failed for a
        reason that concerns no other."""

    def restart(self) -> None:
        """Forgets all that joined, after `iterate` failed."""

    def close(self) -> None:
        """Called last."""
