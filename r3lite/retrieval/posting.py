"""POST requests to servers that are not trusted: they end after a time and at a size, and some are tried again."""

import itertools
from collections.abc import Callable
from time import sleep
from typing import TypeVar

from r3lite.core.errors import R3LiteError, explained
from r3lite.core.records import InvalidRecord, Record, Source, parse
from r3lite.llm.http_client import BoundedClient
from r3lite.llm.transport import Broken, Calls, Refused, TooLarge

TIMEOUT = 60.0  # seconds of a request in all
TRIES, PAUSE = 3, 0.5  # seconds before the second try, doubled before the next
OUTLASTING = 8  # tries, over a minute, of a server that has answered before: it may be starting again
LONGEST_PAUSE = 60.0  # seconds that a server may ask for
LARGEST = 32 << 20  # bytes of a reply
PASSING = (408, 429, 500, 502, 503, 504)  # statuses after which the next try may succeed
T = TypeVar("T")


class Poster:
    """Posts JSON to one address. `remedy` is what to do if that fails; `headers` may hold a key and are never told.

    With `outlasts`, a server that has answered may be away for a minute.
    """

    def __init__(self, address: str, remedy: str, headers: dict[str, str] | None = None, outlasts: bool = False):
        self.address, self.remedy, self.outlasts, self._tries = address, remedy, outlasts, TRIES
        self._client, self._calls = BoundedClient(LARGEST, headers), Calls(TIMEOUT)

    def ask(self, body: dict, server: str, read: Callable[[Record], T]) -> T:
        """What `read` makes of the reply, an object. Raises R3LiteError if there is none as that `server` gives."""
        text = self._posted(body)
        with explained(InvalidRecord, f"{self.address} does not reply as {server}", self.remedy):
            return read(Record(parse(text), Source("the reply")))

    def _posted(self, body: dict) -> str:
        """The body of the reply, after some tries."""
        for number in itertools.count(1):
            pause = PAUSE * 2 ** (number - 1)
            try:
                text = self._calls.run(lambda: self._client.post(self.address, json=body, timeout=TIMEOUT)).text
                self._tries = OUTLASTING if self.outlasts else TRIES
                return text
            except TooLarge as error:
                raise R3LiteError(f"{self.address} sends {error}", self.remedy) from error
            except Refused as error:
                told = f"status {error.status}: {' '.join(error.body.split())[:200]}"
                if error.status not in PASSING:
                    raise R3LiteError(f"{self.address} refuses: {told}", self.remedy) from error
                if error.retry_after.isdecimal():
                    pause = max(pause, min(float(error.retry_after), LONGEST_PAUSE))
            except Broken as error:
                told = str(error)
            if number == self._tries:
                raise R3LiteError(f"{self.address} gives no answer: {told}", self.remedy)
            sleep(pause)
