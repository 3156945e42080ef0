"""The fairness queue: a bounded number of sequences run, the others wait, and their callers take turns."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from speclen.worker.requests.request import QueueFullError

Result = TypeVar("Result")

SMOOTHING = 0.1  # weight of the newest stay in the mean stay


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A waiting request. come: done once it is admitted or evicted. begun: an earlier sequence of the request is inside."""

    come: asyncio.Future[None]
    begun: bool


class FairQueue:
    """A bounded queue in which callers take turns. For one event loop.

    width: places inside. max_waiting: largest number of requests that wait for their first place. max_wait_s: a request with
    a longer expected wait is refused at once, so that its caller can try another worker; 0: no limit. full: an error's words
    for a full queue.

    A caller with a single request waits for one round, not for all requests of another caller. A request of several
    sequences asks for one place after another, so that other requests come in between. If the queue is full, a new request
    is refused, unless another caller has at least two more requests waiting: then that caller's newest one is evicted. So no
    caller can fill the queue for others.
    """

    def __init__(self, width: int, max_waiting: int, max_wait_s: float = 0.0, full: str = "") -> None:
        self._full = full or f"{max_waiting} requests are waiting already"
        self._width = self._num_free = width
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s or math.inf
        self._mean_stay_s = 0.0  # inside; 0 until the first has left
        self._waiting: dict[str, deque[Turn]] = {}  # by caller, the next one first

    @property
    def num_waiting(self) -> int:
        """Number of requests with no sequence inside yet. Safe from any thread, as the metrics page needs."""
        return sum(num_new(queue) for queue in list(self._waiting.values()))

    def expected_wait_s(self, caller: str) -> float:
        """Expected wait of another request of the caller, by the mean stay so far (Little's law)."""
        if self._num_free > 0:
            return 0.0
        own = len(self._waiting.get(caller, ()))
        ahead = sum(len(queue) if name == caller else min(len(queue), own + 1) for name, queue in self._waiting.items())
        return (ahead + 1) * self._mean_stay_s / self._width

    @contextlib.asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Wait for the turn, and stay inside while the block runs. Raises QueueFullError."""
        entered_at = await self.enter(caller)
        try:
            yield
        finally:
            self.leave(entered_at)

    async def enter(self, caller: str, patience_s: float = math.inf, begun: bool = False) -> float:
        """Wait for the turn. Returns the time of entry, for `leave`, which frees the place.

        patience_s: the caller's deadline. begun: an earlier sequence of the request is inside, so this one is never refused
        or evicted. Raises QueueFullError, at once if the expected wait is too long.
        """
        if self._num_free > 0:
            self._num_free -= 1
        else:
            if not begun:
                self._check_wait(caller, patience_s)
            await self._wait(caller, begun)
        return time.monotonic()

    def leave(self, entered_at: float) -> None:
        """Give the place to the next request."""
        stay_s = time.monotonic() - entered_at
        self._mean_stay_s += (SMOOTHING if self._mean_stay_s else 1.0) * (stay_s - self._mean_stay_s)
        self._pass_on()

    def _check_wait(self, caller: str, patience_s: float) -> None:
        """Raise QueueFullError if the expected wait is too long."""
        expected_s = self.expected_wait_s(caller)
        if expected_s > min(self._max_wait_s, patience_s):
            limit = f"the deadline leaves {patience_s:.1f} s"
            if self._max_wait_s < patience_s:
                limit = f"--max-queue-s is {self._max_wait_s:g}"
            raise QueueFullError(
                f"{self.num_waiting} requests are waiting already: this one would wait for about {expected_s:.1f} s, and "
                f"{limit}: try again later"
            )

    async def _wait(self, caller: str, begun: bool) -> None:
        if not begun and self.num_waiting >= self._max_waiting:
            self._make_room(caller)
        turn = Turn(asyncio.get_running_loop().create_future(), begun)
        self._waiting.setdefault(caller, deque()).append(turn)
        started = time.monotonic()
        try:
            await turn.come
        except QueueFullError as error:
            waited_s = time.monotonic() - started
            raise QueueFullError(f"{error} after {waited_s:.1f} s in the queue: try again later") from None
        except asyncio.CancelledError:
            if turn.come.done() and not turn.come.cancelled():
                if turn.come.exception() is None:
                    self._pass_on()  # the turn came at the moment of the cancellation
            else:
                self._forget(caller, turn)
            raise

    def _make_room(self, caller: str) -> None:
        """Evict the newest request of the caller with the most, or raise QueueFullError if that would not be fairer."""
        numbers = {name: num_new(queue) for name, queue in self._waiting.items()}
        greediest = max(numbers, key=lambda name: numbers[name], default=caller)
        if greediest == caller or numbers[greediest] < numbers.get(caller, 0) + 2:
            expected_s = self.expected_wait_s(caller)
            about = f", and one more would wait for about {expected_s:.1f} s" if expected_s else ""
            raise QueueFullError(f"{self._full}{about}: try again later")
        turn = next(turn for turn in reversed(self._waiting[greediest]) if not turn.begun)
        self._forget(greediest, turn)
        if not turn.come.done():  # otherwise it gave up at the same moment
            turn.come.set_exception(QueueFullError("evicted in favour of a caller with fewer requests"))

    def _pass_on(self) -> None:
        """Give the place to the first request of the next caller, who then goes to the end of the line."""
        self._num_free += 1
        while self._num_free > 0 and self._waiting:
            caller = next(iter(self._waiting))
            queue = self._waiting.pop(caller)
            while queue and queue[0].come.done():  # gave up at the same moment
                queue.popleft()
            if queue:
                turn = queue.popleft()
                turn.come.set_result(None)
                self._num_free -= 1
                if queue:
                    self._waiting[caller] = queue

    def _forget(self, caller: str, turn: Turn) -> None:
        queue = self._waiting.get(caller)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[caller]


class ThreadQueue(FairQueue):
    """A thread for work that would block the event loop, with a queue for its callers. max_waiting: calls that may wait."""

    def __init__(self, name: str, max_waiting: int) -> None:
        super().__init__(1, max_waiting, full=f"{max_waiting} requests are waiting for the {name} already")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def do(self, caller: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call the function in the thread. Raises its errors, and QueueFullError if too many calls wait.

        A cancelled caller still waits until the call returns, since a call cannot be stopped.
        """
        async with self.turn(caller):
            work = asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.wait([work])
                raise

    def close(self, wait: bool = False) -> None:
        """Cancel waiting calls. wait: True to wait for the running one."""
        self._thread.shutdown(wait=wait, cancel_futures=True)


def num_new(queue: deque[Turn]) -> int:
    """Number of requests in the queue with no sequence inside. Safe from any thread, since copying is atomic."""
    return sum(not turn.begun for turn in tuple(queue))
