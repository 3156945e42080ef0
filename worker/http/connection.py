"""One connection, with time and size limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from speclen.worker.http.guard import MAX_BODY_BYTES

HEADER_TIMEOUT_S = 10.0  # from the connection, or the first byte of a further request, to the end of the headers
MAX_HEADER_BYTES = 64 * 1024
MAX_MESSAGE_BYTES = 8 * MAX_BODY_BYTES  # a body in chunks of a byte each takes six times its size
MIN_READ_BYTES = 64 * 1024  # a client that reads less in `unread_timeout_s` is gone


class BoundedConnection(HttpToolsProtocol):
    """Connection that closes for slow headers, endless messages, or an unread answer.

    Closing it ends its request, which frees the row.
    """

    header_timeout_s = HEADER_TIMEOUT_S
    unread_timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headers_due: asyncio.TimerHandle | None = None
        self._reading_due: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0
        self._num_message_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._headers_due, self._reading_due):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.cycle is not None and self.cycle.response_complete:
            # Any data ends keep-alive. An empty line begins no request, and would stop the timers.
            self._expect_headers()
        super().data_received(data)
        self._num_message_bytes += len(data)
        if self._headers_due is not None:
            self._num_header_bytes += len(data)
        if self._num_header_bytes > MAX_HEADER_BYTES or self._num_message_bytes > MAX_MESSAGE_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_message_bytes = 0
        self._expect_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._headers_due is not None:  # else a trailer, which nobody reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.send = send_until_closed(self.cycle)  # type: ignore[method-assign, assignment]

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        if self._reading_due is not None:
            self._reading_due.cancel()
        super().resume_writing()

    def _expect_reading(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._reading_due = self.loop.call_later(self.unread_timeout_s, self._check_reading, waiting)

    def _check_reading(self, num_waited: int) -> None:
        """Abort if the client has read too little. num_waited: unread bytes at the last check."""
        if num_waited - self.transport.get_write_buffer_size() < MIN_READ_BYTES:
            self.transport.abort()
        else:
            self._expect_reading()

    def _expect_headers(self) -> None:
        if self._headers_due is None:
            self._num_header_bytes = 0
            self._headers_due = self.loop.call_later(self.header_timeout_s, self.transport.abort)


def send_until_closed(cycle: RequestResponseCycle) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """The cycle's `send` for HTTP/1.0, which has no chunks: a body ends where the connection does."""
    send, cycle.chunked_encoding = cycle.send, False

    async def send_plainly(message: Any) -> None:
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_plainly
