"""The requests and answers of the server, and the interface of the model behind it.

Knows no model, and of HTTP only the status of a refusal.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

MODES = ("chat", "reasoning", "search")

Message = dict[str, str]  # role and content
Tell = Callable[[dict[str, Any]], None]  # takes an event of the progress of an answer


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
    """One request: a text, the mode and the adapter that answer it, and the `earlier` messages.

    A sampling setting that is None has the server's value. The text and its answer become a turn of the `conversation`,
    if there is one; with `retry` they replace its last turn.
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
    """A passage that was found. Numbers follow the order in which passages were first found.

    `cited` is True if the passage has the answer word for word.
    """

    number: int
    id: str
    title: str
    text: str
    cited: bool = False


@dataclass(frozen=True)
class ServedAnswer:
    """The answer to an ask. `finish` is answered, cut_off or malformed.

    `why` says why there is no answer; None if there is one.
    """

    final_answer: str
    reasoning_trace: str
    search_queries: list[str]
    steps: list[dict[str, Any]]
    sources: list[NumberedPassage]
    finish: str
    why: str | None
    failed: bool  # True if the retriever failed on a query
    prompt_tokens: int  # of the prompt and the documents
    completion_tokens: int  # written by the model
    mode: str = field(kw_only=True)
    adapter: str = field(kw_only=True)


class Answering(Protocol):
    """The model behind the server. One thread uses it, but any may call `prepare`."""

    modes: dict[str, str]  # the default adapter of each mode that can be asked in
    adapters: list[str]
    learned_modes: list[str]  # the part of `modes` that `auto` chooses from
    notes: dict[str, str]  # by mode: what a person who chooses it should know
    missing: dict[str, str]  # by mode that cannot be asked in: the reason
    about: dict[str, Any]  # `model`, `adapters`, `documents`: what is served, by name; `examples`: questions

    def prepare(self, ask: Ask, tell: Tell | None) -> Any:
        """Returns the ask, ready for `join`; raises R3LiteError if it cannot be answered.

        It may be too long, for example, or the chat template may refuse it.
        `tell` is called with each event while the ask is answered.
        """

    def join(self, prepared: Any) -> None:
        """Begins to answer a prepared ask, or lets it wait for its turn."""

    def leave(self, prepared: Any) -> None:
        """Makes a joined ask end soon; nobody waits for its answer."""

    def iterate(self) -> list[tuple[Any, ServedAnswer | None]]:
        """Goes on with all joined asks for a moment; returns the prepared asks that have ended, with their answers.

        An ask that has failed has None instead of an answer; the reason does not concern the other asks.
        """

    def restart(self) -> None:
        """Forgets all that joined, after `iterate` failed."""

    def close(self) -> None:
        """Called last."""
