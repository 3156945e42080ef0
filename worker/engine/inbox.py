"""Entrance to the engine: its one computing thread, and the inbox through which other threads reach it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from speclen.worker.requests.request import DrainingError, EngineFailedError
from speclen.worker.requests.sequence import SequenceState

Result = TypeVar("Result")


class Inbox:
    """Sequences, aborts and the request to stop, for the engine's thread; also the registry of unfinished sequences.

    Safe from any thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._incoming: list[SequenceState] = []
        self._aborting: set[str] = set()
        self._unfinished: dict[str, list[SequenceState]] = {}  # sequences left of each request
        self._stopping = False
        self.failure: BaseException | None = None  # set once, when the engine has ended

    @property
    def num_incoming(self) -> int:
        with self._changed:
            return len(self._incoming)

    def put(self, sequences: Sequence[SequenceState]) -> None:
        """Accept some or all sequences of one request.

        Raises EngineFailedError, DrainingError, or ValueError if the request id is in use.
        """
        request = sequences[0].request
        with self._changed:
            if self.failure is not None:
                raise EngineFailedError(str(self.failure)) from self.failure
            if self._stopping:
                raise DrainingError("the worker is stopping and takes no new requests")
            unfinished = self._unfinished.setdefault(request.request_id, [])
            if unfinished and unfinished[0].request is not request:
                raise ValueError(f"request_id {request.request_id!r} is already running: choose another")
            unfinished += sequences
            self._incoming += sequences
            self._changed.notify()

    def abort(self, request_id: str) -> bool:
        """Ask for the end of a request. Returns False if the id is unknown."""
        with self._changed:
            if request_id not in self._unfinished:
                return False
            self._aborting.add(request_id)
            self._changed.notify()
            return True

    def stop(self) -> None:
        """Abort all requests, and accept no more."""
        with self._changed:
            self._stopping = True
            self._aborting.update(self._unfinished)
            self._changed.notify()

    # For the engine's thread.

    def wait(self, busy: bool) -> bool:
        """Sleep until there is something to do; busy: there is. Returns True if the engine should stop after that."""
        with self._changed:
            self._changed.wait_for(lambda: busy or self._incoming or self._aborting or self._stopping)
            return self._stopping

    def take(self) -> tuple[list[SequenceState], set[str]]:
        """The sequences put in, and the ids of requests to abort, since the last call."""
        with self._changed:
            incoming, self._incoming = self._incoming, []
            aborting, self._aborting = self._aborting, set()
        return incoming, aborting

    def forget(self, sequence: SequenceState) -> None:
        """Remove a sequence that has ended."""
        request_id = sequence.request.request_id
        with self._changed:
            left = self._unfinished.get(request_id, [])
            if sequence in left:
                left.remove(sequence)
            if not left:
                self._unfinished.pop(request_id, None)
                self._aborting.discard(request_id)

    def give_up(self, failure: BaseException | None = None) -> list[SequenceState]:
        """Return every unfinished sequence, for the caller to end. failure: the error that refuses new requests."""
        with self._changed:
            self.failure = failure or self.failure
            self._incoming, self._aborting = [], set()
            return [sequence for left in self._unfinished.values() for sequence in left]


class EngineThread(threading.Thread):
    """The one thread of a worker that computes with torch. It loads the models, measures, and runs the engine.

    It runs functions one after the other. Every thread that ever computed keeps OpenMP threads of its own. If they
    outnumber the cores, all of them sleep instead of spinning briefly when they wait for each other, hundreds of times in a
    forward pass: with two threads on two cores that costs a third of the throughput. A daemon thread, so that a forward
    pass that hangs does not keep the process alive.
    """

    def __init__(self) -> None:
        super().__init__(name="engine", daemon=True)
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()

    def call(self, function: Callable[..., Result], *args: Any) -> Future[Result]:
        """Run function(*args) after all functions passed before."""
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
