"""A controller inside a process of Ray's: it serves from a thread, backs its database up, and begins anew when told.

Ray starts the process again when it dies, on the same machine or another. Where the database is there, the controller goes
on from it; where it is not, or the newest backup is further, from that one.
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


class RefusedError(ValueError):
    """The controller cannot work as it was told to, and has ended."""


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
                await asyncio.to_thread(self._restore_if_behind)
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

    def _tell(self, address: str, error: str) -> None:
        with self._changed:
            self._address, self.error = address, error
            self._changed.notify_all()

    def _restore_if_behind(self) -> None:
        """Take the newest backup where there is no database, or one that another machine has got ahead of: it is kept aside.

        Raises StoreError where a backup is needed and cannot be had.
        """
        if not self._backup_to:
            return
        from speclen.store.backup_place import BackupPlace, is_behind, restore_newest  # here: fsspec imports slowly

        database, aside = self.config.database, ""
        try:
            place = BackupPlace(self._backup_to, database.stem)
            if not is_empty(database):
                if not is_behind(database, place):
                    return
                aside = f"{database.name}.behind-{time.strftime('%Y%m%dT%H%M%S')}"
        except StoreError as error:
            if is_empty(database):
                raise
            # While the place is away this one is better than none; and a damaged one is told as it is opened.
            log.error("it is not known whether a backup is further than the database", reason=str(error))
            return
        name = restore_newest(place, database, lambda words: log.error("a backup is damaged", reason=words), aside)
        if name:
            log.warning("the database was gone or behind: a backup is restored", backup=name, kept_aside=aside or None)

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
                if made := backup.result():
                    last = made.commit
                    if made.warning:
                        log.warning("another backup is further", advice=made.warning)
            except StoreError as error:
                log.error("no backup was made, the next is tried", reason=str(error), in_s=self._backup_every_s)
            await asyncio.sleep(max(0.0, self._backup_every_s - (time.monotonic() - started)))
