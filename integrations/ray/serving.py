"""Runs a worker inside a Ray process: engine, reporting, and both services, without a port of its own.

Ray Serve's proxies receive the calls and pass them on. Engine, queue and tokens are those of `speclen worker`; Ray alone
starts, places, restarts and counts workers.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import structlog
from starlette.types import ASGIApp

from speclen.integrations.ray.calls import ServeCall, check_token
from speclen.process.credentials import Keyring
from speclen.process.embedded import FindController
from speclen.process.supervision import PartFailedError
from speclen.v1 import generation_pb2 as pb
from speclen.worker.config import KEY_FLAG, WorkerConfig
from speclen.worker.frontend.async_engine import FAILURE_GRACE_S, AsyncEngine
from speclen.worker.frontend.worker_server import Parts, drain, make_parts, start_engine
from speclen.worker.http.app import create_app, front_of
from speclen.worker.http.guard import Guard, allow_origins
from speclen.worker.requests.request import EngineFailedError

log = structlog.get_logger()


class ServedWorker:
    """A running worker, on one event loop; see `start`. http: the OpenAI-compatible front as an ASGI application."""

    def __init__(self, config: WorkerConfig, parts: Parts) -> None:
        self.config, self.servicer, self.engine = config, parts.servicer, parts.engine
        self.control, self.supervisor = parts.control, parts.supervisor
        self._keyring = config.keyring()
        self.http = guarded(config, self.engine)
        self._running = start_engine(config, parts)

    @classmethod
    async def start(cls, config: WorkerConfig, find_controller: FindController) -> ServedWorker:
        """Load the models and start reporting to the controller. Raises ValueError with one sentence."""
        worker = cls(config, await make_parts(config, lambda words: log.info(words, worker=config.worker_id)))
        supervisor = worker.supervisor
        security = config.controller_security()
        reporting = functools.partial(worker.control.run, find_controller, security.credentials(), security.metadata())
        supervisor.keep("reporting", reporting)
        supervisor.watch_loop()
        return worker

    async def generate(self, request: pb.GenerateRequest, outer: Any) -> AsyncIterator[pb.GenerateResponse]:
        """Serve one call of Generate. outer: Serve's gRPC context. Raises CallEndedError after setting its status."""
        check_token(self._keyring, outer, self.config.insecure)
        call: Any = ServeCall(outer)
        async for message in call.messages(self.servicer.Generate(request, call)):
            yield message

    async def ask(self, method: str, request: Any, outer: Any) -> Any:
        """Serve a call with one answer. Raises CallEndedError if it carries none of the tokens."""
        check_token(self._keyring, outer, self.config.insecure)
        return await getattr(self.servicer, method)(request, ServeCall(outer))

    async def until_failed(self, on_end: Callable[[], None] = lambda: os._exit(1)) -> None:
        """Wait until a part that the worker needs has ended, end waiting requests with an error, and call on_end."""
        error = await self.supervisor.failure
        log.critical("the worker cannot go on and ends", reason=str(error))
        self.engine.fail(EngineFailedError(f"{error}; the worker ends"))
        await asyncio.sleep(FAILURE_GRACE_S)
        on_end()

    async def stop(self) -> None:
        """Let running requests end, send the last reports, and stop the engine."""
        try:
            await drain(self.engine, self.control, self.config.drain_timeout_s, self.supervisor.check)
        except PartFailedError as error:
            log.error("the worker ends without a drain", reason=str(error))
        await self.supervisor.stop()
        self.engine.stop()
        await asyncio.wait([self._running], timeout=FAILURE_GRACE_S)
        await asyncio.to_thread(self.engine.admission.close)


def guarded(config: WorkerConfig, engine: AsyncEngine) -> ASGIApp:
    """The HTTP front with the same guard as `speclen worker --http-listen`.

    Without a token every call is refused unless insecure, as over gRPC: a Serve file may open its proxy to other machines.
    """
    front = front_of(config, engine, None)  # no metrics page: each scrape would reach another worker
    keyring = config.http_security().keyring(KEY_FLAG)
    if keyring is None and not config.insecure:
        log.warning("this fleet answers nobody: give it token_file, or insecure", worker=config.worker_id)
        keyring = Keyring([])
    return allow_origins(Guard(create_app(front), keyring, front.engine.metrics.refuse), config.http_origins())
