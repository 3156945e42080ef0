"""Supervision of a process: its parts, its event loop, and the process that started it.

A part without which the process cannot serve takes the process down with it; any other part is restarted and counted. A
thread watches the event loop, since a loop that hangs answers nothing, not even health checks.

A process ends with its parent, even if that is killed. The parent holds the only writing end of a pipe, which the kernel
closes with it, and the child waits for the end of the file. Unlike a parent-death signal this works on every POSIX system,
from any thread, and before the child has begun to wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import structlog

log = structlog.get_logger()

FIRST_PAUSE_S = 0.5  # before the first restart of a part; doubles up to LONGEST_PAUSE_S
LONGEST_PAUSE_S = 30.0
STEADY_S = 60.0  # after a run of this length, the pause is FIRST_PAUSE_S again
CANCEL_AGAIN_S = 1.0  # a part that has not ended by then after a cancellation is cancelled again
LOOK_INTERVAL_S = 0.25  # between checks that threads are alive: a dead one ends the process within a second
# The event loop hangs if it has run no callback at this many checks in a row. Checks, not seconds: a process that was
# suspended, or a machine that slept, has missed the checks as well.
HANG_LOOK_S = 1.0
HANG_LOOKS = 30
PIPE = "SPECLEN_LIFELINE"  # environment variable with the file descriptor of the pipe's reading end, for the child
END_S = 5.0  # for a graceful exit after SIGTERM


class PartFailedError(RuntimeError):
    """A part without which the process cannot serve has ended; the message is one sentence."""


class Supervisor:
    """Runs the parts of one process on its event loop.

    num_failures: restarts of each part, for the metrics page. failure: done, with the error, as soon as a part without which
    the process cannot serve has failed.
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
        self._tasks.append(asyncio.create_task(self._restart_until_stopped(part, run), name=part))

    def start(self, part: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a part that must not end before `stop`: if it ends for any reason, the process fails."""
        task = asyncio.create_task(work, name=part)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def watch(self, thread: threading.Thread) -> None:
        """Treat the death of a thread as the failure of a part."""
        self.start(thread.name, until_dead(thread))

    def watch_loop(self) -> None:
        """Exit with code 1, after logging where the event loop hangs, if it stops responding."""
        LoopWatch(self._loop).start()

    def fail(self, part: str, error: BaseException) -> None:
        """Note that a part without which the process cannot serve has failed. From any thread; the first call counts."""
        reason = PartFailedError(f"{part} has failed: {type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the loop has closed: the process is on its way out
            self._loop.call_soon_threadsafe(self._set_failed, reason)

    async def wait(self, stopping: asyncio.Event) -> None:
        """Return when the process is asked to stop. Raises PartFailedError as soon as a part it needs has failed."""
        asked = asyncio.ensure_future(stopping.wait())
        either: list[asyncio.Future[Any]] = [asked, self.failure]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        self.check()

    def check(self) -> None:
        """Raise PartFailedError if a part without which the process cannot serve has failed."""
        if self.failure.done():
            raise self.failure.result()

    async def stop(self) -> None:
        """Cancel the parts, and wait for them. From now on, a part that ends is no failure."""
        self._stopped = True
        pending, self._tasks = set(self._tasks), []
        while pending:
            for task in pending:
                task.cancel()
            # A part may miss a cancellation that arrives together with the event it waits for.
            _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)

    def _set_failed(self, reason: PartFailedError) -> None:
        if not self._stopped and not self.failure.done():
            self.failure.set_result(reason)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if task in self._tasks:
            self._set_failed(PartFailedError(f"{task.get_name()} has ended: {error or 'without a reason'}"))

    async def _restart_until_stopped(self, part: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        pause = FIRST_PAUSE_S
        while not self._stopped:
            started, reason = self._loop.time(), "it returned"
            try:
                await run()
            except Exception as error:
                reason = describe(error)
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise  # the part itself was cancelled, not something that it awaited
                reason = "it was cancelled from within"
            if self._stopped:
                return
            self.num_failures[part] += 1
            if self._loop.time() - started > STEADY_S:
                pause = FIRST_PAUSE_S
            log.error("a part has ended and is restarted", part=part, reason=reason, pause_s=pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Count and log the failure of a callback, or of a task that nothing awaits."""
        self.num_failures["event loop"] += 1
        error = context.get("exception")
        log.error("an error on the event loop", what=context["message"], reason=describe(error) if error else "unknown")


class LoopWatch(threading.Thread):
    """Watchdog: a thread that exits the process if the event loop stops running callbacks.

    It does not detect code that never releases the interpreter; an orchestrator's probe of the health service does.
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
        """The innermost stack frames of the event loop's thread."""
        frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001 - documented, and the only way
        lines = traceback.extract_stack(frame)[-4:] if frame is not None else []
        return " < ".join(f"{os.path.basename(each.filename)}:{each.lineno} {each.name}" for each in reversed(lines))


def end_process(place: str) -> None:
    """Log where the event loop hangs, and exit at once, since no handler on the loop would run."""
    log.critical("the process exits: its event loop hangs", seconds=HANG_LOOKS * HANG_LOOK_S, place=place)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


async def until_one_fails(*works: Coroutine[Any, Any, None]) -> None:
    """Run coroutines concurrently until one fails or all return. Raises its error; PartFailedError if it was cancelled.

    A TaskGroup does not count a task that was cancelled from within as failed. And if a task fails at the moment at which
    the group is cancelled, it loses the cancellation.
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
    """Raise PartFailedError once the thread has died."""
    while thread.is_alive():
        await asyncio.sleep(LOOK_INTERVAL_S)
    raise PartFailedError("its thread is dead")


def describe(error: BaseException) -> str:
    """Type, message and place of an error; of the first one if it is a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    place, trace = "", error.__traceback__
    while trace is not None:
        place = f" ({trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {error}{place}"


def stop_event() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set. A second signal exits the process at once."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_signal() -> None:
        if event.is_set():
            os._exit(130)
        event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return event


def start_tied(command: Sequence[str | os.PathLike[str]], **options: Any) -> subprocess.Popen[Any]:
    """Start a process that calls `end_with_parent`. It also ends when the returned object is garbage collected.

    options: of subprocess.Popen.
    """
    reading, writing = os.pipe()
    try:
        options["env"] = {**(os.environ if options.get("env") is None else options["env"]), PIPE: str(reading)}
        process = subprocess.Popen(command, pass_fds=(reading,), **options)
    except BaseException:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    weakref.finalize(process, os.close, writing)
    return process


def end_with_parent() -> None:
    """From now on, end this process with its parent, if that started it by `start_tied`.

    Call this before anything else, so that no child of this process inherits the variable.
    """
    if name := os.environ.pop(PIPE, ""):
        os.set_inheritable(int(name), False)
        # Nothing is ever written to the pipe.
        end_after(partial(os.read, int(name), 1), "the process that started this one is gone, so this one ends")


def end_after(wait: Callable[[], object], reason: str) -> None:
    """Call `wait` in a thread, and end this process when it returns: by SIGTERM, then by force if that takes too long."""
    threading.Thread(target=_end_after, args=(wait, reason), name="lifeline", daemon=True).start()


def _end_after(wait: Callable[[], object], reason: str) -> None:
    wait()
    print(f"speclen: {reason}", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_S)
    os._exit(1)
