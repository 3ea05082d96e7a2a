"""Calls that end: after a time in all, and at once if the run stops; and what may go wrong with them.

A server may send a byte at a time, which no limit on each read bounds. Knows no model, no key and no HTTP.
"""

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any


class Stopped(Exception):
    """The run is over: a thread that waits gives up."""


class TooLarge(Exception):
    """A reply of more bytes than are read."""


class Refused(Exception):
    """A reply with a status other than 200."""

    def __init__(self, status: int, body: str, retry_after: str):
        super().__init__(status)
        self.status, self.body, self.retry_after = status, body, retry_after


class Broken(Exception):
    """A call without a reply: the `kind` is timeout or connection; `sent` unless the request never left."""

    def __init__(self, message: str, kind: str, sent: bool = True):
        super().__init__(message)
        self.kind, self.sent = kind, sent


class Calls:
    """Calls that several threads make and wait for; each may take `seconds` in all."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._ending = threading.Event()
        self._under_way: set[Future] = set()
        self._lock = threading.Lock()

    def run(self, call: Callable[[], Coroutine]) -> Any:
        """What a call returns or raises; Broken after its time, Stopped if the run ends."""
        with self._lock:
            if self._ending.is_set():
                raise Stopped
            future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(call(), self.seconds), _event_loop())
            self._under_way.add(future)
        try:
            return future.result()
        except TimeoutError as error:
            raise Broken(f"timeout: no reply within {self.seconds:g} s", "timeout") from error
        finally:
            future.cancel()  # if it was the wait that ended
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
    """The loop that all calls run on: a task can be broken off wherever it waits, a thread in a read cannot."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="r3lite-calls", daemon=True).start()
    return loop
