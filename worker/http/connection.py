"""One connection, with bounds on what a client may take its time for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from speclen.worker.http.guard import MAX_BODY_BYTES

HEADER_TIMEOUT_S = 10.0  # from the connection, or the first byte of a further request, to the end of the headers
MAX_HEADER_BYTES = 64 * 1024
MAX_MESSAGE_BYTES = 8 * MAX_BODY_BYTES  # a body in chunks of a byte each takes six times its size
UNREAD_TIMEOUT_S = 30.0  # a client that takes nothing of what waits for it for so long is gone
MIN_READ_BYTES = 64 * 1024  # taken in that time, it reads


class BoundedConnection(HttpToolsProtocol):
    """Closes connections that send headers too slowly, anything without end, or do not read what they asked for.

    Closing one ends its request, which frees its row. One request at a time: of what a client sends ahead of its answer
    nothing is taken, and the connection ends with that answer. (Queued requests would keep a connection from being read,
    and then nobody could see that the client has gone.)
    """

    header_timeout_s = HEADER_TIMEOUT_S
    unread_timeout_s = UNREAD_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headers_due: asyncio.TimerHandle | None = None
        self._reading_due: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0
        self._num_message_bytes = 0
        self._sent_ahead = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._headers_due, self._reading_due):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._sent_ahead:
            return
        if self.cycle is not None and self.cycle.response_complete:
            # Whatever it is ends the wait for a further request. An empty line would begin none, and then nothing waited.
            self._expect_headers()
        super().data_received(data)
        self._num_message_bytes += len(data)
        if self._headers_due is not None:
            self._num_header_bytes += len(data)
        if self._num_header_bytes > MAX_HEADER_BYTES or self._num_message_bytes > MAX_MESSAGE_BYTES:
            self.transport.abort()

    # What the parser finds in the piece of data in which the client is ahead goes nowhere.

    def on_message_begin(self) -> None:
        if self._answering:
            self._ignore_the_rest()
            return
        super().on_message_begin()
        self._num_message_bytes = 0
        self._expect_headers()

    def on_url(self, url: bytes) -> None:
        if not self._sent_ahead:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._sent_ahead and self._headers_due is not None:  # else a trailer, which nobody reads or bounds
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        if not self._sent_ahead:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._sent_ahead:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self._answering:  # would stand in the middle of the answer
            self._ignore_the_rest()
            return
        super().send_400_response(msg)

    def on_headers_complete(self) -> None:
        if self._sent_ahead:
            return
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

    @property
    def _answering(self) -> bool:
        """True while a whole request is being answered."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _ignore_the_rest(self) -> None:
        """Of the connection, which ends with the answer that is under way."""
        self._sent_ahead, self.cycle.keep_alive = True, False

    def _expect_reading(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._reading_due = self.loop.call_later(self.unread_timeout_s, self._check_reading, waiting)

    def _check_reading(self, num_waited: int) -> None:
        """A large answer takes its time. num_waited: bytes that waited to be read when this was to be looked at."""
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
