"""Relay of outputs from the engine's thread to the event loop, many at a time.

Waking the event loop for every sequence of every step would take more of the shared interpreter than decoding does. So
outputs gather here. The loop wakes at once for the first tokens of a sequence and its end, otherwise once per interval, or
not at all where the caller gets everything at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from speclen.worker.observing.metrics import RequestTimeline
from speclen.worker.requests.request import FinishReason, GenerationRequest, SequenceOutput

# Most tokens of one request that wait for its client: with 20 log probabilities each they take some 30 MB.
MAX_WAITING_TOKENS = 16_384


@dataclass(slots=True)
class OutputStream:
    """Outputs of one call, on the event loop. failure: the error that follows the last output.

    begun: its requests are queued; aborted: they were aborted before that; ending: the caller has left.
    on_output: called with every output as it arrives. task: of the caller, cancelled when it gives up, though its prompt or
    grammar may have to be finished. until_end: outputs between the first tokens and the end of a sequence may wait.
    num_tokens: in `waiting`; on_overflow: called when they exceed MAX_WAITING_TOKENS. wake_s: see `AsyncEngine.open`.
    """

    until_end: bool = False
    wake_s: float | None = None
    task: asyncio.Task[Any] | None = None
    waiting: list[SequenceOutput] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None
    num_tokens: int = 0
    begun: bool = False
    aborted: bool = False
    ending: bool = False
    on_output: Callable[[SequenceOutput], None] | None = None
    on_overflow: Callable[[], None] | None = None

    @property
    def is_given_up(self) -> bool:
        """True if its caller has left, though it has not ended."""
        return self.ending or (self.task is not None and self.task.cancelling() > 0)

    def put(self, output: SequenceOutput) -> None:
        self.waiting.append(output)
        self.num_tokens += len(output.token_ids)
        if self.on_output is not None:
            self.on_output(output)
        if not self.until_end or is_urgent(output):
            self.arrived.set()
        if self.num_tokens > MAX_WAITING_TOKENS and self.on_overflow is not None:
            self.on_overflow()

    def fail(self, error: Exception) -> None:
        """Let `next` raise the error after the last output; the first error counts."""
        self.failure = self.failure or error
        self.arrived.set()

    async def next(self) -> list[SequenceOutput]:
        """All outputs since the last call, in order; waits for at least one, or wake_s. Raises the failure."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.wake_s):
                await self.arrived.wait()
        if self.failure is not None and not self.waiting:
            raise self.failure
        if self.failure is None:
            self.arrived.clear()
        outputs, self.waiting, self.num_tokens = self.waiting, [], 0
        return outputs


def is_urgent(output: SequenceOutput) -> bool:
    """True for the first tokens of a sequence and for its end, for which callers wait."""
    return output.finish_reason is not None or output.num_steps <= 1


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
        urgent = is_urgent(output)
        if urgent and not self._urgent:
            self._urgent = True
            self._call(self._deliver)
        elif not (urgent or self._scheduled or stream.until_end):
            self._scheduled = True
            self._call(lambda: self._loop.call_later(self._interval_s, self._deliver_timed))

    def _call(self, callback: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(callback)

    def _deliver_timed(self) -> None:
        self._scheduled = False
        self._deliver()

    def _deliver(self) -> None:
        self._urgent = False
        while self._gathered:
            stream, output = self._gathered.popleft()
            stream.put(output)


class Run:
    """One request from the queue to its end. leave: frees the place that was entered at that time."""

    def __init__(
        self,
        request: GenerationRequest,
        stream: OutputStream,
        timeline: RequestTimeline,
        leave: Callable[[float], None],
    ) -> None:
        self.request = request
        self.stream = stream
        self.timeline = timeline
        self.ended = asyncio.Event()
        self.num_outside = request.sampling.n  # the last sequences, not admitted yet
        self._inside: dict[int, float] = {}  # admission times of the others, without ended ones
        self._leave = leave

    def enter(self, entered_at: float) -> None:
        """Note that the next sequence has its place."""
        self._inside[self.request.sampling.n - self.num_outside] = entered_at
        self.num_outside -= 1

    def saw(self, output: SequenceOutput) -> None:
        """Note every output of the request, in order, also where the client does not read."""
        self.timeline.saw(output)
        if output.finish_reason is None:
            return
        if output.index in self._inside:
            self._leave(self._inside.pop(output.index))
        if not self._inside and not self.num_outside:
            self.ended.set()

    def leave(self) -> None:
        """Free the remaining places."""
        while self._inside:
            self._leave(self._inside.popitem()[1])

    def abort_outside(self) -> bool:
        """End the sequences that are not admitted yet. Returns True if there are any."""
        num_outside, self.num_outside = self.num_outside, 0
        for index in range(self.request.sampling.n - num_outside, self.request.sampling.n):
            self.stream.put(
                SequenceOutput(
                    *(self.request.request_id, index, (), ""),
                    finish_reason=FinishReason.ABORT,
                    num_prompt_tokens=len(self.request.prompt_ids),
                    made_at=time.monotonic(),
                )
            )
        return num_outside > 0
