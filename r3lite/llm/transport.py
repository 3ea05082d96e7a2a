"""HTTP calls that end: after a time in all, at a size, and at once if the run stops.

A server may send a byte at a time or never stop sending; a limit on each read bounds neither. Knows no model, no key.
"""

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import httpx2

MAX_REPLY = 4 << 20  # bytes


class Stopped(Exception):
    """The run is over: a thread that waits gives up."""


class TooLarge(Exception):
    """A reply of more than MAX_REPLY bytes."""


class Refused(Exception):
    """A reply with a status other than 200."""

    def __init__(self, response: httpx2.Response):
        super().__init__(response.status_code)
        self.status, self.body = response.status_code, response.text
        self.retry_after = response.headers.get("retry-after", "")


class BoundedClient(httpx2.AsyncClient):
    """Reads at most MAX_REPLY bytes of a reply; raises TooLarge or, if its status is not 200, Refused.

    It follows no redirect: httpx would send the key along to another server.
    """

    def __init__(self):
        # A few bytes of a compressed reply may unpack to any size.
        super().__init__(headers={"accept-encoding": "identity"}, follow_redirects=False)

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        response = await super().send(request, **(options | {"stream": True}))
        try:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise httpx2.DecodingError("the reply is compressed, which was not asked for", request=request)
            body = bytearray()
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > MAX_REPLY:
                    raise TooLarge(f"more than {MAX_REPLY >> 20} MiB")
        finally:
            await response.aclose()
        whole = httpx2.Response(response.status_code, headers=response.headers, content=bytes(body), request=request)
        if whole.status_code != 200:
            raise Refused(whole)
        return whole


class Calls:
    """Calls that several threads make and wait for; each may take `seconds` in all."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._ending = threading.Event()
        self._under_way: set[Future] = set()
        self._lock = threading.Lock()

    def run(self, call: Callable[[], Coroutine]) -> Any:
        """What a call returns or raises; TimeoutError after its time, Stopped if the run ends."""
        with self._lock:
            if self._ending.is_set():
                raise Stopped
            future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(call(), self.seconds), _event_loop())
            self._under_way.add(future)
        try:
            return future.result()
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
