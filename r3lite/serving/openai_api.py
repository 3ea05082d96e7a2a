"""The routes of OpenAI's chat API for text: /v1/models and /v1/chat/completions.

The name of a model is a mode, or `mode/adapter`. In a mode with steps, all that the model writes is the
`reasoning_content` of the reply, as on other servers of reasoning models, and the final answer is the `content`.
"""

import itertools
import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from r3lite.core.episode import CUT_OFF
from r3lite.serving.asks import Ask, Message, Refusal, ServedAnswer
from r3lite.serving.desk import AUTO, Desk
from r3lite.serving.http import Event, Text, respond

# Fields that the body and its messages may have beside those of the classes below. All others are refused.
# These are ignored, whatever their value: they change no answer.
HARMLESS = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "reasoning_content",
    "refusal",
    "annotations",
}
# These are accepted only with these values, which mean the same as leaving the field out.
NEUTRAL: dict[str, list[Any]] = {
    "n": [1],
    "stop": [[], ""],
    "stop_token_ids": [[]],
    "tools": [[]],
    "functions": [[]],
    "tool_calls": [[]],
    "tool_choice": ["none", "auto"],
    "function_call": ["none", "auto"],
    "logprobs": [False],
    "top_logprobs": [0],
    "logit_bias": [{}],
    "response_format": [{"type": "text"}],
    "modalities": [["text"]],
    "min_p": [0],
    "presence_penalty": [0],
    "frequency_penalty": [0],
    "repetition_penalty": [1],
}


class TextPart(BaseModel, extra="forbid"):
    type: Literal["text"]
    text: Text


class ChatMessage(BaseModel, extra="allow"):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart] | None = None

    @property
    def text(self) -> str:
        """The text of all parts."""
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


class StreamOptions(BaseModel, extra="forbid"):
    include_usage: bool = False


class Completion(BaseModel, extra="allow"):
    """The body of POST /v1/chat/completions."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2, allow_inf_nan=False)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1, allow_inf_nan=False)] = None
    top_k: Annotated[int | None, Field(ge=-1)] = None  # 0 or -1: all tokens
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    seed: int | None = None


def routes_of(desk: Desk) -> APIRouter:
    """Returns the routes in front of a desk."""
    router = APIRouter(prefix="/v1")
    names = names_of(desk)
    models = {name: {"id": name, "object": "model", "created": 0, "owned_by": "r3lite"} for name in names}

    @router.get("/models")
    async def all_models() -> dict[str, Any]:
        return {"object": "list", "data": [*models.values()]}

    @router.get("/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        check_model(name, names)
        return models[name]

    @router.post("/chat/completions")
    async def complete(body: Completion, request: Request) -> Response:
        ask = ask_of(body, desk, names)
        chat_reply = ChatReply(
            head={"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": body.model},
            mode=ask.mode,
            with_usage=body.stream_options is not None and body.stream_options.include_usage,
        )
        return await respond(
            request,
            desk=desk,
            ask=ask,
            reply=chat_reply.completion,
            texts=chat_reply.chunks if body.stream else None,
        )

    return router


def names_of(desk: Desk) -> list[str]:
    """Returns the names of the models: the modes and, if there are several adapters, each mode with each adapter."""
    names = [AUTO, *desk.modes]
    if len(desk.adapters) > 1:
        names += [f"{mode}/{adapter}" for mode, adapter in itertools.product(desk.modes, desk.adapters)]
    return names


def check_model(name: str, names: list[str]) -> None:
    """Raises Refusal if no model has that name."""
    if name not in names:
        message = f"The model {name[:80]!r} does not exist; choose from {', '.join(names)}."
        raise Refusal(404, "model_not_found", message)


def ask_of(body: Completion, desk: Desk, names: list[str]) -> Ask:
    """Returns the ask of a body; raises Refusal for what this server does not support."""
    check_model(body.model, names)
    refuse_extras(body, "")
    for number, message in enumerate(body.messages):
        refuse_extras(message, f"messages.{number}.")
    if body.messages[-1].role != "user":
        raise Refusal(400, "invalid_request", "The last message must have the role user.")
    mode, _, adapter = body.model.partition("/")
    ask = desk.resolve(body.messages[-1].text, mode, adapter or None)
    max_tokens = body.max_completion_tokens or body.max_tokens
    if body.max_tokens not in (None, max_tokens):
        raise Refusal(400, "invalid_request", "max_tokens and max_completion_tokens differ: pass one of them.")
    return replace(
        ask,
        earlier=earlier_messages(body.messages),
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
    )


def earlier_messages(messages: list[ChatMessage]) -> tuple[Message, ...]:
    """Returns the messages before the last one: all instructions as one system message, then the turns."""
    instructions = []
    turns: list[Message] = []
    for message in messages:
        if message.role in ("system", "developer") and message.text:
            instructions.append(message.text)
    for message in messages[:-1]:
        if message.role in ("user", "assistant"):
            turns.append({"role": message.role, "content": message.text})
    if instructions:
        turns.insert(0, {"role": "system", "content": "\n\n".join(instructions)})
    return tuple(turns)


def refuse_extras(part: Completion | ChatMessage, place: str) -> None:
    """Raises Refusal for a field that this server does not support."""
    for name, value in (part.model_extra or {}).items():
        if value is not None and name not in HARMLESS and value not in NEUTRAL.get(name, []):
            raise Refusal(400, "unsupported_parameter", f"This server does not support {place}{name[:80]}.")


@dataclass
class ChatReply:
    """A reply in a mode, as a whole or streamed in chunks."""

    head: dict[str, Any]  # fields that all chunks have in common
    mode: str
    with_usage: bool  # True if, in a stream, the numbers of tokens are a chunk of their own, not part of the last one
    sent: str = ""  # the part of the answer that was streamed so far

    def completion(self, answer: ServedAnswer) -> dict[str, Any]:
        """Returns the reply that is not streamed."""
        message = {"role": "assistant", "content": answer.final_answer}
        if self.mode != "chat":
            message["reasoning_content"] = answer.reasoning_trace
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_of(answer)}
        return self.head | {"object": "chat.completion", "choices": [choice], "usage": usage_of(answer)}

    def chunks(self, event: Event) -> Iterator[str]:
        """Yields the chunks of an event.

        The first event gives the role, the next ones give pieces of text, the last one the finish reason and `[DONE]`.
        """
        if isinstance(event, ServedAnswer):
            yield from self._last_chunks(event)
        elif isinstance(event, Refusal):
            yield json.dumps({"error": {"message": event.message, "type": "server_error", "code": event.code}})
            yield "[DONE]"
        elif event["type"] == "start":
            yield self._chunk({"role": "assistant", "content": ""})
        elif self.mode != "chat":
            piece = event["text"] if event["type"] == "text" else "\n"  # a line break between the turns of two steps
            yield self._chunk({"reasoning_content": piece})
        elif event["type"] == "text":
            piece = (event["answer"] or "").removeprefix(self.sent)
            if piece:
                self.sent += piece
                yield self._chunk({"content": piece})

    def _last_chunks(self, answer: ServedAnswer) -> Iterator[str]:
        # If the answer does not begin with what was streamed, nothing more of it is sent: a text may turn out to be a
        # thought only when `</think>` comes.
        if answer.final_answer.startswith(self.sent):
            unsent = answer.final_answer.removeprefix(self.sent)
            if unsent:
                yield self._chunk({"content": unsent})
        usage = {"usage": usage_of(answer)}
        if self.with_usage:
            yield self._chunk({}, finish_of(answer))
            yield json.dumps(self.head | {"object": "chat.completion.chunk", "choices": []} | usage)
        else:
            yield self._chunk({}, finish_of(answer), usage)
        yield "[DONE]"

    def _chunk(self, delta: dict[str, str], finish: str | None = None, usage: dict[str, Any] | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        chunk = self.head | {"object": "chat.completion.chunk", "choices": [choice]}
        return json.dumps(chunk | (usage or {}))


def finish_of(answer: ServedAnswer) -> str:
    """Returns the reason of the end in the words of OpenAI's API."""
    return "length" if answer.finish == CUT_OFF else "stop"


def usage_of(answer: ServedAnswer) -> dict[str, int]:
    """Returns the numbers of tokens in the words of OpenAI's API."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
