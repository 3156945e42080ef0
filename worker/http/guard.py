"""Bounds on connections and requests before the routes: API keys, sizes, times, and strict JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from speclen.process.credentials import Keyring
from speclen.worker.http.errors import MAX_PART, ApiError, from_exception
from speclen.worker.http.responses import error_response
from speclen.worker.requests.request import OverloadedError, UnauthenticatedError

ONE_MODEL = "/v1/models/"
MAX_BODY_BYTES = 4 * 1024 * 1024  # as over gRPC
CALLER = "speclen.caller"  # key of the scope for the holder of the API key: "" with a single key
BODY_TIMEOUT_S = 30.0  # from the headers to the last byte of the body
MAX_ARRIVING_BYTES = 64 * MAX_BODY_BYTES  # of all incomplete bodies together
HEADER_TIMEOUT_S = 10.0  # from the connection, or the first byte of another request, to the end of the headers
MAX_HEADER_BYTES = 64 * 1024
MAX_MESSAGE_BYTES = 8 * MAX_BODY_BYTES  # a body in chunks of a byte each takes six times its size
MIN_READ_BYTES = 64 * 1024  # a client that reads less in `unread_timeout_s` is gone


class Guard:
    """Middleware that lets only authorised requests with complete bodies reach the routes. It answers 401, 408, 413, 415.

    keyring: accepted keys for `Authorization: Bearer KEY` on every path; None: no key is needed. With several keys the scope
    names the holder. refuse: called with every error that is answered.
    """

    def __init__(
        self,
        app: ASGIApp,
        keyring: Keyring | None,
        refuse: Callable[[Exception], None],
        body_timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        self._app = app
        self._keyring = keyring
        self._body_timeout_s = body_timeout_s
        self._refuse = refuse
        self._num_arriving = 0  # bytes of incomplete bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = plain_path(scope["path"])
        try:
            self._check_key(scope)
            check_encoding(scope)
            body = await self._read(scope, receive)
        except (ApiError, OverloadedError, UnauthenticatedError) as error:
            self._refuse(error)
            response = error_response(from_exception(error))
            response.headers["Connection"] = "close"  # the rest is not read
            await response(scope, receive, send)
            return
        if body is not None:
            receive = replaying(body, receive)
            del body  # the answer may take minutes
            await self._app(scope, receive, send)

    def _check_key(self, scope: Scope) -> None:
        if self._keyring is None:
            return
        caller = self._keyring.caller_in(scope["headers"])
        if caller is None:
            raise UnauthenticatedError("send the header `Authorization: Bearer API_KEY` with the right key")
        scope[CALLER] = caller

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The complete body; None if the client disconnects. Raises ApiError if it is too large or too slow."""
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        if any(len(value) > 18 or int(value) > MAX_BODY_BYTES for value in lengths):
            raise too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_timeout_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    new = message.get("body", b"")
                    body += new
                    self._num_arriving += len(new)
                    more = message.get("more_body", False)
                    if len(body) > MAX_BODY_BYTES:
                        raise too_large()
                    if more and self._num_arriving > MAX_ARRIVING_BYTES:
                        raise OverloadedError("too many bodies are being sent at once: try again later")
        except TimeoutError as error:
            raise ApiError(408, f"the body did not arrive within {self._body_timeout_s:g} s") from error
        finally:
            self._num_arriving -= len(body)
        return bytes(body)


def plain_path(path: str) -> str:
    """The path without doubled or trailing slashes, which clients make of a base URL that ends in a slash.

    The names of models may contain both.
    """
    return path if path.startswith(ONE_MODEL) and path != ONE_MODEL else "/" + "/".join(filter(None, path.split("/")))


def allow_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Allow web pages of these origins, or of all with "*", to call the app. Preflights are answered without a key."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        allow_private_network=True,  # for public pages that call a worker in a private network
        expose_headers=["Retry-After"],
    )


def check_encoding(scope: Scope) -> None:
    """Raise ApiError if the body is compressed, since the decompressed size would need a bound of its own."""
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            encoding = value.decode("latin-1")[:MAX_PART]
            raise ApiError(
                415, f"the body has the Content-Encoding {encoding!r}: send it as it is, without that header"
            )


def too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")


def replaying(body: bytes, receive: Receive) -> Receive:
    """A `receive` that first returns the whole body."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def first_the_body() -> Message:
        return waiting.pop() if waiting else await receive()

    return first_the_body


class JsonRoute(APIRoute):
    """A route whose requests read their body strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read_strictly(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return read_strictly


class JsonRequest(Request):
    async def json(self) -> Any:
        """The body as JSON, strictly: NaN, infinity and lone surrogates are errors. Raises JSONDecodeError."""
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


class BoundedConnection(HttpToolsProtocol):
    """A connection that is closed if headers are slow, a message is endless, or the answer is not read.

    That ends its request, whose slot becomes free.
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
        transport.set_write_buffer_limits(MIN_READ_BYTES)  # TLS buffers 512 KiB otherwise, and hides slow reading
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._headers_due, self._reading_due):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.cycle is not None and self.cycle.response_complete:
            # Any data ends keep-alive, even an empty line, which begins no request: so the timer must run again.
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
        if self._headers_due is not None:  # otherwise it is a trailer, which is ignored
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
    """The cycle's `send` for HTTP/1.0, which has no chunked encoding: the body ends when the connection is closed."""
    send, cycle.chunked_encoding = cycle.send, False

    async def send_plainly(message: Any) -> None:
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_plainly
