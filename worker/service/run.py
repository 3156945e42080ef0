"""A request on its way through a worker: its admitted sequences, and its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from speclen.worker.observing.request_metrics import RequestTimeline
from speclen.worker.requests.request import FinishReason, GenerationRequest, SequenceOutput
from speclen.worker.service.relay import OutputStream


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
