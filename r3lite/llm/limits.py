"""How often, and at what cost, a remote model may be asked: a rate limit, caps and prices, shared by threads.

Knows nothing of requests and replies.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from r3lite.core.errors import R3LiteError
from r3lite.settings import JudgeSettings

MINUTE = 60.0
# US dollars per million tokens read and written.
PRICES = {"gemini-3.5-flash-lite": (0.30, 2.50), "gemini-2.5-flash": (0.30, 2.50)}


@dataclass
class RateLimiter:
    """At most `per_minute` requests in any 60 seconds, and none while the server asks for a pause."""

    per_minute: int
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    _sent: deque = field(default_factory=deque)
    _held_until: float = float("-inf")
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self) -> None:
        """Waits until the next request may be sent, and counts it as sent."""
        while (seconds := self._take()) > 0:
            self.sleep(seconds)

    def hold(self, seconds: float) -> None:
        """Sends nothing for some seconds: the server asked one thread to wait, and the limit is for all threads."""
        with self._lock:
            self._held_until = max(self._held_until, self.clock() + seconds)

    def _take(self) -> float:
        """Returns the seconds to wait. If they are 0 or less, the request may be sent at once, and is counted."""
        with self._lock:
            time = self.clock()
            while self._sent and self._sent[0] <= time - MINUTE:
                self._sent.popleft()
            free_from = time
            if len(self._sent) >= self.per_minute:
                free_from = self._sent[0] + MINUTE
            seconds = max(free_from, self._held_until) - time
            if seconds <= 0:
                self._sent.append(time)
            return seconds


@dataclass
class Budget:
    """Caps on requests and on cost, in US dollars. The most that a request can cost is reserved before it is sent.

    So the cost stays within its cap however many threads ask at once, as far as input tokens were estimated well.
    """

    max_calls: int | None = None
    max_cost: float | None = None
    calls: int = 0
    cost: float = 0.0
    _reserved: float = 0.0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def reserve(self, highest_cost: float) -> str | None:
        """Counts a request of at most this cost and returns None, or returns in words the cap that forbids it.

        May wait until the costs of other requests are known.
        """
        with self._changed:
            while True:
                if self.max_calls is not None and self.calls >= self.max_calls:
                    return f"--judge-max-calls {self.max_calls} is reached"
                if self.max_cost is None or self.cost + self._reserved + highest_cost <= self.max_cost:
                    break
                if not self._reserved:
                    return f"--judge-max-cost {self.max_cost:g} is reached ({self.cost:.4f} US dollars spent)"
                self._changed.wait(1.0)
            self.calls += 1
            self._reserved += highest_cost
            return None

    def settle(self, highest_cost: float, cost: float) -> None:
        """Replaces what was reserved for a request by what it cost."""
        with self._changed:
            # Sums of floats do not cancel exactly, and `reserve` would wait without end for a difference of 1e-18.
            if self._reserved > highest_cost * 1.000001:
                self._reserved = max(0.0, self._reserved - highest_cost)
            else:
                self._reserved = 0.0
            self.cost += cost
            self._changed.notify_all()


def prices_of(settings: JudgeSettings) -> tuple[float, float] | None:
    """Returns US dollars per million tokens read and written, or None if they are not known.

    Raises R3LiteError if a cap on cost needs them.
    """
    model = settings.judge_model.removeprefix("models/")
    input_price, output_price = PRICES.get(model, (None, None))
    if settings.judge_input_price is not None:
        input_price = settings.judge_input_price
    if settings.judge_output_price is not None:
        output_price = settings.judge_output_price
    if input_price is not None and output_price is not None:
        return input_price, output_price
    if settings.judge_max_cost is not None:
        remedy = "Pass --judge-input-price and --judge-output-price, in US dollars per million tokens."
        raise R3LiteError(
            f"--judge-max-cost needs the price of {model}, which is not known", remedy, code="price-unknown"
        )
    return None
