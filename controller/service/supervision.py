"""Somebody who notices when what has to run for ever ends: half a controller would lie about what is durable."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from threading import Thread
from typing import Any

# How often it is looked whether threads are alive. An end is told, and the process gone, within a second.
LOOK_INTERVAL_S = 0.25


class EndedError(Exception):
    """Something that has to run for ever has ended."""


class Supervisor:
    """Tasks that may not end before `stop`. failure: done, with a sentence, as soon as one has."""

    def __init__(self) -> None:
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run work in a task, named for the sentence that tells of its end."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def watch(self, thread: Thread) -> None:
        """Count the end of a thread as one of a task."""
        self.start(thread.name, until_dead(thread))

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if task in self._tasks and not self.failure.done():
            self.failure.set_result(f"{task.get_name()} has ended: {error or 'without a reason'}")

    async def stop(self) -> None:
        """End all tasks."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_dead(thread: Thread) -> None:
    """Raises EndedError once the thread is no more."""
    while thread.is_alive():
        await asyncio.sleep(LOOK_INTERVAL_S)
    raise EndedError("its thread is dead")
