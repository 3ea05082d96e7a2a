"""How much one client may ask: requests a minute, and requests at a time."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from r3lite.serving.asks import Refusal

CLIENTS = 10_000  # that are remembered


@dataclass
class Rate:
    """A bucket for each client (RFC 2697's idea): it holds `per_minute` requests, and fills up as time passes."""

    per_minute: int
    clock: Callable[[], float]
    _buckets: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)  # what is in it, and when

    def wait(self, client: str) -> float:
        """0 if the client may ask now, and counts it; else the seconds until it may."""
        now = self.clock()
        left, then = self._buckets.pop(client, (float(self.per_minute), now))
        left = min(float(self.per_minute), left + (now - then) * self.per_minute / 60)
        self._buckets[client] = (left - 1 if left >= 1 else left), now
        if len(self._buckets) > CLIENTS:
            self._buckets.popitem(last=False)
        return 0.0 if left >= 1 else (1 - left) * 60 / self.per_minute


@dataclass
class Places:
    """Requests that are answered or wait, in all and of each client."""

    most: int
    most_of_client: int
    taken: Counter[str] = field(default_factory=Counter)

    def take(self, client: str) -> None:
        """Takes a place; raises Refusal if there is none."""
        if self.taken.total() >= self.most:
            raise Refusal(503, "overloaded", "Too many questions are being answered. Try again soon.", 5)
        if self.taken[client] >= self.most_of_client:
            raise Refusal(429, "too_many_at_once", "Too many of your questions are being answered. Wait.", 5)
        self.taken[client] += 1

    def free(self, client: str) -> None:
        self.taken -= Counter((client,))  # which forgets a client that has none left
