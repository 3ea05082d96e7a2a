"""OpenAI and servers that speak its /chat/completions (vLLM, llama.cpp, Ollama) as a service of the client.

The key is read from OPENAI_API_KEY; your own server (--judge-base-url) needs none. `response_format` has the schema of
the JSON. These servers make a model keep to it; the reply is checked all the same.
"""

import re
from typing import ClassVar

from r3lite.core.errors import R3LiteError
from r3lite.core.records import Record, Source, parse
from r3lite.llm.http_client import BoundedClient
from r3lite.llm.replies import THINKING_ROOM, Answer, Request, Service, estimated_tokens, read_key, token_count
from r3lite.settings import JudgeSettings

ADDRESS = "https://api.openai.com/v1"
GET_A_KEY = "Set OPENAI_API_KEY, or pass another server, such as --judge-base-url http://127.0.0.1:8000/v1."
THOUGHTS = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)  # some servers put a reasoning model's thoughts there


class OpenAIService(Service):
    """The model --judge-model at --judge-base-url, which ends before /chat/completions."""

    key_remedy = "Set OPENAI_API_KEY to a valid key."
    circumstances: ClassVar[dict] = {"service": "openai"}

    def __init__(self, settings: JudgeSettings):
        self.settings = settings
        self.secret = read_key("OpenAI", ("OPENAI_API_KEY",), GET_A_KEY)
        if not self.secret and settings.judge_base_url is None:
            raise R3LiteError(
                "there is no key for OpenAI: OPENAI_API_KEY is not set", GET_A_KEY, code="openai-key-missing"
            )
        self._address = f"{(settings.judge_base_url or ADDRESS).rstrip('/')}/chat/completions"
        self._client = BoundedClient()
        self.room = THINKING_ROOM if settings.judge_thinking else 0
        # Newer models of OpenAI refuse the old name of the limit, max_tokens; some other servers know only that one.
        self._limit_name = "max_completion_tokens" if settings.judge_base_url is None else "max_tokens"
        self._untried_names = {"max_tokens", "max_completion_tokens"} - {self._limit_name}

    def gives_way(self, reason: str) -> str | None:
        if not self._untried_names or self._limit_name not in reason:
            return None
        self._limit_name = self._untried_names.pop()
        return f"needs {self._limit_name}; continuing with it"

    async def send(self, request: Request, limit: int) -> str:
        turns = request.turns("assistant")
        if request.system:
            turns = [("system", request.system), *turns]
        messages = [{"role": role, "content": text} for role, text in turns]
        body = {"model": self.settings.judge_model, "messages": messages, self._limit_name: limit}
        if request.schema:
            schema = {"name": "reply", "strict": True, "schema": closed(request.schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.settings.judge_temperature is not None:
            body["temperature"] = self.settings.judge_temperature
        headers = {"authorization": f"Bearer {self.secret}"} if self.secret else {}
        timeout = self.settings.judge_timeout  # of each read; the whole call has the same limit (`Calls`)
        response = await self._client.post(self._address, json=body, headers=headers, timeout=timeout)
        return response.text

    def read_answer(self, body: str, prompt_tokens: float, limit: int) -> Answer:
        """Returns what the body says, as `Service.read_answer` does.

        A count of tokens that is missing, zero or no count is replaced by an estimate.
        """
        reply = Record(parse(body), Source("the reply"))
        usage = reply.record("usage")
        choices = reply.records("choices", [])
        text = ""
        reason = "no choice"
        refusal = ""
        if choices:
            message = choices[0].record("message")
            text = THOUGHTS.sub("", message.text("content", "", blank=True), count=1)
            refusal = message.text("refusal", "", blank=True)
            reason = choices[0].text("finish_reason", "stop")
        failure = None
        if reason == "length":
            failure = "cut"
        elif reason == "content_filter" or refusal:
            failure = "blocked"
        return Answer(
            text=text,
            failure=failure,
            detail=refusal or reason,
            input_tokens=token_count(usage, "prompt_tokens") or prompt_tokens,
            output_tokens=token_count(usage, "completion_tokens") or max(estimated_tokens(text), 1.0),
        )


def closed(schema: dict) -> dict:
    """Returns a JSON schema whose objects forbid further keys, as `strict` asks."""
    strict: dict = {}
    for key, value in schema.items():
        if key in ("properties", "$defs"):  # names that are not keywords
            strict[key] = {name: closed(inner) for name, inner in value.items()}
        else:
            strict[key] = closed(value) if isinstance(value, dict) else value
    if schema.get("type") == "object":
        strict["additionalProperties"] = False
    return strict
