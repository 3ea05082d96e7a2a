"""The service Gemini: requests go through Google's library; the key is in GOOGLE_API_KEY or GEMINI_API_KEY."""

import copy
import re

from google import genai
from google.genai import types

from r3lite.core.errors import R3LiteError
from r3lite.core.records import Record, Source, parse
from r3lite.llm.http_client import BoundedClient
from r3lite.llm.replies import THINKING_ROOM, Answer, Request, Service, estimated_tokens, read_key, token_count
from r3lite.settings import JudgeSettings

SMALLEST_THINKING_ROOM = 512  # output tokens of a model that is set to think as little as it can
KEYS = ("GOOGLE_API_KEY", "GEMINI_API_KEY")
GET_A_KEY = "Get one at https://aistudio.google.com/apikey and set GOOGLE_API_KEY to it."
BLOCKED = ("SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "MODEL_ARMOR", "LANGUAGE")
FAILURES = {"MAX_TOKENS": "cut"} | dict.fromkeys(BLOCKED, "blocked")  # by the reason why a reply ended


class GeminiService(Service):
    """Asks --judge-model. Requests say whether to think, until the model refuses that field."""

    key_remedy = "Set GOOGLE_API_KEY to a valid key."

    def __init__(self, settings: JudgeSettings):
        self.settings = settings
        self.secret = read_key("Gemini", KEYS, GET_A_KEY)
        if not self.secret:
            cause = "there is no key for Gemini: neither GOOGLE_API_KEY nor GEMINI_API_KEY is set"
            raise R3LiteError(cause, GET_A_KEY, code="gemini-key-missing")
        options = types.HttpOptions(
            timeout=round(settings.judge_timeout * 1000),  # milliseconds
            base_url=settings.judge_base_url,
            httpx_async_client=BoundedClient(),
        )
        self._models = genai.Client(api_key=self.secret, vertexai=False, http_options=options).aio.models
        self._thinking, self.room = thinking(settings.judge_model, settings.judge_thinking)

    def gives_way(self, reason: str) -> str | None:
        if not self._thinking or "think" not in reason.lower():
            return None
        self._thinking = {}
        self.room = THINKING_ROOM
        return "refuses a thinking level; continuing without one"

    async def send(self, request: Request, limit: int) -> str:
        """Returns the body as it came: the library would trust what it reads."""
        config = types.GenerateContentConfig(
            system_instruction=request.system,
            temperature=self.settings.judge_temperature,
            max_output_tokens=limit,
            response_mime_type="application/json" if request.schema else None,
            response_schema=copy.deepcopy(request.schema),  # the library changes it
            thinking_config=types.ThinkingConfig(**self._thinking) if self._thinking else None,
            automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
            should_return_http_response=True,
        )
        turns = [types.Content(role=role, parts=[types.Part(text=text)]) for role, text in request.turns("model")]
        model = self.settings.judge_model
        response = await self._models.generate_content(model=model, contents=turns, config=config)
        return response.sdk_http_response.body

    def read_answer(self, body: str, prompt_tokens: float, limit: int) -> Answer:
        """Returns what the body says, as `Service.read_answer` does.

        A count of tokens that is missing, zero or no count is replaced by an estimate, so that no reply is free. If the
        count of thoughts is missing, there are none; if it is no count, it is replaced by the limit.
        """
        reply = Record(parse(body), Source("the reply"))
        candidates = reply.records("candidates", [])
        usage = reply.record("usageMetadata")
        if candidates:
            first = candidates[0]
            parts = first.record("content").records("parts", [])
            spoken = [part for part in parts if not part.flag("thought", False)]
            text = "".join(part.text("text", "", blank=True) for part in spoken)
            detail = first.text("finishReason", "STOP")
            failure = FAILURES.get(detail)
        else:
            reason = reply.record("promptFeedback").text("blockReason", "")
            text = ""
            detail = f"prompt: {reason or 'no reason given'}"
            failure = "blocked" if reason else None
        output_tokens = token_count(usage, "candidatesTokenCount") or estimated_tokens(text)
        thought_tokens = token_count(usage, "thoughtsTokenCount")
        if thought_tokens is None:
            thought_tokens = limit
        return Answer(
            text=text,
            failure=failure,
            detail=detail,
            input_tokens=token_count(usage, "promptTokenCount") or prompt_tokens,
            output_tokens=output_tokens + thought_tokens,
        )


def thinking(model: str, wanted: bool) -> tuple[dict, int]:
    """Returns the fields of a request for a model that is to think, or not, and how many tokens thoughts may take."""
    if re.match(r"(models/)?gemini-[12]\b", model):  # before thinking had levels
        budget = THINKING_ROOM if wanted else 0
        return {"thinking_budget": budget}, budget
    if wanted:
        return {"thinking_level": "HIGH"}, THINKING_ROOM
    return {"thinking_level": "MINIMAL"}, SMALLEST_THINKING_ROOM
