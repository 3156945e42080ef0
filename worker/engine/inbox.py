"""Inbox of the engine's thread: sequences, aborts, and the request to stop. Safe from any thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from speclen.worker.requests.request import DrainingError, EngineFailedError
from speclen.worker.requests.sequence import SequenceState


class Inbox:
    """Registry of the accepted sequences that have not ended."""

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

        Raises EngineFailedError, DrainingError, or ValueError for an id in use.
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
        """Ask for the end of a request. Returns False for an unknown id."""
        with self._changed:
            if request_id not in self._unfinished:
                return False
            self._aborting.add(request_id)
            self._changed.notify()
            return True

    def stop(self) -> None:
        """Accept no more requests, and abort all."""
        with self._changed:
            self._stopping = True
            self._aborting.update(self._unfinished)
            self._changed.notify()

    # For the engine's thread.

    def wait(self, busy: bool) -> bool:
        """Sleep until there is something to do, not at all if busy. Returns True to stop after it."""
        with self._changed:
            self._changed.wait_for(lambda: busy or self._incoming or self._aborting or self._stopping)
            return self._stopping

    def take(self) -> tuple[list[SequenceState], set[str]]:
        """Sequences put in, and ids of requests to abort, since the last call."""
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
        """Remove and return every unfinished sequence. failure: set when no request may be accepted any more."""
        with self._changed:
            self.failure = failure or self.failure
            self._incoming, self._aborting = [], set()
            return [sequence for left in self._unfinished.values() for sequence in left]
