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

    def __init__(self, on_failure: Callable[[BaseException], None] | None = None) -> None:
        """on_failure: called once, from this thread, with what ended the engine's loop; see `serve`."""
        super().__init__(name="engine", daemon=True)
        self.failure: BaseException | None = None
        self._on_failure = on_failure
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()

    def call(self, function: Callable[..., Result], *args: Any) -> Future[Result]:
        """Run function(*args) when everything handed over before it is done."""
        future: Future[Result] = Future()
        self._calls.put((future, function, args))
        return future

    def serve(self, run: Callable[[], None]) -> Future[None]:
        """Like `call`, for the loop that serves: what it raises is the engine's failure, which somebody has to notice."""
        return self.call(self._serve, run)

    def _serve(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            self.failure = error
            if self._on_failure is not None:
                self._on_failure(error)
            raise

    def run(self) -> None:
        while True:
            future, function, args = self._calls.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)
