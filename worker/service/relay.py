"""Carries outputs from the engine's thread to the event loop, many at a time.

Waking the event loop for every row of every step would cost more of the interpreter than decoding does, and the engine
shares that interpreter. So outputs gather here, and the loop is woken at once only for what somebody waits for (the
first tokens of a sequence, its end) and otherwise once per interval.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from speclen.worker.engine.request import SequenceOutput


@dataclass(slots=True)
class OutputStream:
    """Outputs of one request on the event loop's side."""

    waiting: list[SequenceOutput] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def next(self) -> list[SequenceOutput]:
        """Everything that arrived since the last call, in order; waits for at least one."""
        await self.arrived.wait()
        self.arrived.clear()
        outputs, self.waiting = self.waiting, []
        return outputs


class OutputRelay:
    """Streams by request id; `put` is for the engine's thread, everything else for the event loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._gathered: deque[tuple[OutputStream, SequenceOutput]] = deque()
        self._scheduled = False  # a timed delivery is under way; set and cleared on the event loop
        self._urgent = False  # an immediate delivery is under way

    def put(self, stream: OutputStream, output: SequenceOutput) -> None:
        self._gathered.append((stream, output))
        urgent = output.finish_reason is not None or output.num_steps <= 1
        if urgent and not self._urgent:
            self._urgent = True
            self._call(self._deliver)
        elif not urgent and not self._scheduled:
            self._scheduled = True
            self._call(self._deliver_later)

    def _call(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody listens any more
            self._loop.call_soon_threadsafe(callback)

    def _deliver_later(self) -> None:
        self._loop.call_later(self._interval_s, self._deliver_timed)

    def _deliver_timed(self) -> None:
        self._scheduled = False
        self._deliver()

    def _deliver(self) -> None:
        self._urgent = False
        while self._gathered:
            stream, output = self._gathered.popleft()
            stream.waiting.append(output)
            stream.arrived.set()
