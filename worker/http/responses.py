"""Runs a job while its answer goes out, and ends it when the client goes away."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from speclen.worker.http.answers import Answer
from speclen.worker.http.errors import ApiError, from_exception
from speclen.worker.http.translate import Job
from speclen.worker.service.async_engine import AsyncEngine

log = logging.getLogger(__name__)

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would gather the events
]
DONE = b"data: [DONE]\n\n"


class JobResponse(Response):
    """The answer to a completion or a chat, whole or streamed.

    A refused job is answered with a status; what goes wrong after a stream has begun is told on a `data:` line.
    """

    def __init__(self, job: Job, engine: AsyncEngine, answer: Answer, arrived_at: float) -> None:
        self._job = job
        self._engine = engine
        self._answer = answer
        self._arrived_at = arrived_at
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._stream(send) if self._job.body.stream else self._whole(scope, receive, send)
        await unless_disconnected(receive, work)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._engine.running(self._job.requests, self._arrived_at) as outputs:
                async for group in outputs:
                    self._answer.add(group)
            response = json_response(self._answer.whole())
        except Exception as error:
            response = error_response(self._told(error))
        await response(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        begun = False
        try:
            async with self._engine.running(self._job.requests, self._arrived_at) as outputs:
                await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                begun = True
                await send_events(send, self._answer.begin())
                async for group in outputs:
                    await send_events(send, self._answer.chunks(group))
            await send_events(send, self._answer.end())
        except Exception as error:
            told = self._told(error)
            if not begun:
                await send_whole(send, told)
                return
            await send_events(send, [told.body()])
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    def _told(self, error: Exception) -> ApiError:
        told = from_exception(error, type(self._job.body).model_fields)
        if told.status == 500:
            log.error("request %s failed", self._job.id, exc_info=error)
        elif told.code is not None:
            self._engine.metrics.refused.labels(told.code).inc()
        return told


async def send_events(send: Send, objects: Any) -> None:
    """Server-sent events, all that there are in one write."""
    body = b"".join(b"data: %b\n\n" % to_json(one) for one in objects)
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


def to_json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", errors="replace")


async def send_whole(send: Send, error: ApiError) -> None:
    response = error_response(error)
    await send({"type": "http.response.start", "status": error.status, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": False})


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers())


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, "application/json")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run the work; end it when the client goes away. Its body must have been read."""
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
