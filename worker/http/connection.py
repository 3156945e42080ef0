"""One connection, with bounds on what a client may take its time for."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_TIMEOUT_S = 10.0  # from the connection, or the first byte of a further request, to the end of the headers
MAX_HEADER_BYTES = 64 * 1024
UNREAD_TIMEOUT_S = 30.0  # a client that takes nothing of what waits for it for so long is gone


class BoundedConnection(HttpToolsProtocol):
    """Closes connections that send headers too slowly or without end, or do not read what they asked for.

    Closing one ends its request, which frees its row.
    """

    header_timeout_s = HEADER_TIMEOUT_S
    unread_timeout_s = UNREAD_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headers_due: asyncio.TimerHandle | None = None
        self._reading_due: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._headers_due, self._reading_due):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._headers_due is None:
            return
        self._num_header_bytes += len(data)
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_headers()

    def on_headers_complete(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading_due = self.loop.call_later(self.unread_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._reading_due is not None:
            self._reading_due.cancel()
        super().resume_writing()

    def _expect_headers(self) -> None:
        if self._headers_due is None:
            self._num_header_bytes = 0
            self._headers_due = self.loop.call_later(self.header_timeout_s, self.transport.abort)
