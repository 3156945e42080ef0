"""What stands before the routes: the API key, and bounds on what a request may send and how long that may take."""

from __future__ import annotations

import asyncio
import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from speclen.transport.credentials import digest
from speclen.worker.http.errors import ApiError
from speclen.worker.http.responses import error_response

MAX_BODY_BYTES = 4 * 1024 * 1024  # as over gRPC
BODY_TIMEOUT_S = 30.0  # from the headers to the last byte of the body


class Guard:
    """Answers 401, 408 and 413 itself; what reaches the routes has proved itself and holds its whole body.

    api_key: what `Authorization: Bearer KEY` must carry, on every path; None: anybody may call. Digests are compared, in
    constant time, so that neither the key's length nor its beginning leaks.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, body_timeout_s: float = BODY_TIMEOUT_S) -> None:
        self._app = app
        self._expected = None if api_key is None else digest(f"Bearer {api_key}")
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_key(scope)
            body = await self._read(scope, receive)
        except ApiError as error:
            response = error_response(error)
            response.headers["Connection"] = "close"  # what else it sends is not read
            await response(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, replaying(body, receive), send)

    def _check_key(self, scope: Scope) -> None:
        if self._expected is None:
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1 or not hmac.compare_digest(digest(given[0]), self._expected):
            raise ApiError(
                401, "send the header `Authorization: Bearer API_KEY` with the right key", None, "invalid_api_key"
            )

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None when the client has gone. Raises ApiError for one too large or too slow."""
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
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > MAX_BODY_BYTES:
                        raise too_large()
        except TimeoutError as error:
            raise ApiError(408, f"the body did not arrive within {self._body_timeout_s:g} s") from error
        return bytes(body)


def too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")


def replaying(body: bytes, receive: Receive) -> Receive:
    """`receive` as if the body had just come, in one piece."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def first_the_body() -> Message:
        return waiting.pop() if waiting else await receive()

    return first_the_body
