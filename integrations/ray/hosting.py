"""A controller inside a process of Ray's: it serves from a thread, and begins anew when told.

Ray starts the process again when it dies, on the same machine or another: the controller goes on from the database that is
there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable

import structlog

from speclen.controller.config import ControllerConfig
from speclen.controller.service.assembly import Running
from speclen.controller.service.server import end, quiet_interpreter, running, serve_page
from speclen.store.connection import StoreError
from speclen.transport.supervision import PartFailedError, describe

log = structlog.get_logger()

END_S = 0.6  # in which a controller that has failed tells its workers
RETRY_S = 0.5  # between attempts to start where a predecessor may still hold port and database


class RefusedError(ValueError):
    """The controller cannot work as it was told to, and has ended."""


class HostedController:
    """Runs a controller from `start` to `stop`.

    patient: try for ever to start, as after the death of a predecessor; else the first failure is final, and told by
    `address`. on_end: called from the thread when the controller has failed while it served.
    """

    def __init__(
        self,
        config: ControllerConfig,
        patient: bool = False,
        on_end: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        self.config = config
        self.error = ""
        self._patient = patient
        self._on_end = on_end
        self._address = ""
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def address(self, timeout_s: float) -> str:
        """Address of the service, once it serves. Raises RefusedError if it never will, ValueError if not in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._address or self.error, timeout_s)
            if self._address:
                return self._address
            if self.error:
                raise RefusedError(self.error)
            raise ValueError(f"the controller did not serve within {timeout_s:g} s: its log says why")

    def stop(self, timeout_s: float = 15.0) -> None:
        """Drain, commit, and end the thread."""
        if self._loop is not None and self._stopping is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            asyncio.run(self._start_and_serve())
        except Exception:
            log.critical("the controller ends", exc_info=True)
            self._on_end()

    async def _start_and_serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        quiet_interpreter()
        while not self._stopping.is_set():
            try:
                async with running(self.config) as controller:
                    page = serve_page(controller, self.config)
                    await self._serve(controller, self._stopping)
                if page is not None:  # after the end of supervision, which would take it for a failure
                    page.server.shutdown()
                return
            except Exception as error:
                if self._address and not self._stopping.is_set():
                    raise  # it has served: what follows begins with another process
                expected = isinstance(error, ValueError | OSError | StoreError)
                log.error("the controller cannot serve", reason=describe(error), exc_info=not expected)
                if not self._patient:
                    words = str(error) if expected else ""
                    self._tell("", words or describe(error))  # without words it would seem to be still starting
                    return
                await asyncio.sleep(RETRY_S)

    async def _serve(self, controller: Running, stopping: asyncio.Event) -> None:
        controller.supervisor.watch_loop()
        address = f"{self.config.listen.rpartition(':')[0]}:{controller.port}"
        log.info("the controller serves", address=address, database=str(self.config.database))
        self._tell(address, "")
        try:
            await controller.supervisor.wait(stopping)
        except PartFailedError as error:
            log.critical("the controller ends: a part of it has failed", reason=str(error))
            with contextlib.suppress(Exception):
                await asyncio.wait_for(end(controller, 0.0), END_S)
            self._on_end()  # here, since a thread that hangs would hold up the way out

    def _tell(self, address: str, error: str) -> None:
        with self._changed:
            self._address, self.error = address, error
            self._changed.notify_all()
