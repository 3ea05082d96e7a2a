"""Connections of the server: one on which no request begins in time is closed, as uvicorn would wait without end."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0  # that a client may take to send the head of a request


class Connection(H11Protocol):
    """HTTP/1.1 by uvicorn. The time for a head begins with the connection, or with the head's first byte."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        """Starts the time while a head is awaited, and ends it as soon as there is one."""
        awaited = self.cycle is None or self.cycle.response_complete
        if awaited and self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self.transport.close)
        elif not awaited and self._late is not None:
            self._late.cancel()
            self._late = None
