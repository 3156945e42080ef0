"""The one thread of a worker that computes with torch: it loads the models, measures, and runs the engine."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class EngineThread(threading.Thread):
    """Runs functions one after the other; a daemon, so that a pass that hangs does not keep the process from ending.

    Every thread that ever computed keeps OpenMP threads of its own. As soon as there are more of them than cores, all
    of them sleep instead of spinning for a moment when they wait for each other, hundreds of times in a pass: with two
    threads on two cores that costs a third of the throughput.
    """

    def __init__(self) -> None:
        super().__init__(name="engine", daemon=True)
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()

    def call(self, function: Callable[..., Result], *args: Any) -> Future[Result]:
        """Run function(*args) when everything handed over before it is done."""
        future: Future[Result] = Future()
        self._calls.put((future, function, args))
        return future

    def run(self) -> None:
        while True:
            future, function, args = self._calls.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)
