"""A controller inside a process of Ray's: it serves from a thread, backs its database up, and begins anew when told.

Ray starts the process again when it dies, on the same machine or another. Where the database is there, the controller goes
on from it; where it is not, from the last backup.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable

import structlog

from speclen.controller.config import ControllerConfig
from speclen.controller.service.assembly import Running
from speclen.controller.service.server import end, quiet_interpreter, running, serve_page
from speclen.store.backup import is_empty
from speclen.store.connection import StoreError
from speclen.transport.supervision import PartFailedError, describe

log = structlog.get_logger()

END_S = 0.6  # in which a controller that has failed tells its workers
SLOW_BACKUP_S = 60.0
RETRY_S = 0.5  # between attempts to start where a predecessor may still hold port and database


class HostedController:
    """Runs a controller from `start` to `stop`.

    patient: try for ever to start, as after the death of a predecessor; else the first failure is final, and told by
    `address`. backup_to, backup_every_s: where backups go, and how often; empty for none. on_end: called from the thread
    when the controller has failed while it served.
    """

    def __init__(
        self,
        config: ControllerConfig,
        patient: bool = False,
        backup_to: str = "",
        backup_every_s: float = 60.0,
        on_end: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        self.config = config
        self.error = ""
        self._patient = patient
        self._backup_to, self._backup_every_s = backup_to, backup_every_s
        self._on_end = on_end
        self._address = ""
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def address(self, timeout_s: float) -> str:
        """Where it serves, as soon as it does. Raises ValueError with one sentence where it cannot, or not in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._address or self.error, timeout_s)
            if self._address:
                return self._address
            raise ValueError(self.error or f"the controller did not serve within {timeout_s:g} s: its log says why")

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
                await asyncio.to_thread(self._restore_if_gone)
                async with running(self.config) as controller:
                    await self._serve(controller, self._stopping)
                return
            except Exception as error:
                if self._address and not self._stopping.is_set():
                    raise  # it has served: what follows begins with another process
                expected = isinstance(error, ValueError | OSError | StoreError)
                log.error("the controller cannot serve", reason=describe(error), exc_info=not expected)
                if not self._patient:
                    self._tell("", str(error) if expected else describe(error))
                    return
                await asyncio.sleep(RETRY_S)

    async def _serve(self, controller: Running, stopping: asyncio.Event) -> None:
        page = serve_page(controller, self.config)
        if self._backup_to:
            controller.supervisor.keep("backups", self._back_up_for_ever)
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
        finally:
            if page is not None:
                page.server.shutdown()

    def _tell(self, address: str, error: str) -> None:
        with self._changed:
            self._address, self.error = address, error
            self._changed.notify_all()

    def _restore_if_gone(self) -> None:
        """Take the last backup where there is no database. Raises StoreError where that cannot be known."""
        if not self._backup_to or not is_empty(self.config.database):
            return
        from speclen.store.backup_place import BackupPlace, restore_newest  # here: fsspec takes time to import

        place = BackupPlace(self._backup_to, self.config.database.stem)
        name = restore_newest(place, self.config.database, lambda words: log.error("a backup is damaged", reason=words))
        if name:
            log.warning("the database was gone and is restored", backup=name, database=str(self.config.database))

    async def _back_up_for_ever(self) -> None:
        from speclen.store.backup_place import BackupPlace

        database, last = self.config.database, -1
        place = await asyncio.to_thread(BackupPlace, self._backup_to, database.stem)
        while True:
            started = time.monotonic()
            backup = asyncio.create_task(asyncio.to_thread(place.add_if_changed, database, last))
            while not (await asyncio.wait([backup], timeout=max(self._backup_every_s, SLOW_BACKUP_S)))[0]:
                log.error("a backup takes long, and no other is made", seconds=round(time.monotonic() - started))
            try:
                last = backup.result()
            except StoreError as error:
                log.error("no backup was made, the next is tried", reason=str(error), in_s=self._backup_every_s)
            await asyncio.sleep(max(0.0, self._backup_every_s - (time.monotonic() - started)))
