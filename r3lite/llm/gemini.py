"""A client of Gemini models: structured or plain replies, cached, limited, retried, counted.

Owns everything between a prompt and its reply. A reply that is missing, blocked, cut or malformed is a `Reply` with the
kind of its failure, not an exception; only what would fail every request (no key, a wrong one, an unknown model) stops
the run. The key is never written, shown or cached. Knows neither judges nor teachers.
"""

import copy
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from r3lite.errors import R3LiteError
from r3lite.llm.cache import ReplyCache, digest
from r3lite.llm.limits import Budget, RateLimiter
from r3lite.llm.replies import Reply, Request, parse
from r3lite.settings import JudgeSettings

FIRST_BACKOFF, LONGEST_BACKOFF = 1.0, 60.0  # seconds; doubled at each try
LONGEST_WAIT = 300.0  # seconds; if a server asks for more, the request has failed
THINKING_ROOM = 8192  # more output tokens for a model that thinks: thoughts count against the limit
BYTES_PER_TOKEN = 3  # of input, for the estimate of what a request can cost at most; about 4 in English
BLOCKED = ("SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "MODEL_ARMOR", "LANGUAGE")
# Failures after which the next try may succeed.
PASSING = ("timeout", "connection", "rate_limited", "server")


class _Stopped(Exception):
    """The run is over: a thread that waits gives up."""


class GeminiClient:
    """Asks one model. Safe to use from several threads; `generate_all` starts threads of its own.

    `cache` is the folder of cached replies. The key is read from GOOGLE_API_KEY, else GEMINI_API_KEY.
    """

    def __init__(
        self,
        settings: JudgeSettings,
        cache: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] | None = None,
    ):
        from google import genai

        self.settings, self._cache = settings, ReplyCache(cache)
        self._secret = _read_key()
        timeout = round(settings.judge_timeout * 1000)  # milliseconds
        options = genai.types.HttpOptions(timeout=timeout, base_url=settings.judge_base_url)
        self._client = genai.Client(api_key=self._secret, vertexai=False, http_options=options)
        self._genai, self._transport, self._timeouts = genai, *_transport_errors()
        self._stop = threading.Event()
        self._sleep = sleep or self._sleep_unless_stopped
        self.limiter = RateLimiter(settings.judge_rpm, clock, self._sleep)
        self.budget = Budget(settings.judge_max_calls, settings.judge_max_cost)
        self._jitter = random.Random()
        self._must_think = False  # the model refused to answer without thinking
        self._counts, self._failures = Counter(), Counter()
        self._lock = threading.Lock()

    def generate(self, request: Request) -> Reply:
        """One reply, from the cache if it is there. Raises R3LiteError only for what would fail every request."""
        return self._generate(request, self._key_of(request))

    def _generate(self, request: Request, key: str) -> Reply:
        reply = self._cache.recall(key, request)
        if reply is None:
            reply = self._ask(request)
            if reply.failure is None:
                self._cache.store(key, reply)
        with self._lock:
            self._counts["cache_hits"] += reply.cached
            if reply.failure:
                self._failures[reply.failure] += 1
        return reply

    def generate_all(
        self,
        requests: list[Request],
        progress: str | None = None,
        on_reply: Callable[[Reply], None] | None = None,
    ) -> list[Reply]:
        """Replies in the order of the requests, several of them sent at once; equal requests are sent once.

        `progress` names a progress bar. `on_reply` is called with each reply as it comes; if it raises, all ends.
        """
        keys = [self._key_of(r) for r in requests]
        replies: dict[str, Reply] = {}
        self._stop.clear()
        pool = ThreadPoolExecutor(self.settings.judge_concurrency)
        bar = tqdm(total=len(set(keys)), desc=progress, unit="request", disable=None if progress else True)
        try:
            futures = {pool.submit(self._generate, r, key): key for key, r in dict(zip(keys, requests)).items()}
            pending = set(futures)
            while pending:
                # With a timeout, because on Windows Ctrl-C does not interrupt a wait without one.
                done, pending = wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)
                for future in done:
                    reply = replies[futures[future]] = future.result()
                    bar.update()
                    if on_reply:
                        on_reply(reply)
        except R3LiteError:
            # Requests already sent are paid for: their replies may reach the cache before the run stops.
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        finally:
            self._stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            bar.close()
        return [replies[k] for k in keys]

    def counts(self) -> dict[str, float]:
        """This client's requests, cache hits, failures (also by kind), tokens and US dollars so far."""
        names = ("retries", "cache_hits", "input_tokens", "output_tokens")
        with self._lock:
            counts = {"calls": self.budget.calls, "cost": self.budget.cost} | {n: self._counts[n] for n in names}
            counts["failures"] = self._failures.total()
            return counts | {f"failures/{kind}": n for kind, n in sorted(self._failures.items())}

    def _key_of(self, request: Request) -> str:
        s = self.settings
        return digest(request, {"model": s.judge_model, "address": s.judge_base_url, "thinking": s.judge_thinking})

    def _sleep_unless_stopped(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise _Stopped

    # Asking

    def _ask(self, request: Request) -> Reply:
        """Tries until there is a reply, a failure is final or the tries are used up."""
        tries = 0
        while True:
            thinking = self.settings.judge_thinking or self._must_think
            reply, asked_to_wait = self._try(request, thinking)
            if reply.failure == "refused" and not thinking and "think" in reply.detail.lower():
                self._must_think = True
                continue
            if reply.failure not in PASSING or tries >= self.settings.judge_retries or asked_to_wait > LONGEST_WAIT:
                return reply
            backoff = min(FIRST_BACKOFF * 2**tries, LONGEST_BACKOFF) * self._jitter.uniform(0.5, 1.5)
            seconds = asked_to_wait + self._jitter.uniform(0, 0.5) if asked_to_wait else backoff
            if reply.failure == "rate_limited":
                self.limiter.hold(seconds)
            self._sleep(seconds)
            tries += 1
            with self._lock:
                self._counts["retries"] += 1

    def _try(self, request: Request, thinking: bool) -> tuple[Reply, float]:
        """One request; its reply and the seconds that the server asks to wait."""
        limit = request.max_output_tokens + (THINKING_ROOM if thinking else 0)
        size = len((request.prompt + (request.system or "")).encode(errors="replace"))
        most = self._price(size / BYTES_PER_TOKEN, limit)
        if cap := self.budget.reserve(most):
            return Reply(failure="capped", detail=cap), 0.0
        cost = 0.0
        try:
            self.limiter.wait()
            response = self._send(request, thinking, limit)
            cost = self._count_tokens(response.usage_metadata)
            return self._reply_of(response, request), 0.0
        except self._genai.errors.APIError as error:
            return self._refusal(error)
        except self._timeouts as error:
            return self._failure("timeout", type(error).__name__), 0.0
        except self._transport as error:
            return self._failure("connection", f"{type(error).__name__}: {error}"), 0.0
        except ValueError as error:  # the body is not JSON, or the JSON is not a reply
            return self._failure("malformed", str(error)), 0.0
        finally:
            self.budget.settle(most, cost)

    def _send(self, request: Request, thinking: bool, limit: int) -> Any:
        types = self._genai.types
        config = types.GenerateContentConfig(
            system_instruction=request.system,
            temperature=request.temperature,
            max_output_tokens=limit,
            response_mime_type="application/json" if request.schema else None,
            response_schema=copy.deepcopy(request.schema),  # the library changes it
            thinking_config=None if thinking else types.ThinkingConfig(thinking_budget=0),
            automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        )
        model = self.settings.judge_model
        try:
            return self._client.models.generate_content(model=model, contents=request.prompt, config=config)
        except (AttributeError, KeyError, TypeError) as error:  # the library's errors for JSON that is not a reply
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def _reply_of(self, response: Any, request: Request) -> Reply:
        """The reply in a response, or what is wrong with it; the library would only leave `parsed` empty."""
        candidate = response.candidates[0] if response.candidates else None
        if candidate is None:
            reason = response.prompt_feedback and response.prompt_feedback.block_reason
            return self._failure("blocked" if reason else "empty", f"prompt: {getattr(reason, 'name', reason)}")
        parts = candidate.content.parts if candidate.content and candidate.content.parts else []
        text = "".join(p.text for p in parts if p.text and not p.thought)
        reason = getattr(candidate.finish_reason, "name", None) or str(candidate.finish_reason or "STOP")
        if reason == "MAX_TOKENS":
            return replace(self._failure("cut", "MAX_TOKENS"), text=text)
        if reason in BLOCKED:
            return self._failure("blocked", reason)
        if not text.strip():
            return self._failure("empty", reason)
        reply = parse(text, request)
        return replace(reply, detail=self._redacted(reply.detail))

    def _refusal(self, error: Any) -> tuple[Reply, float]:
        """What a status code of 4xx or 5xx means; raises R3LiteError if every request would fail like it."""
        told = self._redacted(f"{error.code} {error.status}: {error.message}")
        if error.code in (401, 403) or (error.code == 400 and "api key" in told.lower()):
            raise R3LiteError(f"the key is not accepted: {told}", "Set GOOGLE_API_KEY to a valid key.") from None
        if error.code == 404 or (error.code == 400 and error.status == "FAILED_PRECONDITION"):
            remedy = "Check --judge-model and --judge-base-url, and that your account may use the model."
            raise R3LiteError(f"{self.settings.judge_model} cannot be used: {told}", remedy) from None
        if error.code == 429:
            return self._failure("rate_limited", told), _retry_after(error)
        if error.code == 408:
            return self._failure("timeout", told), 0.0
        if error.code >= 500:
            return self._failure("server", told), _retry_after(error)
        return self._failure("refused", told), 0.0

    def _failure(self, kind: str, detail: str) -> Reply:
        return Reply(failure=kind, detail=self._redacted(detail))

    def _redacted(self, text: str) -> str:
        """One line of at most 300 characters without the key, in case a server repeats it."""
        return " ".join(text.replace(self._secret, "***").split())[:300]

    # Counting

    def _price(self, input_tokens: float, output_tokens: float) -> float:
        s = self.settings
        return (input_tokens * s.judge_input_price + output_tokens * s.judge_output_price) / 1e6

    def _count_tokens(self, usage: Any) -> float:
        """Counts the tokens of a reply, thoughts as output; their price."""
        if usage is None:
            return 0.0
        read = usage.prompt_token_count or 0
        written = (usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0)
        with self._lock:
            self._counts["input_tokens"] += read
            self._counts["output_tokens"] += written
        return self._price(read, written)


def _read_key() -> str:
    key = (os.environ.get("GOOGLE_API_KEY") or os.environ.get("GEMINI_API_KEY") or "").strip()
    if not key:
        raise R3LiteError(
            "there is no key for Gemini: neither GOOGLE_API_KEY nor GEMINI_API_KEY is set",
            "Get one at https://aistudio.google.com/apikey and set GOOGLE_API_KEY to it.",
        )
    return key


def _transport_errors() -> tuple[tuple[type, ...], tuple[type, ...]]:
    """Errors of the HTTP libraries that google-genai may be using, and among them those of a timeout."""
    libraries = []
    for name in ("httpx2", "httpx"):
        try:
            libraries.append(__import__(name))
        except ImportError:
            continue  # it uses either
    return tuple(x.HTTPError for x in libraries), tuple(x.TimeoutException for x in libraries)


def _retry_after(error: Any) -> float:
    """Seconds to wait that a server names, in the Retry-After header or as RetryInfo in the body; else 0."""
    named = [getattr(error.response, "headers", {}).get("retry-after")]
    body = error.details.get("error", error.details) if isinstance(error.details, dict) else {}
    details = body.get("details") if isinstance(body, dict) else None
    details = details if isinstance(details, list) else []
    named += [d.get("retryDelay") for d in details if isinstance(d, dict)]
    for text in named:
        try:
            return max(0.0, float(str(text).removesuffix("s")))
        except ValueError:
            continue  # a date, or nothing
    return 0.0
