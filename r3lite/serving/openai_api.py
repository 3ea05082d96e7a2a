"""The routes of OpenAI's chat API, as far as it is about text: /v1/models and /v1/chat/completions.

A model is a mode, or `mode/adapter`. What it writes in a mode with steps is `reasoning_content`, as other servers of
reasoning models have it, and its final answer is the content.
"""

import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, Field

from r3lite.core.episode import CUT_OFF
from r3lite.serving.asks import Answer, Ask, Refusal
from r3lite.serving.asks import Message as Said
from r3lite.serving.desk import AUTO, Desk
from r3lite.serving.guard import Text, client_of
from r3lite.serving.streams import STREAM, Events, answer_of, server_sent

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
        events = desk.answer(client_of(request.scope), ask, bool(body.stream))
        start = await anext(events)
        reply = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": body.model}
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return StreamingResponse(server_sent(chunks(reply, ask, start, events, usage)), media_type=STREAM)
        answer = await answer_of(request, events)
        message = {"role": "assistant", "content": answer.final_answer}
        if ask.mode != "chat":
            message["reasoning_content"] = answer.reasoning_trace
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_of(answer)}
        whole = reply | {"object": "chat.completion", "choices": [choice], "usage": usage_of(answer)}
        return Response(json.dumps(whole), media_type="application/json")

    return router


def names_of(desk: Desk) -> list[str]:
    """The models that can be asked: modes, and if there are several adapters each mode with each of them."""
    pairs = [f"{mode}/{adapter}" for mode, adapter in itertools.product(desk.modes, desk.adapters)]
    return [AUTO, *desk.modes, *(pairs if len(desk.adapters) > 1 else [])]


def check_model(name: str, names: list[str]) -> None:
    """Raises Refusal if there is no model of that name."""
    if name not in names:
        known = ", ".join(names)
        raise Refusal(404, "model_not_found", f"The model {name[:80]!r} does not exist; there are {known}.")


def ask_of(body: Completion, desk: Desk, names: list[str]) -> Ask:
    """What a body asks; Refusal for what nothing here does."""
    check_model(body.model, names)
    refuse_extras(body, "")
    for number, message in enumerate(body.messages):
        refuse_extras(message, f"messages.{number}.")
    if body.messages[-1].role != "user":
        raise Refusal(400, "invalid_request", "The last message must be of the user.")
    mode, _, adapter = body.model.partition("/")
    ask = desk.settled(body.messages[-1].text, mode, adapter or None)
    instructions = "\n\n".join(m.text for m in body.messages if m.role in ("system", "developer") and m.text)
    system: tuple[Said, ...] = ({"role": "system", "content": instructions},) if instructions else ()
    said = tuple({"role": m.role, "content": m.text} for m in body.messages[:-1] if m.role in ("user", "assistant"))
    most = body.max_completion_tokens or body.max_tokens
    if body.max_tokens not in (None, most):
        raise Refusal(400, "invalid_request", "max_tokens and max_completion_tokens mean the same: pass one of them.")
    drawn = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k, "seed": body.seed}
    return replace(ask, earlier=system + said, max_tokens=most, **drawn)


def refuse_extras(given: Completion | Message, place: str) -> None:
    """Raises Refusal for a field that nothing here does."""
    for name, value in (given.model_extra or {}).items():
        if value is not None and name not in HARMLESS and value not in NEUTRAL.get(name, []):
            raise Refusal(400, "unsupported_parameter", f"This server does not support {place}{name[:80]}.")


async def chunks(
    reply: dict[str, Any], ask: Ask, start: dict[str, Any], events: Events, with_usage: bool
) -> AsyncIterator[str]:
    """The chunks of a streamed reply: the role, what is written piece by piece, the reason of its end, `[DONE]`.

    The usage comes in a chunk of its own if it is asked for, and else in the last one.
    """

    def chunk(delta: dict[str, str], finish: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return json.dumps(reply | {"object": "chat.completion.chunk", "choices": [choice], **more})

    sent = ""  # of the answer
    async with aclosing(events):
        yield chunk({"role": "assistant", "content": ""})
        try:
            async for event in events:
                if isinstance(event, Answer):
                    if rest := event.final_answer.removeprefix(sent):
                        yield chunk({"content": rest})
                    usage = usage_of(event)
                    yield chunk({}, finish_of(event), **({} if with_usage else {"usage": usage}))
                    if with_usage:
                        yield json.dumps(reply | {"object": "chat.completion.chunk", "choices": [], "usage": usage})
                elif ask.mode == "chat":
                    if event["type"] == "text" and (more := (event["answer"] or "").removeprefix(sent)):
                        sent += more
                        yield chunk({"content": more})
                elif event["type"] == "text":
                    yield chunk({"reasoning_content": event["text"]})
                else:
                    yield chunk({"reasoning_content": "\n"})
        except Refusal as refusal:
            yield json.dumps({"error": {"message": refusal.message, "type": "server_error", "code": refusal.code}})
        yield "[DONE]"


def finish_of(answer: Answer) -> str:
    return "length" if answer.finish == CUT_OFF else "stop"


def usage_of(answer: Answer) -> dict[str, int]:
    given, written = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": given, "completion_tokens": written, "total_tokens": given + written}
