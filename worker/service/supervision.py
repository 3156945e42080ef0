"""Somebody who notices the end of whatever should never end.

Two kinds of parts: what a worker cannot serve without (the engine) takes the process down with it, and what can begin
again (reporting, the metrics page, the watching of threads) is started anew and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

log = structlog.get_logger()

FIRST_PAUSE_S = 0.5  # before a part that has ended is started again; doubles up to LONGEST_PAUSE_S
LONGEST_PAUSE_S = 30.0
STEADY_S = 60.0  # a part that ran so long before it ended is started again after the first pause


class PartFailedError(RuntimeError):
    """A part that the worker cannot do without has ended; the message is one sentence."""


class Supervisor:
    """Runs the parts of one process on its event loop. num_failures: by part, for the metrics page."""

    def __init__(self) -> None:
        self.num_failures: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self._tasks: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[PartFailedError] = self._loop.create_future()
        self._loop.set_exception_handler(self._on_loop_error)

    def keep(self, part: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a part until `stop`; whenever it ends, run it again."""
        self.num_failures[part] = 0
        self._tasks.append(asyncio.create_task(self._run_for_ever(part, run)))

    def fail(self, part: str, error: BaseException) -> None:
        """The worker cannot go on without this part. To be called from any thread; the first call counts."""
        reason = PartFailedError(f"{part} has failed: {type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the loop has closed: the process is on its way out
            self._loop.call_soon_threadsafe(self._set_failed, reason)

    async def wait(self, stopping: asyncio.Event) -> None:
        """Return when the process is asked to stop. Raises PartFailedError as soon as it cannot go on."""
        asked = asyncio.ensure_future(stopping.wait())
        either: list[asyncio.Future[Any]] = [asked, self._failed]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        self.check()

    def check(self) -> None:
        """Raises PartFailedError when a part has failed that the worker cannot do without."""
        if self._failed.done():
            raise self._failed.result()

    async def stop(self) -> None:
        """End the parts that are kept running."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _set_failed(self, reason: PartFailedError) -> None:
        if not self._failed.done():
            self._failed.set_result(reason)

    async def _run_for_ever(self, part: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        pause = FIRST_PAUSE_S
        while True:
            started, reason = self._loop.time(), "it returned"
            try:
                await run()
            except Exception as error:
                reason = describe(error)
            self.num_failures[part] += 1
            if self._loop.time() - started > STEADY_S:
                pause = FIRST_PAUSE_S
            log.error("a part has ended and is started again", part=part, reason=reason, pause_s=pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback or a task that nobody waits for has failed: counted, and told in one line."""
        self.num_failures["event loop"] += 1
        error = context.get("exception")
        log.error("an error on the event loop", what=context["message"], reason=describe(error) if error else "unknown")


def describe(error: BaseException) -> str:
    """Kind, message and place of an error; of a group its first one's."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    place, trace = "", error.__traceback__
    while trace is not None:
        place = f" ({trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {error}{place}"
