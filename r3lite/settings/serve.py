"""Settings of the server: where it listens, which adapter answers in which mode, and the limits of requests."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from r3lite.core.config import ANY, Basic, Bounds, Count, InputPath, Positive, Section, UsageError, Whole
from r3lite.core.listening import is_loopback
from r3lite.core.needs import Needs, NeedsOthers
from r3lite.settings.conditions import has_search
from r3lite.settings.model import ADAPTER

# In --adapters, `base` is no path but the model without an adapter.
ADAPTERS = replace(ADAPTER, is_name=lambda entry: entry == "base", has_names=True)


class ListenSettings(Section):
    """Address."""

    host: Basic[str] = "127.0.0.1"
    """address to listen on. Any address but a loopback address needs a token in R3LITE_TOKEN. If R3LITE_TOKEN is set,
    requests must send it as `Authorization: Bearer ...`"""
    port: Basic[Annotated[int, Bounds(low=0, high=65535)]] = 8000
    """port to listen on; 0: any free port, which is printed"""

    @property
    def on_loopback(self) -> bool:
        """Tells whether only this machine can reach the server."""
        return is_loopback(self.host)


class ServerSettings(ListenSettings):
    """Server."""

    cors_origins: tuple[str, ...] | None = None
    """origins whose web pages may call the API, such as https://example.org; default: none"""
    drain_seconds: Positive = 30.0
    """seconds to finish running answers after Ctrl-C or SIGTERM"""

    def check(self) -> None:
        if "*" in (self.cors_origins or ()):
            raise UsageError(
                "--cors-origins is *, which lets any web page call the API: list the origins", code="cors-any-origin"
            )


class ModeSettings(Section):
    """Modes."""

    implied: ClassVar = {"adapters": {ANY: {"worked_example": False}}}
    needs: ClassVar = (
        NeedsOthers("retrieving_modes search_adapter", "a --format and a --retriever that search", has_search),
        Needs("memory_modes conversations memory_kib", "--memory-turns above 0", lambda s: s.memory_turns),
    )

    adapters: Basic[Annotated[tuple[str, ...] | None, ADAPTERS]] = None
    """comma-separated LoRA adapters: NAME=FOLDER, or FOLDER, which is then the name. `base` is the bare model"""
    chat_adapter: str | None = None
    """name of the adapter for Fast Chat (an immediate answer); default: sft if there is one, else the first"""
    reasoning_adapter: str | None = None
    """name of the adapter for Deep Reasoning (steps and an answer); default: rl if there is one, else the last"""
    search_adapter: str | None = None
    """name of the adapter for Search Mode (steps with documents); default: rl if there is one, else the last"""
    retrieving_modes: tuple[Literal["reasoning", "search"], ...] = ("search",)
    """modes in which the model may search; in the others it must answer after its first query"""
    chat_style: Literal["auto", "plain", "answer"] = "auto"
    """plain: chat without the step format; answer: the final answer of a step, without the steps before it; auto: plain
    for the base model, answer for adapters, which were trained on the format"""
    examples: Annotated[str | None, InputPath(remedy="Pass a question file.")] = None
    """question file whose first questions the page offers as examples; default: that of the adapter's run, if it is
    still there"""
    memory_turns: Whole = 10
    """earlier questions of a conversation, with their answers, given to the model with the next question"""
    memory_modes: tuple[Literal["chat", "reasoning", "search"], ...] = ("chat",)
    """modes with this memory; adapters trained on single questions may answer an earlier one instead"""
    conversations: Count = 1000
    """maximum conversations remembered; the least recently used is dropped first"""
    memory_kib: Count = 4096
    """maximum KiB of remembered text"""


class LimitSettings(Section):
    """Limits of requests."""

    max_body_kib: Count = 256
    """maximum KiB of a request"""
    max_requests: Count = 128
    """maximum requests being answered or waiting; further ones get status 503"""
    max_requests_per_client: Count = 64
    """maximum requests of one address being answered or waiting; further ones get status 429"""
    requests_per_minute: Count = 600
    """maximum requests per minute from one address; further ones get status 429"""
    request_seconds: Positive = 300.0
    """maximum seconds for an answer, including the wait for it to start"""
