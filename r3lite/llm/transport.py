"""Calls that are sure to end: after a total time, or at once if the run stops; and the errors that they raise.

Limits on each read are not enough: a server may send a byte at a time. Knows no model, no key and no HTTP.
"""

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any


def redacted(text: str, *keys: str) -> str:
    """Returns the text with `***` instead of each key, which a server may repeat.

    A key that is short or a word stays: it is a placeholder for a local server (`EMPTY`, `none`), and may be part of
    any text.
    """
    for key in keys:
        shortest_key = 20 if key.isalpha() else 8
        if len(key) >= shortest_key:
            text = text.replace(key, "***")
    return text


class Stopped(Exception):
    """The run is over: a thread that waits gives up."""


class NoReply(Exception):
    """A call without a reply that can be used.

    Its `kind` is "timeout", "connection", "too_large" or, for a reply with another status than 200, "status"; then its
    text is the body of the reply. `sent` is False if the request never left.
    """

    def __init__(self, kind: str, text: str, sent: bool = True, status: int = 0, retry_after: str = ""):
        super().__init__(text)
        self.kind = kind
        self.sent = sent
        self.status = status
        self.retry_after = retry_after


class Calls:
    """Calls that several threads make and wait for; each may take `seconds` in all."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._ending = threading.Event()
        self._under_way: set[Future] = set()
        self._lock = threading.Lock()

    def run(self, call: Callable[[], Coroutine]) -> Any:
        """Returns what a call returns, or raises what it raises.

        Raises NoReply after its time, Stopped if no calls are allowed, and CancelledError if `end` breaks it off.
        """
        with self._lock:
            if self._ending.is_set():
                raise Stopped
            limited = asyncio.wait_for(call(), self.seconds)
            future = asyncio.run_coroutine_threadsafe(limited, _event_loop())
            self._under_way.add(future)
        try:
            return future.result()
        except TimeoutError as error:
            raise NoReply("timeout", f"timeout: no reply within {self.seconds:g} s") from error
        finally:
            future.cancel()  # breaks off the call if only the wait for it has ended
            with self._lock:
                self._under_way.discard(future)

    def sleep(self, seconds: float) -> None:
        """Waits; raises Stopped if the run ends meanwhile."""
        if self._ending.wait(seconds):
            raise Stopped

    def begin(self) -> None:
        """Allows calls, also after an end."""
        self._ending.clear()

    def end(self, at_once: bool = False) -> None:
        """Wakes threads that sleep and allows no new call; with `at_once`, calls under way are broken off."""
        with self._lock:
            self._ending.set()
            under_way = list(self._under_way) if at_once else []
        for future in under_way:
            future.cancel()


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Returns the loop that all calls run on: a task can be broken off wherever it waits, a thread in a read cannot."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="r3lite-calls", daemon=True).start()
    return loop
