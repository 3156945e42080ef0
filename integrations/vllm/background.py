"""Reporting in a thread of its own: vLLM's engine never waits for a controller."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence

import grpc
import structlog

from speclen.worker.reporting.control_client import ControlClient

log = structlog.get_logger()

RESTART_S = 5.0  # pause after a failure that the client does not handle itself
TELL_S = 60.0  # between two lines in the log
LAST_REPORTS_S = 2.0  # for the last reports to reach the disk at the end


class Reporting:
    """Runs a control client on an event loop of its own, from start to stop."""

    def __init__(
        self,
        control: ControlClient,
        address: str,
        credentials: grpc.ChannelCredentials | None,
        metadata: Sequence[tuple[str, str | bytes]],
    ) -> None:
        self.control = control
        self._arguments = (address, credentials, metadata)
        self.tell: Callable[[], None] = lambda: None  # called now and then
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="speclen-reporting", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Give the last reports a moment, then end the thread."""
        deadline = time.monotonic() + LAST_REPORTS_S
        while self.control.connected and self.control.buffer and time.monotonic() < deadline:
            time.sleep(0.02)
        self.abandon()
        self._thread.join(LAST_REPORTS_S)

    def abandon(self) -> None:
        """Have the thread end, and wait neither for it nor for the last reports."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                asyncio.run(self._until_stopped())
            except Exception:
                log.exception("reporting to the controller failed, and starts again", after_s=RESTART_S)
                self._stopping.wait(RESTART_S)

    async def _until_stopped(self) -> None:
        client = asyncio.create_task(self.control.run(*self._arguments))
        told = time.monotonic()
        while not self._stopping.is_set() and not client.done():
            await asyncio.sleep(0.1)
            if time.monotonic() - told >= TELL_S:
                told = time.monotonic()
                self.tell()
        client.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await client
