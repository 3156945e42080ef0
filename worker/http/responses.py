"""Responses: run a job while its answer is sent, and end the job if the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Coroutine, Iterable, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from speclen.worker.frontend.async_engine import AsyncEngine, OutputStream
from speclen.worker.http.answers import Answer
from speclen.worker.http.errors import INTERNAL, ApiError, from_exception
from speclen.worker.http.schema import Sampling
from speclen.worker.requests.request import SequenceOutput

log = logging.getLogger(__name__)

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would gather the events
]
QUEUE_FULL = 429  # the status with Retry-After
DONE = b"data: [DONE]\n\n"
STILL_HERE = b": waiting\n\n"  # a comment, which is not an event: proxies and clients give up on silent streams
SILENCE_S = 5.0  # of a stream before such a comment is sent
PIECE_BYTES = 2**16
LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


class JobResponse(Response):
    """The response to a completion or a chat, as one object or as a stream.

    A refused job is answered with an error status; an error after a stream has begun is sent as a `data:` line. make_answer:
    turns the body into a job with an empty answer; its errors are answered, too.
    """

    def __init__(
        self, body: Sampling, engine: AsyncEngine, caller: str, make_answer: Callable[[], Awaitable[Answer]]
    ) -> None:
        self._body = body
        self._engine = engine
        self._caller = caller
        self._make_answer = make_answer
        self._arrived_at = time.monotonic()
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._stream(send) if self._body.stream else self._whole(send)
        await unless_disconnected(receive, work)

    @contextlib.asynccontextmanager
    async def _running(
        self, stream: OutputStream
    ) -> AsyncIterator[tuple[Answer, AsyncIterator[Sequence[SequenceOutput]]]]:
        answer = await self._make_answer()
        running = self._engine.running(answer.job.requests, stream, self._caller, self._arrived_at)
        async with running as outputs:
            yield answer, outputs

    async def _whole(self, send: Send) -> None:
        """Send the answer as one object. A drain waits for it."""
        async with contextlib.AsyncExitStack() as opened:
            try:
                stream = await opened.enter_async_context(self._engine.open(uuid.uuid4().hex, until_end=True))
                async with self._running(stream) as (answer, outputs):
                    async for group in outputs:
                        answer.add(group)
                response = await asyncio.to_thread(whole, answer) if answer.is_large else whole(answer)
            except Exception as error:
                response = error_response(self._api_error_of(error))
            await send_whole(send, response)

    async def _stream(self, send: Send) -> None:
        begun = False
        try:
            async with self._engine.open(uuid.uuid4().hex, wake_s=SILENCE_S) as stream:
                async with self._running(stream) as (answer, outputs):
                    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                    begun = True
                    await self._send(send, stream, answer.begin())
                    async for group in outputs:
                        await self._send(send, stream, answer.chunks(group), STILL_HERE if not group else b"")
                await self._send(send, stream, answer.end())
        except Exception as error:
            api_error = self._api_error_of(error)
            if not begun:
                await send_whole(send, error_response(api_error))
                return
            await send_events(send, [api_error.body()])
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _send(self, send: Send, stream: OutputStream, objects: Iterable[Any], comment: bytes = b"") -> None:
        async with self._engine.reading(stream):
            await send_events(send, objects, comment)

    def _api_error_of(self, error: Exception) -> ApiError:
        api_error = refusal(error, type(self._body).model_fields, self._engine, self._caller)
        if api_error.code == INTERNAL:
            log.error("a request over HTTP failed", exc_info=error)
        return api_error


def refusal(error: Exception, fields: Container[str], engine: AsyncEngine, caller: str) -> ApiError:
    """Count the error of a request, and turn it into an error answer. fields: as in `from_exception`."""
    engine.metrics.refuse(error)
    api_error = from_exception(error, fields)
    if api_error.status == QUEUE_FULL:
        api_error.retry_after_s = engine.admission.expected_wait_s(caller)
    return api_error


async def send_events(send: Send, objects: Iterable[Any], comment: bytes = b"") -> None:
    """Send events in a single write."""
    body = comment + b"".join(b"data: %b\n\n" % to_json(one) for one in objects)
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


def to_json(content: Any) -> bytes:
    """JSON in one line, even for readers that split at Unicode's line separators.

    Raises ArithmeticError if it contains NaN or infinity.
    """
    try:
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError as error:  # which would count as the caller's error
        raise ArithmeticError(f"the answer holds a number that JSON cannot hold: {error}") from error
    for end, escaped in LINE_ENDS.items():
        text = text.replace(end, escaped)
    return text.encode("utf-8", errors="replace")


class ResponseInPieces(Response):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_whole(send, self)


async def send_whole(send: Send, response: Response) -> None:
    """Send a response in pieces, each once most of the previous ones have been read.

    Over TLS a large write would be accepted at once, and a slow reader could not be detected.
    """
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    body = bytes(response.body)
    pieces = [body[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES)] or [b""]
    for number, piece in enumerate(pieces, start=1):
        await send({"type": "http.response.body", "body": piece, "more_body": number < len(pieces)})


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers())


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return ResponseInPieces(to_json(content), status, headers, "application/json")


def whole(answer: Answer) -> Response:
    return json_response(answer.whole())


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run the work, and cancel it if the client disconnects. The request's body must have been read."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
