"""The guard before the routes: the API key, bounds on the size and duration of a request, and strict JSON."""

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

from speclen.transport.credentials import Keyring
from speclen.worker.http.errors import MAX_PART, ApiError, from_exception
from speclen.worker.http.responses import error_response
from speclen.worker.requests.request import OverloadedError, UnauthenticatedError

ONE_MODEL = "/v1/models/"
MAX_BODY_BYTES = 4 * 1024 * 1024  # as over gRPC
CALLER = "speclen.caller"  # of the scope: holder of the key, "" with a single key
BODY_TIMEOUT_S = 30.0  # from the headers to the last byte of the body
MAX_ARRIVING_BYTES = 64 * MAX_BODY_BYTES  # of all incomplete bodies


class Guard:
    """Middleware that answers 401, 408, 413 and 415: routes only get authorised requests with whole bodies.

    keyring: of keys for `Authorization: Bearer KEY` on every path; None: no key is needed. With several keys the scope names
    the holder. refuse: called with every error that is answered.
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
        """The whole body; None if the client has gone. Raises ApiError for a body too large or too slow."""
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
    """The path without doubled slashes and one at its end, which clients make of a base URL that ends in one.

    Names of models may hold both.
    """
    return path if path.startswith(ONE_MODEL) and path != ONE_MODEL else "/" + "/".join(filter(None, path.split("/")))


def allow_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The app for pages of these web origins, too; "*" for all. Preflights are answered at once, as they bring no key."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        allow_private_network=True,  # a public page and a worker at home
        expose_headers=["Retry-After"],
    )


def check_encoding(scope: Scope) -> None:
    """Raises ApiError for a compressed body, which would need a second bound."""
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            encoding = value.decode("latin-1")[:MAX_PART]
            raise ApiError(
                415, f"the body has the Content-Encoding {encoding!r}: send it as it is, without that header"
            )


def too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")


def replaying(body: bytes, receive: Receive) -> Receive:
    """`receive` that returns the body in one piece first."""
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
        """The body without NaN, infinity and half characters. Raises JSONDecodeError with the reason as msg."""
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None
