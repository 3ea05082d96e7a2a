"""Settings of the server: where it listens, which adapter answers in which mode, and what nobody may exceed."""

import ipaddress
from typing import Annotated, ClassVar, Literal

from r3lite.core.config import ANY, Bounds, Count, Positive, Section, UsageError, Whole


class ListenSettings(Section):
    """Where it listens."""

    host: str = "127.0.0.1"
    """address to listen on; other than a loopback address it needs a token in R3LITE_TOKEN, which requests then carry
    as `Authorization: Bearer ...`; with R3LITE_TOKEN set they always do"""
    port: Annotated[int, Bounds(low=0, high=65535)] = 8000
    """port to listen on; 0: any free one, which is printed"""

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


class ServerSettings(ListenSettings):
    """Server."""

    cors_origins: tuple[str, ...] | None = None
    """origins whose web pages may call the API, such as https://example.org; default: none"""
    drain_seconds: Positive = 30.0
    """how long answers under way may still take after Ctrl-C or SIGTERM"""

    def check(self) -> None:
        if "*" in (self.cors_origins or ()):
            raise UsageError("--cors-origins is *: name the origins, as any page that is open could ask otherwise")


class ModeSettings(Section):
    """Modes."""

    implied: ClassVar = {"adapters": {ANY: {"worked_example": False}}}

    adapters: tuple[str, ...] | None = None
    """LoRA adapters on the one base, with commas between: NAME=FOLDER, or a FOLDER of that name; `base` is none"""
    chat_adapter: str | None = None
    """name of the adapter of Fast Chat, an answer at once; default: sft if there is one, else the first"""
    reasoning_adapter: str | None = None
    """name of the adapter of Deep Reasoning, steps and an answer; default: rl if there is one, else the last"""
    search_adapter: str | None = None
    """name of the adapter of Search Mode, steps with documents; default: rl if there is one, else the last"""
    retrieving_modes: tuple[Literal["reasoning", "search"], ...] = ("search",)
    """modes in which the model may search; in others its first query makes it answer with what it knows"""
    chat_style: Literal["auto", "plain", "answer"] = "auto"
    """plain: a chat without step format; answer: the final answer of a step, which is forced at once; auto: plain for
    the bare base, answer for adapters, which learned the format"""
    memory_turns: Whole = 10
    """questions of a conversation, with their answers, that are given to the model with the next one"""
    memory_modes: tuple[Literal["chat", "reasoning", "search"], ...] = ("chat",)
    """modes in which they are given; adapters that learned steps from single questions may answer an earlier one"""
    conversations: Count = 1000
    """conversations that are remembered; the least recently used is dropped first"""
    memory_kib: Count = 4096
    """most KiB of text that are remembered in all"""


class LimitSettings(Section):
    """Limits of requests."""

    max_body_kib: Count = 256
    """most KiB of a request"""
    max_requests: Count = 128
    """requests that are answered or wait; more are refused for now (503)"""
    max_requests_per_client: Count = 64
    """the same, of one address (429)"""
    requests_per_minute: Count = 600
    """of one address (429)"""
    request_seconds: Positive = 300.0
    """seconds that an answer may take, waiting included"""
