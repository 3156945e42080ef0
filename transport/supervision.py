"""Supervision of the tasks and threads of a process that should never end.

Two kinds of parts: what a process cannot serve without takes it down, and what can begin again is started anew and
counted. And the event loop itself is watched, by a thread: a loop that hangs answers nobody, not even for its health.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

log = structlog.get_logger()

FIRST_PAUSE_S = 0.5  # before a part that has ended is started again; doubles up to LONGEST_PAUSE_S
LONGEST_PAUSE_S = 30.0
STEADY_S = 60.0  # a part that ran so long before it ended is started again after the first pause
CANCEL_AGAIN_S = 1.0  # a part that has not ended so long after it was cancelled is cancelled again
# How often it is looked whether threads are alive. An end is logged, and the process gone, within a second.
LOOK_INTERVAL_S = 0.25
# A loop that has not come to a callback for so many looks in a row hangs. Looks, not seconds: a process that was stopped
# and goes on, or a machine that slept, has missed the looks as well.
HANG_LOOK_S = 1.0
HANG_LOOKS = 30


class PartFailedError(RuntimeError):
    """A part that the process cannot do without has ended; the message is one sentence."""


class Supervisor:
    """Runs the parts of one process on its event loop. num_failures: by part, for the metrics page.

    failure: done, with the error, as soon as a part has failed that the process cannot do without.
    """

    def __init__(self) -> None:
        self.num_failures: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self._tasks: list[asyncio.Task[None]] = []
        self.failure: asyncio.Future[PartFailedError] = self._loop.create_future()
        self._stopped = False
        self._loop.set_exception_handler(self._on_loop_error)

    def keep(self, part: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a part until `stop`; whenever it ends, run it again."""
        self.num_failures[part] = 0
        self._tasks.append(asyncio.create_task(self._run_for_ever(part, run), name=part))

    def start(self, part: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a part that may not end before `stop`: its end, however it comes, is the process's."""
        task = asyncio.create_task(work, name=part)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def watch(self, thread: threading.Thread) -> None:
        """Count the end of a thread as one of a part."""
        self.start(thread.name, until_dead(thread))

    def watch_loop(self) -> None:
        """End the process, with code 1 and where it hangs, when the event loop does not answer."""
        LoopWatch(self._loop).start()

    def fail(self, part: str, error: BaseException) -> None:
        """The process cannot go on without this part. To be called from any thread; the first call counts."""
        reason = PartFailedError(f"{part} has failed: {type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the loop has closed: the process is on its way out
            self._loop.call_soon_threadsafe(self._set_failed, reason)

    async def wait(self, stopping: asyncio.Event) -> None:
        """Return when the process is asked to stop. Raises PartFailedError as soon as it cannot go on."""
        asked = asyncio.ensure_future(stopping.wait())
        either: list[asyncio.Future[Any]] = [asked, self.failure]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        self.check()

    def check(self) -> None:
        """Raises PartFailedError when a part has failed that the process cannot do without."""
        if self.failure.done():
            raise self.failure.result()

    async def stop(self) -> None:
        """End the parts; from now on no end is a failure."""
        self._stopped = True
        pending, self._tasks = set(self._tasks), []
        while pending:
            for task in pending:
                task.cancel()
            # A part may lose this one, as where what it waits for has come in the same moment.
            _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)

    def _set_failed(self, reason: PartFailedError) -> None:
        if not self._stopped and not self.failure.done():
            self.failure.set_result(reason)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if task in self._tasks:
            self._set_failed(PartFailedError(f"{task.get_name()} has ended: {error or 'without a reason'}"))

    async def _run_for_ever(self, part: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        pause = FIRST_PAUSE_S
        while not self._stopped:
            started, reason = self._loop.time(), "it returned"
            try:
                await run()
            except Exception as error:
                reason = describe(error)
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise  # this part is to end, and not only something that it waited for
                reason = "it was cancelled from within"
            if self._stopped:
                return
            self.num_failures[part] += 1
            if self._loop.time() - started > STEADY_S:
                pause = FIRST_PAUSE_S
            log.error("a part has ended and is started again", part=part, reason=reason, pause_s=pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback or a task without a waiting caller has failed: counted, and logged in one line."""
        self.num_failures["event loop"] += 1
        error = context.get("exception")
        log.error("an error on the event loop", what=context["message"], reason=describe(error) if error else "unknown")


class LoopWatch(threading.Thread):
    """Asks the event loop again and again for a sign of life, and ends the process where there is none.

    It cannot help against code that keeps the interpreter to itself; an orchestrator's probe of the health service can.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name="loop-watch", daemon=True)
        self._loop, self._loop_thread = loop, threading.get_ident()
        self._answered = threading.Event()

    def run(self) -> None:
        missed = 0
        while missed < HANG_LOOKS:
            self._answered.clear()
            try:
                self._loop.call_soon_threadsafe(self._answered.set)
            except RuntimeError:
                return  # the loop has closed
            time.sleep(HANG_LOOK_S)
            missed = 0 if self._answered.is_set() else missed + 1
        if not self._loop.is_closed():
            end_process(self._place())

    def _place(self) -> str:
        """The innermost lines of what the loop's thread does."""
        frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001 - documented, and the only way
        lines = traceback.extract_stack(frame)[-4:] if frame is not None else []
        return " < ".join(f"{os.path.basename(each.filename)}:{each.lineno} {each.name}" for each in reversed(lines))


def end_process(place: str) -> None:
    """Log where the event loop hangs, and exit: nothing on it can be reached any more."""
    log.critical("the process ends: its event loop does not answer", seconds=HANG_LOOKS * HANG_LOOK_S, place=place)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


async def until_one_fails(*works: Coroutine[Any, Any, None]) -> None:
    """Run all together until one fails or all have returned. Raises what it raised, PartFailedError if it was cancelled.

    No TaskGroup: to that, a part that was cancelled from within is no failure, and where one fails in the moment in which
    all are told to end, it forgets the latter.
    """
    tasks = [asyncio.create_task(work, name=str(getattr(work, "__qualname__", work))) for work in works]
    pending = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.cancelled():
                    raise PartFailedError(f"{task.get_name()} was cancelled from within")
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_dead(thread: threading.Thread) -> None:
    """Raises PartFailedError once the thread is no more."""
    while thread.is_alive():
        await asyncio.sleep(LOOK_INTERVAL_S)
    raise PartFailedError("its thread is dead")


def describe(error: BaseException) -> str:
    """Kind, message and place of an error; of a group its first one's."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    place, trace = "", error.__traceback__
    while trace is not None:
        place = f" ({trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {error}{place}"


def stop_event() -> asyncio.Event:
    """Set by SIGTERM and SIGINT; a second signal ends the process at once."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_signal() -> None:
        if event.is_set():
            os._exit(130)
        event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return event
