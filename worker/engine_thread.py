"""The one thread of a worker that computes with torch: it loads the models, measures, and runs the engine."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from worker.request import EngineFailedError

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class EngineThread(threading.Thread):
    """Runs functions one after the other; a daemon, so that a pass that hangs does not keep the process from ending.

    Every thread that ever computed keeps OpenMP threads of its own. As soon as there are more of them than cores, all
    of them sleep instead of spinning for a moment when they wait for each other, hundreds of times in a pass: with two
    threads on two cores that costs a third of the throughput.
    """

    def __init__(self, on_failure: Callable[[BaseException], None] | None = None) -> None:
        """on_failure: called once, from the dying thread, with what `failure` then holds."""
        super().__init__(name="engine", daemon=True)
        self.failure: BaseException | None = None  # why the thread ended; None while it runs
        self._on_failure = on_failure
        self._lock = threading.Lock()  # between a last call and the thread's end
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()

    def call(self, function: Callable[..., Result], *args: Any) -> Future[Result]:
        """Run function(*args) when everything handed over before it is done.

        What it raises is the future's. EngineFailedError, and what is no Exception at all, is also the thread's end: from
        then on every future gets it.
        """
        future: Future[Result] = Future()
        with self._lock:
            if self.failure is not None:
                future.set_exception(self.failure)
            else:
                self._calls.put((future, function, args))
        return future

    def run(self) -> None:
        while self.failure is None:
            future, function, args = self._calls.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*args))
            except BaseException as error:
                if isinstance(error, EngineFailedError) or not isinstance(error, Exception):
                    self._end(error)
                future.set_exception(error)

    def _end(self, failure: BaseException) -> None:
        with self._lock:
            self.failure = failure
            while not self._calls.empty():
                future, _, _ = self._calls.get()
                if future.set_running_or_notify_cancel():
                    future.set_exception(failure)
        if self._on_failure is not None:
            try:
                self._on_failure(failure)
            except Exception:
                log.exception("whoever watches the engine's thread failed to take note of its end")
