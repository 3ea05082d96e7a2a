"""The routes of OpenAI's chat API, as far as it is about text: /v1/models and /v1/chat/completions.

A model is a mode, or `mode/adapter`. What it writes in a mode with steps is `reasoning_content`, as other servers of
reasoning models have it, and its final answer is the content.
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
from r3lite.serving.asks import Answer, Ask, Refusal
from r3lite.serving.asks import Message as Said
from r3lite.serving.desk import AUTO, Desk
from r3lite.serving.http import Event, Text, respond

# What changes no answer, and values of other fields that ask for what is done anyway. All else is refused by its name.
HARMLESS = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "reasoning_content", "refusal", "annotations",
}  # fmt: skip
NEUTRAL: dict[str, list[Any]] = {
    "n": [1], "stop": [[], ""], "stop_token_ids": [[]], "tools": [[]], "functions": [[]], "tool_calls": [[]],
    "tool_choice": ["none", "auto"], "function_call": ["none", "auto"], "logprobs": [False], "top_logprobs": [0],
    "logit_bias": [{}], "response_format": [{"type": "text"}], "modalities": [["text"]], "min_p": [0],
    "presence_penalty": [0], "frequency_penalty": [0], "repetition_penalty": [1],
}  # fmt: skip


class Part(BaseModel, extra="forbid"):
    type: Literal["text"]
    text: Text


class Message(BaseModel, extra="allow"):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[Part] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str) or self.content is None:
            return self.content or ""
        return "\n".join(part.text for part in self.content)


class StreamOptions(BaseModel, extra="forbid"):
    include_usage: bool = False


class Completion(BaseModel, extra="allow"):
    """The body of POST /v1/chat/completions."""

    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2, allow_inf_nan=False)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1, allow_inf_nan=False)] = None
    top_k: Annotated[int | None, Field(ge=-1)] = None  # 0 or -1: all tokens
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    seed: int | None = None


def routes_of(desk: Desk) -> APIRouter:
    """The routes in front of a desk."""
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
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": body.model}
        usage = body.stream_options is not None and body.stream_options.include_usage
        reply = Reply(head, ask.mode, usage)
        return await respond(request, desk, ask, reply.whole, reply.chunks if body.stream else None)

    return router


def names_of(desk: Desk) -> list[str]:
    """The models that can be asked: modes, and if there are several adapters each mode with each of them."""
    pairs = [f"{mode}/{adapter}" for mode, adapter in itertools.product(desk.modes, desk.adapters)]
    return [AUTO, *desk.modes, *(pairs if len(desk.adapters) > 1 else [])]


def check_model(name: str, names: list[str]) -> None:
    """Raises Refusal if no model has that name."""
    if name not in names:
        message = f"The model {name[:80]!r} does not exist; choose from {', '.join(names)}."
        raise Refusal(404, "model_not_found", message)


def ask_of(body: Completion, desk: Desk, names: list[str]) -> Ask:
    """What a body asks; Refusal for what nothing here does."""
    check_model(body.model, names)
    refuse_extras(body, "")
    for number, message in enumerate(body.messages):
        refuse_extras(message, f"messages.{number}.")
    if body.messages[-1].role != "user":
        raise Refusal(400, "invalid_request", "The last message must have the role user.")
    mode, _, adapter = body.model.partition("/")
    ask = desk.settled(body.messages[-1].text, mode, adapter or None)
    instructions = "\n\n".join(m.text for m in body.messages if m.role in ("system", "developer") and m.text)
    system: tuple[Said, ...] = ({"role": "system", "content": instructions},) if instructions else ()
    said = tuple({"role": m.role, "content": m.text} for m in body.messages[:-1] if m.role in ("user", "assistant"))
    most = body.max_completion_tokens or body.max_tokens
    if body.max_tokens not in (None, most):
        raise Refusal(400, "invalid_request", "max_tokens and max_completion_tokens differ: pass one of them.")
    drawn = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k, "seed": body.seed}
    return replace(ask, earlier=system + said, max_tokens=most, **drawn)


def refuse_extras(given: Completion | Message, place: str) -> None:
    """Raises Refusal for a field that nothing here does."""
    for name, value in (given.model_extra or {}).items():
        if value is not None and name not in HARMLESS and value not in NEUTRAL.get(name, []):
            raise Refusal(400, "unsupported_parameter", f"This server does not support {place}{name[:80]}.")


@dataclass
class Reply:
    """A reply in a mode; `head` is what its chunks have in common. The usage of a streamed one comes in a chunk of its
    own if it is asked for, and else in the last one."""

    head: dict[str, Any]
    mode: str
    with_usage: bool
    sent: str = ""  # of the answer, in chunks

    def whole(self, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.final_answer}
        if self.mode != "chat":
            message["reasoning_content"] = answer.reasoning_trace
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_of(answer)}
        return self.head | {"object": "chat.completion", "choices": [choice], "usage": usage_of(answer)}

    def chunks(self, event: Event) -> Iterator[str]:
        """Of the start the role, then what is written piece by piece, at last the reason of the end and `[DONE]`."""
        if isinstance(event, Answer):
            if rest := event.final_answer.removeprefix(self.sent):
                yield self._chunk({"content": rest})
            usage = {"usage": usage_of(event)}
            yield self._chunk({}, finish_of(event), **({} if self.with_usage else usage))
            if self.with_usage:
                yield json.dumps(self.head | {"object": "chat.completion.chunk", "choices": [], **usage})
            yield "[DONE]"
        elif isinstance(event, Refusal):
            yield json.dumps({"error": {"message": event.message, "type": "server_error", "code": event.code}})
            yield "[DONE]"
        elif event["type"] == "start":
            yield self._chunk({"role": "assistant", "content": ""})
        elif self.mode != "chat":
            yield self._chunk({"reasoning_content": event["text"] if event["type"] == "text" else "\n"})
        elif event["type"] == "text" and (more := (event["answer"] or "").removeprefix(self.sent)):
            self.sent += more
            yield self._chunk({"content": more})

    def _chunk(self, delta: dict[str, str], finish: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return json.dumps(self.head | {"object": "chat.completion.chunk", "choices": [choice], **more})


def finish_of(answer: Answer) -> str:
    return "length" if answer.finish == CUT_OFF else "stop"


def usage_of(answer: Answer) -> dict[str, int]:
    given, written = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": given, "completion_tokens": written, "total_tokens": given + written}
