"""Clients of models that reply to requests: the base, which caches and counts replies, and the client of a remote
model, which limits the rate of requests and repeats failed ones.

Owns everything between a prompt and its reply, except the formats of a service (`replies.Service`). A reply that is
missing, blocked, cut or malformed is a `Reply` with the kind of its failure, not an exception; only what would fail
every request (a missing or wrong key, an unknown model) stops the run. The key is never written, shown or cached. Knows
neither judges nor teachers.
"""

import random
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path

from tqdm import tqdm

from r3lite.core import bars
from r3lite.core.errors import R3LiteError
from r3lite.core.records import InvalidRecord
from r3lite.core.terminal import say
from r3lite.llm.cache import ReplyCache, digest
from r3lite.llm.limits import Budget, RateLimiter, prices_of
from r3lite.llm.replies import Reply, Request, Service, estimated_tokens, parse, read_complaint, recalled
from r3lite.llm.transport import Calls, NoReply, redacted
from r3lite.settings import JudgeSettings

FIRST_BACKOFF = 1.0  # seconds before the second try; doubled for each further one
LONGEST_BACKOFF = 60.0
LONGEST_WAIT = 300.0  # seconds; if a server asks for more, the request has failed
# Failures after which the next try may succeed.
PASSING = ("timeout", "connection", "rate_limited", "server")


def make_service(settings: JudgeSettings) -> Service:
    """Returns the service that --judge names; without one, Gemini. Raises R3LiteError if it has no key."""
    if settings.judge == "openai":
        from r3lite.llm.openai_compatible import OpenAIService

        return OpenAIService(settings)
    from r3lite.llm.gemini import GeminiService  # its library takes long to load

    return GeminiService(settings)


class CachingClient(ABC):
    """Returns replies in the order of the requests, from a cache if they are there, and counts them.

    A subclass defines how the model is asked for the other replies (`_ask_all`), and what a reply depends on beside the
    request (`circumstances`).
    """

    circumstances: dict
    counted = ("cache_hits", "input_tokens", "output_tokens")  # the names of counts
    _prices: tuple[float, float] | None = None  # as `prices_of` returns them

    def __init__(self, settings: JudgeSettings, cache: Path | None, budget: Budget):
        """`cache` is the folder of cached replies."""
        self.settings = settings
        self.budget = budget
        self._cache = ReplyCache(cache, "--judge-cache")
        self._counts: Counter = Counter()
        self._failures: Counter = Counter()
        self._lock = threading.Lock()

    def generate_all(
        self, requests: list[Request], progress: str | None = None, on_reply: Callable[[Reply], None] | None = None
    ) -> list[Reply]:
        """Returns replies in the order of the requests; equal requests are asked once.

        `progress` names a progress bar. `on_reply` is called with each reply as it comes; its errors end this call.
        """
        keys = [digest(request.parts | self.circumstances) for request in requests]
        waiting = dict(zip(keys, requests))
        replies = {}

        def take(key: str, reply: Reply) -> None:
            replies[key] = reply
            lines.update()
            if on_reply:
                on_reply(reply)

        with tqdm(total=len(waiting), unit="request", **bars.named(progress, "asking")) as bar:
            lines = bars.TimedLines(bar, progress, "requests")
            for key, request in list(waiting.items()):
                reply = self._cache.recall(key, partial(recalled, request=request))
                if reply:
                    del waiting[key]
                    take(key, self._count_and_store(key, reply))
            if waiting:
                self._ask_all(waiting, take)
        return [replies[key] for key in keys]

    def counts(self) -> dict[str, float]:
        """Returns this client's requests, cache hits, failures (also by kind), tokens and US dollars so far.

        Without a price of the model there is no `cost`.
        """
        with self._lock:
            counts: dict[str, float] = {"calls": self.budget.calls}
            for name in self.counted:
                counts[name] = self._counts[name]
            if self._prices:
                counts["cost"] = self.budget.cost
            counts["failures"] = self._failures.total()
            for kind, count in sorted(self._failures.items()):
                counts[f"failures/{kind}"] = count
            return counts

    @abstractmethod
    def _ask_all(self, requests: dict[str, Request], take: Callable[[str, Reply], None]) -> None:
        """Asks the model. Calls `take` with the key and the reply of each request as soon as the reply is there.

        Counts and stores the replies (`_count_and_store`).
        """

    def _count_and_store(self, key: str, reply: Reply) -> Reply:
        """Counts a reply and returns it; stores it in the cache if it has not failed and is not from there."""
        if not (reply.failure or reply.cached):
            self._cache.store(key, {"text": reply.text})
        with self._lock:
            self._counts["cache_hits"] += reply.cached
            if reply.failure:
                self._failures[reply.failure] += 1
        return reply


class Client(CachingClient):
    """Asks one remote model. Its calls are made by threads of its own; the caller's thread only waits."""

    counted = ("retries", *CachingClient.counted)

    def __init__(
        self,
        settings: JudgeSettings,
        cache: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] | None = None,
    ):
        self.service = make_service(settings)
        super().__init__(settings, cache, Budget(settings.judge_max_calls, settings.judge_max_cost))
        self._prices = prices_of(settings)
        self._calls = Calls(settings.judge_timeout)
        self._sleep = sleep or self._calls.sleep
        self.limiter = RateLimiter(settings.judge_rpm, clock, self._sleep)
        self._jitter = random.Random()
        self._changes = 0  # how often the service has changed how it asks (`Service.gives_way`)

    def generate(self, request: Request) -> Reply:
        """Returns one reply, if possible from the cache. Raises R3LiteError only for what would fail every request."""
        return self.generate_all([request])[0]

    @property
    def circumstances(self) -> dict:
        """All that a reply depends on beside the request."""
        settings = {
            "model": self.settings.judge_model,
            "address": self.settings.judge_base_url,
            "thinking": self.settings.judge_thinking,
            "temperature": self.settings.judge_temperature,
        }
        return settings | self.service.circumstances

    def _ask_all(self, requests: dict[str, Request], take: Callable[[str, Reply], None]) -> None:
        """Sends several of the requests at once."""
        self._calls.begin()
        pool = ThreadPoolExecutor(self.settings.judge_concurrency)
        try:
            futures = {pool.submit(self._ask, key, request): key for key, request in requests.items()}
            pending = set(futures)
            while pending:
                # With a timeout, because on Windows Ctrl-C does not interrupt a wait without one.
                done, pending = wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)
                for future in done:
                    take(futures[future], future.result())
        except R3LiteError:
            # Requests already sent cost money: their replies may reach the cache before the run stops.
            self._calls.end()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        finally:
            self._calls.end(at_once=True)
            pool.shutdown(wait=False, cancel_futures=True)

    # Asking

    def _ask(self, key: str, request: Request) -> Reply:
        """Sends a request until it is answered, fails for good or has no try left; counts and stores the reply."""
        tries = 0
        while True:
            changes = self._changes
            reply, requested_wait = self._try(request)
            if reply.failure == "refused" and self._has_another_way(reply.detail, changes):
                continue
            may_pass = reply.failure in PASSING and requested_wait <= LONGEST_WAIT
            if not may_pass or tries >= self.settings.judge_retries:
                return self._count_and_store(key, reply)
            backoff = min(FIRST_BACKOFF * 2**tries, LONGEST_BACKOFF)
            seconds = backoff * self._jitter.uniform(0.5, 1.5)
            if requested_wait:
                seconds = requested_wait + self._jitter.uniform(0, 0.5)
            if reply.failure == "rate_limited":
                self.limiter.hold(seconds)
            self._sleep(seconds)
            tries += 1
            with self._lock:
                self._counts["retries"] += 1

    def _has_another_way(self, reason: str, changes: int) -> bool:
        """Returns whether a refused request is to be asked again, because the way of asking has changed.

        Either another thread has changed it since the request was sent, or the service changes it now. `changes` is the
        number of changes before the request was sent.
        """
        with self._lock:
            if self._changes > changes:  # another thread was refused and changed the way
                return True
            change = self.service.gives_way(reason)
            if change is None:
                return False
            self._changes += 1
        say(f"{self.settings.judge_model} {change}: {reason}")
        return True

    def _try(self, request: Request) -> tuple[Reply, float]:
        """Sends one request; returns its reply and the seconds that the server asks to wait, 0 if it names none."""
        limit = request.max_output_tokens + self.service.room
        prompt_tokens = estimated_tokens(*request.texts)
        highest_cost = self._price(prompt_tokens, limit)
        reached_cap = self.budget.reserve(highest_cost)
        if reached_cap:
            return Reply(failure="capped", detail=reached_cap), 0.0
        cost = 0.0
        seconds = 0.0
        try:
            self.limiter.wait()
            cost = highest_cost  # unless it turns out to be less: a call that breaks off may be billed all the same
            body = self._calls.run(lambda: self.service.send(request, limit))
            reply, cost = self._reply_to(request, body, prompt_tokens, limit)
        except NoReply as error:
            cost = highest_cost if error.sent and not error.status else 0.0
            kind = error.kind
            detail = str(error)
            if error.status:
                kind, detail, seconds = self._refusal(error)
            reply = Reply(failure=kind, detail=detail)
        except InvalidRecord as error:
            reply = Reply(failure="malformed", detail=error.cause)
        finally:
            self.budget.settle(highest_cost, cost)
        return replace(reply, detail=self._redacted(reply.detail)), seconds

    def _reply_to(self, request: Request, body: str, prompt_tokens: float, limit: int) -> tuple[Reply, float]:
        """Returns the reply that the body of a response has, or a failed one, and its price; counts its tokens."""
        answer = self.service.read_answer(body, prompt_tokens, limit)
        with self._lock:
            self._counts["input_tokens"] += round(answer.input_tokens)
            self._counts["output_tokens"] += round(answer.output_tokens)
        text = redacted(answer.text, self.service.secret)  # a reply is kept on disk
        price = self._price(answer.input_tokens, answer.output_tokens)
        failure = answer.failure
        if not failure and not text.strip():
            failure = "empty"
        if failure:
            return Reply(text=text, failure=failure, detail=answer.detail), price
        return parse(text, request), price

    def _refusal(self, error: NoReply) -> tuple[str, str, float]:
        """Returns what a status other than 200 means: the kind of failure, a message, and the seconds to wait.

        Raises R3LiteError if every request would fail for the same reason.
        """
        name, reason, delays = read_complaint(str(error))
        status = error.status
        message = self._redacted(f"{status} {name}: {reason}")
        if status == 429 and name == "insufficient_quota":  # OpenAI's word: waiting would not help
            raise R3LiteError(
                f"the account has no credit left: {message}",
                "Add credit, or pass another --judge-model.",
                code="credit-exhausted",
            ) from None
        if status in (401, 403) or (status == 400 and "api key" in message.lower()):
            raise R3LiteError(
                f"the API key was rejected: {message}", self.service.key_remedy, code="key-rejected"
            ) from None
        if status == 404 or (status == 400 and name == "FAILED_PRECONDITION"):
            remedy = "Check --judge-model and --judge-base-url, and whether your account has access to the model."
            cause = f"{self.settings.judge_model} cannot be used: {message}"
            raise R3LiteError(cause, remedy, code="model-unusable") from None
        if status == 408:
            return "timeout", message, 0.0
        if status != 429 and status < 500:
            return "refused", message, 0.0
        kind = "rate_limited" if status == 429 else "server"
        return kind, message, _seconds(error.retry_after, *delays)

    def _redacted(self, text: str) -> str:
        """Returns one line of at most 300 characters without the key."""
        return " ".join(redacted(text, self.service.secret).split())[:300]

    def _price(self, input_tokens: float, output_tokens: float) -> float:
        """Returns US dollars; 0 if the prices are not known. A cap on cost needs them: `prices_of` refuses it then."""
        input_price, output_price = self._prices or (0.0, 0.0)
        return (input_tokens * input_price + output_tokens * output_price) / 1e6


def _seconds(*texts: str) -> float:
    """Returns the seconds to wait that a server names, such as `7` or `11s`; 0 if it names none."""
    for text in texts:
        try:
            return max(0.0, float(text.removesuffix("s")))
        except ValueError:
            continue  # a date, or nothing
    return 0.0
