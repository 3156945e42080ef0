"""A thread for work that would block the event loop, with a fair queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from speclen.worker.service.fair_queue import FairQueue

Result = TypeVar("Result")


class Aside(FairQueue):
    """A queue for one thread. max_waiting: calls that may wait."""

    def __init__(self, name: str, max_waiting: int) -> None:
        super().__init__(1, max_waiting)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def do(self, caller: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call the function in the thread. Raises what it raises, and QueueFullError when too many wait.

        A cancelled caller still waits for the end: the call cannot be stopped, and the thread is not free before.
        """
        async with self.turn(caller):
            work = asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.wait([work])
                raise

    def close(self, wait: bool = False) -> None:
        """wait: for the running call."""
        self._thread.shutdown(wait=wait, cancel_futures=True)
