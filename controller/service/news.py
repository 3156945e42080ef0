"""For whom something has changed: written where it changes, read where it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class News:
    """Workers whose table or durable_seq has moved since somebody asked; at most one entry a worker."""

    def __init__(self) -> None:
        self._worker_ids: set[str] = set()
        self._is_some = asyncio.Event()

    def note(self, worker_ids: Iterable[str]) -> None:
        """There is something to tell these workers."""
        self._worker_ids.update(worker_ids)
        if self._worker_ids:
            self._is_some.set()

    async def wait(self) -> None:
        """Until somebody has been noted since the last `take`."""
        await self._is_some.wait()

    def take(self) -> set[str]:
        """Everybody noted since the last call."""
        taken, self._worker_ids = self._worker_ids, set()
        self._is_some.clear()
        return taken
