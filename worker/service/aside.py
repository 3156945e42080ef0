"""Work that would hold up the event loop, in a thread beside it, callers taking turns."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from speclen.worker.service.turnstile import Turnstile, done_by

Result = TypeVar("Result")


class Aside:
    """For one event loop. One thread, which does one thing at a time. max_waiting: things that wait for that at most."""

    def __init__(self, name: str, max_waiting: int) -> None:
        self._turnstile = Turnstile(1, max_waiting)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    @property
    def num_waiting(self) -> int:
        return self._turnstile.num_waiting

    def expected_wait_s(self, caller: str) -> float:
        return self._turnstile.expected_wait_s(caller)

    async def do(self, caller: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """What the function gives. Raises what it raises, and QueueFullError when too many wait."""
        async with self._turnstile.turn(caller):
            return await done_by(self._thread, function, *arguments)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
