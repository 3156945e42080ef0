"""Work that would hold up the event loop, in a thread beside it, callers taking turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from speclen.worker.service.fair_queue import FairQueue

Result = TypeVar("Result")


class Aside(FairQueue):
    """A queue for one thread, which does one thing at a time. max_waiting: things that wait for that at most."""

    def __init__(self, name: str, max_waiting: int) -> None:
        super().__init__(1, max_waiting)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def do(self, caller: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call the function in the thread. Raises what it raises, and QueueFullError when too many wait.

        A caller that gives up waits for the end nevertheless: work cannot be stopped, and the thread is not free before.
        """
        async with self.turn(caller):
            work = asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.wait([work])
                raise

    def close(self, wait: bool = False) -> None:
        """wait: for the work in hand."""
        self._thread.shutdown(wait=wait, cancel_futures=True)
