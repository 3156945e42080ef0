"""All open StreamReports calls: their admission, turns, updates for quiet workers, and the end of silent streams."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from speclen.controller.service.guards import View
from speclen.controller.service.intake import Intake
from speclen.controller.service.learner import Learner
from speclen.controller.service.registry import FullError, Worker
from speclen.controller.service.stream import Stream, StreamContext
from speclen.controller.wire.messages import table_message
from speclen.records import ContextKey, Limits
from speclen.v1 import control_pb2 as pb

# A stream that spoke within this time will speak again, and its next answer carries the news: a message saved. With many
# busy workers those messages would be a good part of the work, and all be sent while everybody's answers wait.
BUSY_S = 0.7
# Between two checks for updates.
PUSH_INTERVAL_S = 0.25

# Rounds of the event loop between two messages while more wait. A message makes two events: its answer is written, the
# next one is read.
EVENTS_PER_MESSAGE = 2


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Bounds on streams; times in seconds."""

    # Streams open at once; one more is refused with RESOURCE_EXHAUSTED. A stream takes some 50 kB.
    max_streams: int = 4096
    # A stream without any message for this long is ended: workers send an empty one every second.
    silence_s: float = 30.0
    # A stream whose answer the worker does not take for this long is ended.
    unread_s: float = 10.0
    # A probe is void when it waits longer for a fitting step: by then the table may know better. It waits for so many steps,
    # however long they take (up to silence_s): it comes while one runs, perhaps just after the next has begun.
    probe_valid_s: float = 2.0
    probe_valid_steps: float = 4.0
    # When the worker has closed its side: wait this long for the disk, so that the last answer says "durable".
    last_answer_s: float = 2.0


class Streams:
    """All open streams: admission, updates, and the sweep. draining: why nothing is taken any more."""

    def __init__(
        self,
        intake: Intake,
        learner: Learner,
        find: Callable[[pb.WorkerIdentity], Worker],
        settings: StreamSettings | None = None,
    ) -> None:
        self.intake = intake
        self.learner = learner
        self.find = find
        self.settings = settings or StreamSettings()
        self.open: set[Stream] = set()
        self.by_worker: dict[str, Stream] = {}
        self.draining = ""
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._pushes: set[asyncio.Task[None]] = set()
        self._tables: dict[tuple[ContextKey, View, Limits], tuple[int, pb.LengthTable]] = {}

    async def serve(self, call: StreamContext) -> None:
        """One call from beginning to end. Raises FullError when too many are open."""
        if len(self.open) >= self.settings.max_streams:
            raise FullError(f"{self.settings.max_streams} streams are open, which is the limit: try again later")
        stream = Stream(call, self)
        self.open.add(stream)
        try:
            await stream.serve()
        finally:
            self.open.discard(stream)
            if stream.worker is not None and self.by_worker.get(stream.worker.worker_id) is stream:
                del self.by_worker[stream.worker.worker_id]

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """One message at a time, in order of arrival, and in between what gRPC has to tell.

        gRPC hands one event to the event loop per round. If thousands of streams worked on their messages as these
        arrive, a new call would wait for all of them, round after round: after a restart the service would need minutes to
        come back.
        """
        self._num_waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
            if self._num_waiting:
                for _ in range(EVENTS_PER_MESSAGE):
                    await asyncio.sleep(0)
        finally:
            self._turn.release()

    def name(self, stream: Stream, worker: Worker) -> None:
        """The stream has said whose it is; it takes the place of an earlier one, which must be a dead connection."""
        earlier = self.by_worker.get(worker.worker_id)
        if earlier is not None:
            earlier.finish(grpc.StatusCode.ABORTED, "the worker has opened another stream")
        self.by_worker[worker.worker_id] = stream

    def end_old_epoch(self, worker: Worker) -> None:
        """A new incarnation has registered: the stream of the old one ends."""
        stream = self.by_worker.get(worker.worker_id)
        if stream is not None and stream.epoch != worker.epoch:
            stream.finish(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"epoch {stream.epoch} of worker {worker.worker_id!r} is over: "
                f"epoch {worker.epoch} has registered since",
            )

    def table(self, worker: Worker) -> pb.LengthTable:
        """The worker's table, with arms that it can run; one message per version."""
        table, view = self.learner.table(worker)
        place = worker.context.key, view, worker.limits
        version, message = self._tables.get(place, (-1, None))
        if message is None or version != table.version:
            message = table_message(table, worker.limits)
            self._tables[place] = table.version, message
        return message

    async def deliver(self) -> None:
        """Push updates for ever to workers that get no answer soon."""
        while True:
            await asyncio.sleep(PUSH_INTERVAL_S)
            quiet_since = time.monotonic() - BUSY_S
            for stream in list(self.open):
                if stream.heard_at < quiet_since and stream.writing_since is None and stream.has_news():
                    push = asyncio.create_task(stream.tell())
                    self._pushes.add(push)
                    push.add_done_callback(self._pushes.discard)

    async def sweep(self, interval_s: float = 1.0) -> None:
        """For ever: end silent streams, and keep expected times and the sampling of reports fresh.

        Time in which this process itself did not run (stopped, or starved) does not count as silence.
        """
        expected = time.monotonic() + interval_s
        while True:
            await asyncio.sleep(interval_s)
            self.learner.refresh()
            self.learner.sampling.judge()
            now = time.monotonic()
            asleep_s = max(0.0, now - expected)
            for stream in list(self.open):
                stream.excuse(asleep_s)
                self._look_at(stream, now)
            expected = now + interval_s

    def _look_at(self, stream: Stream, now: float) -> None:
        settings = self.settings
        unread_s = 0.0 if stream.writing_since is None else now - stream.writing_since
        if unread_s > settings.unread_s:
            stream.finish(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"an answer was not read for {settings.unread_s:g} s: read answers"
            )
        elif now - stream.heard_at > settings.silence_s and not unread_s:
            stream.finish(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"no message for {settings.silence_s:g} s: send an empty one when there is nothing to report",
            )

    async def drain(self, save: Callable[[], Any]) -> None:
        """Save, tell every worker how far it is saved, and end the streams. draining has been set before."""
        await save()
        last_words = [asyncio.create_task(stream.tell()) for stream in self.open]
        if last_words:
            await asyncio.wait(last_words, timeout=self.settings.last_answer_s)
        self.end_all(self.draining)
        for task in last_words:
            task.cancel()
        await asyncio.gather(*last_words, return_exceptions=True)

    def end_all(self, reason: str) -> None:
        """End every stream and let no other begin."""
        self.draining = reason
        for stream in list(self.open):
            stream.finish(grpc.StatusCode.UNAVAILABLE, reason)
