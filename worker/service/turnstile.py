"""Lets a bounded number of requests through at a time; the others wait, and their callers take turns."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator

from speclen.worker.requests.request import QueueFullError


class Turnstile:
    """For one event loop. width: requests inside at once. max_waiting: requests that wait for that at most.

    Whoever comes next is the first of the caller whose turn it is, so a caller with one request waits for one round, not
    for all that another caller has sent. When the queue is full, one more request is refused, or pushes out the newest
    of the caller with the most if that has at least two more waiting than its own: nobody can fill the queue for others.
    """

    def __init__(self, width: int, max_waiting: int) -> None:
        self._num_free = width
        self._max_waiting = max_waiting
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by caller, the next one first

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    @contextlib.asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[float]:
        """Wait for the turn, and be inside for the length of the block. The value: seconds waited.

        Raises QueueFullError.
        """
        started = time.monotonic()
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait(caller)
        try:
            yield time.monotonic() - started
        finally:
            self._leave()

    async def _wait(self, caller: str) -> None:
        if self.num_waiting >= self._max_waiting:
            self._make_room(caller)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        started = time.monotonic()
        try:
            await turn
        except QueueFullError as error:
            waited_s = time.monotonic() - started
            raise QueueFullError(f"{error} after {waited_s:.1f} s in the queue: try again later") from None
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                if turn.exception() is None:
                    self._leave()  # The turn had come in the same moment.
            else:
                self._forget(caller, turn)
            raise

    def _make_room(self, caller: str) -> None:
        """Push out a request of the caller with the most. Raises QueueFullError when that would not be fairer."""
        greediest = max(self._waiting, key=lambda name: len(self._waiting[name]), default=caller)
        own = len(self._waiting.get(caller, ()))
        if greediest == caller or len(self._waiting[greediest]) < own + 2:
            raise QueueFullError(f"{self.num_waiting} requests are waiting already: try again later")
        turn = self._waiting[greediest][-1]
        self._forget(greediest, turn)
        turn.set_exception(QueueFullError("pushed out by a caller with fewer requests"))

    def _leave(self) -> None:
        """Give the place to the first of the caller whose turn it is, who then goes behind the other callers."""
        for caller in list(self._waiting):
            queue = self._waiting.pop(caller)
            turn = queue.popleft()
            if queue:
                self._waiting[caller] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1

    def _forget(self, caller: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(caller)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[caller]
