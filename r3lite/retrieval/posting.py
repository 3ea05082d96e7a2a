"""POST requests to servers that are not trusted: they end after a time and at a size, and some are tried again."""

from collections.abc import Mapping
from time import monotonic, sleep

import httpx2

from r3lite.core.errors import R3LiteError

TIMEOUT = 60.0  # seconds of a request in all
TRIES, PAUSE = 3, 0.5  # seconds before the second try, doubled before the next
LONGEST_PAUSE = 60.0  # seconds that a server may ask for
LARGEST = 32 << 20  # bytes of a reply
PASSING = (408, 429, 500, 502, 503, 504)  # statuses after which the next try may succeed


class Poster:
    """Posts JSON to one address. `remedy` is what to do if that fails; `headers` may hold a key and are never told.

    No redirect is followed: it would take the headers to another server.
    """

    def __init__(self, address: str, remedy: str, headers: Mapping[str, str] | None = None):
        self.address, self.remedy = address, remedy
        # Without compression, of which a few bytes may unpack to any size.
        given = {"accept-encoding": "identity"} | dict(headers or {})
        self._client = httpx2.Client(timeout=TIMEOUT, headers=given, follow_redirects=False)

    def post(self, body: dict) -> str:
        """The body of the reply, after some tries. Raises R3LiteError if there is none."""
        for left in reversed(range(TRIES)):
            try:
                return self._try(body)
            except _Passing as error:
                if not left:
                    raise R3LiteError(f"{self.address} gives no answer: {error}", self.remedy) from error
                sleep(max(PAUSE * 2 ** (TRIES - 1 - left), error.pause))
        raise AssertionError("the last try returns or raises")

    def _try(self, body: dict) -> str:
        began, found = monotonic(), bytearray()
        try:
            with self._client.stream("POST", self.address, json=body) as reply:
                for chunk in reply.iter_raw():
                    found += chunk
                    if len(found) > LARGEST:
                        raise R3LiteError(f"{self.address} sends more than {LARGEST >> 20} MiB", self.remedy)
                    if monotonic() - began > TIMEOUT:
                        raise _Passing(f"no reply within {TIMEOUT:g} s")
                text = found.decode(errors="replace")
                if reply.status_code in PASSING:
                    asked = reply.headers.get("retry-after", "")
                    pause = min(float(asked), LONGEST_PAUSE) if asked.isdecimal() else 0.0
                    raise _Passing(f"status {reply.status_code}: {_short(text)}", pause)
                if reply.status_code != 200:
                    message = f"{self.address} refuses: status {reply.status_code}: {_short(text)}"
                    raise R3LiteError(message, self.remedy)
                return text
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise _Passing(f"{type(error).__name__}: {error}") from error


class _Passing(Exception):
    """What the next try may not meet; `pause` seconds are to be waited first."""

    def __init__(self, told: str, pause: float = 0.0):
        super().__init__(told)
        self.pause = pause


def _short(text: str) -> str:
    return " ".join(text.split())[:200]
