"""StreamReports: each call of a worker, and all open calls together."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from grpc import aio

from speclen.controller.service.guards import View
from speclen.controller.service.learner import Learner
from speclen.controller.service.registry import FullError, Worker
from speclen.controller.wire.ingest import MAX_REPORTS
from speclen.controller.wire.messages import InvalidMessageError, check_range, probe_message, table_message
from speclen.records import ContextKey, Limits
from speclen.v1 import control_pb2 as pb

if TYPE_CHECKING:
    StreamContext = aio.ServicerContext[pb.StreamReportsRequest, pb.StreamReportsResponse]


EOF: Any = aio.EOF  # type: ignore[attr-defined]
# A stream that sent a message within this time will send another, whose answer carries the update and saves a message.
# With many busy workers these messages would be much of the work, and all be sent while other answers wait.
BUSY_S = 0.7
# Seconds between checks for updates.
PUSH_INTERVAL_S = 0.25
# Iterations of the event loop between two messages while more wait. A message makes two events: its answer is written, and
# the next one is read.
EVENTS_PER_MESSAGE = 2


class StreamEndError(Exception):
    """The controller ends a stream with this status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code


class Stream:
    """One StreamReports call: reads messages, passes their reports on, and answers each.

    A worker that does not read its answers is not read from either, since an answer waits for the connection's flow-control
    window. So it costs one message of memory, however much it sends, and after a while its stream is ended.
    """

    def __init__(self, call: StreamContext, hub: Streams) -> None:
        self.call = call
        self.hub = hub
        self.worker: Worker | None = None
        self.epoch = 0
        self.heard_at = time.monotonic()
        self.writing_since: float | None = None
        self.end: asyncio.Future[StreamEndError] = asyncio.get_running_loop().create_future()
        self._num_refused_before = 0
        self._sent_table: pb.Table | None = None
        self._sent_durable_seq = -1
        self._lock = asyncio.Lock()

    async def serve(self) -> None:
        """Run until the worker or the controller ends the call. Raises StreamEndError, and the errors of Registry.find."""
        reader = asyncio.create_task(self._read())
        ends: set[asyncio.Future[Any]] = {reader, self.end}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self.end.done():
                raise self.end.result()
            reader.result()
        except aio.BaseError:
            pass  # the worker has disconnected, and will send its reports again
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def finish(self, code: grpc.StatusCode, details: str) -> None:
        """End the stream from the controller's side."""
        if not self.end.done():
            self.end.set_result(StreamEndError(code, details))

    def excuse(self, seconds: float) -> None:
        """Do not count these seconds as silence, or as waiting for the worker."""
        self.heard_at += seconds
        if self.writing_since is not None:
            self.writing_since += seconds

    async def _read(self) -> None:
        """Handle and answer messages until the worker closes its side."""
        while (request := await self.call.read()) is not EOF:
            if self.hub.draining:
                await self.end  # messages that arrive now are left to the next controller
            self.heard_at = time.monotonic()
            worker = self.worker or self._introduce(request)
            async with self.hub.turn():
                self._take(worker, request)
            await self.send(worker)
            await self.hub.learner.journal.wait_for_room()
        await self._wait_until_durable()

    def _introduce(self, request: pb.StreamReportsRequest) -> Worker:
        if not request.HasField("worker"):
            raise InvalidMessageError("worker", "the first message of a stream must name the worker")
        self.worker = self.hub.find(request.worker)
        self.epoch = self.worker.epoch
        self._num_refused_before = self.worker.num_refused
        self.hub.name(self, self.worker)
        return self.worker

    def _take(self, worker: Worker, request: pb.StreamReportsRequest) -> None:
        worker.check_epoch(self.epoch)
        check_range("the number of reports in a message", len(request.reports), 0, MAX_REPORTS)
        with self.hub.learner.sampling.measured():
            self.hub.learner.take(worker, request.reports)

    def has_news(self) -> bool:
        """True if the worker does not have the present table, durable_seq or probe."""
        worker = self.worker
        if worker is None or worker.epoch != self.epoch:
            return False
        stale = worker.durable_seq != self._sent_durable_seq or worker.probe is not None
        return stale or self.hub.message_for(worker) is not self._sent_table

    async def send(self, worker: Worker) -> None:
        """Send the present state; one message at a time."""
        async with self._lock:
            response = self._response(worker)
            self.writing_since = time.monotonic()
            await self.call.write(response)
            self.writing_since = None

    def _response(self, worker: Worker) -> pb.StreamReportsResponse:
        self._sent_durable_seq = worker.durable_seq
        response = pb.StreamReportsResponse(
            applied_seq=worker.seqs.applied_seq,
            durable_seq=worker.durable_seq,
            num_refused=worker.num_refused - self._num_refused_before,
            last_refusal=worker.last_refusal,
            sample_every=self.hub.learner.sampling.sample_every,
        )
        table = self.hub.message_for(worker)
        if table is not self._sent_table:
            response.table.CopyFrom(table)
            self._sent_table = table
        if worker.probe is not None:
            settings = self.hub.settings
            steps_s = min(settings.probe_valid_steps * worker.last_step_s, settings.silence_s)
            response.probes.append(probe_message(worker.probe, max(settings.probe_valid_s, steps_s)))
            worker.probe = None
        return response

    async def tell(self) -> None:
        """Send updates if there are any."""
        if self.worker is not None and self.has_news():
            with contextlib.suppress(aio.BaseError):  # the worker has disconnected, which the reader will notice
                await self.send(self.worker)

    async def _wait_until_durable(self) -> None:
        """After the last message, wait for the disk, so that the worker can drop what it sent."""
        worker = self.worker
        if worker is None:
            return
        give_up_at = time.monotonic() + self.hub.settings.last_answer_s
        while worker.durable_seq < worker.seqs.settled_seq and time.monotonic() < give_up_at:
            await asyncio.sleep(0.02)
        await self.tell()


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Bounds on streams; times in seconds."""

    # Largest number of open streams; further ones are refused with RESOURCE_EXHAUSTED. A stream takes some 50 kB.
    max_streams: int = 4096
    # A stream without a message for this long is ended, since workers send an empty one every second.
    silence_s: float = 30.0
    # A stream whose answer is not read for this long is ended.
    unread_s: float = 10.0
    # A probe expires if it waits longer for a fitting step, since the table may have changed by then. It waits for at least
    # this many steps, whatever they take (up to silence_s), since it arrives while a step is running.
    probe_valid_s: float = 2.0
    probe_valid_steps: float = 4.0
    # After the worker has closed its side, wait this long for the disk, so that the last answer says "durable".
    last_answer_s: float = 2.0


class Streams:
    """All open streams: their admission, updates, and timeouts. draining: why new ones are refused; "" if they are not."""

    def __init__(
        self,
        learner: Learner,
        find: Callable[[pb.WorkerIdentity], Worker],
        settings: StreamSettings | None = None,
    ) -> None:
        self.learner = learner
        self.find = find
        self.settings = settings or StreamSettings()
        self.open: set[Stream] = set()
        self.by_worker: dict[str, Stream] = {}
        self.draining = ""
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._pushes: set[asyncio.Task[None]] = set()
        self._tables: dict[tuple[ContextKey, View, Limits], tuple[int, pb.Table]] = {}

    async def serve(self, call: StreamContext) -> None:
        """Serve one call. Raises FullError if too many are open."""
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
        """Handle one message at a time, in order of arrival, and let gRPC's events in between.

        gRPC passes one event to the event loop per iteration. If thousands of streams handled their messages as these
        arrive, a new call would wait for all of them, iteration after iteration, and after a restart the service would need
        minutes to recover.
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
        """Note whose stream this is. It replaces an earlier one of the same worker, whose connection must be dead."""
        earlier = self.by_worker.get(worker.worker_id)
        if earlier is not None:
            earlier.finish(grpc.StatusCode.ABORTED, "the worker has opened another stream")
        self.by_worker[worker.worker_id] = stream

    def end_old_epoch(self, worker: Worker) -> None:
        """End the stream of an old incarnation, since a new one has registered."""
        stream = self.by_worker.get(worker.worker_id)
        if stream is not None and stream.epoch != worker.epoch:
            stream.finish(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"epoch {stream.epoch} of worker {worker.worker_id!r} is over: "
                f"epoch {worker.epoch} has registered since",
            )

    def message_for(self, worker: Worker) -> pb.Table:
        """The worker's table as a message, with arms that it can run; one message per version."""
        table, view = self.learner.table_in_use(worker)
        place = worker.context.key, view, worker.limits
        version, message = self._tables.get(place, (-1, None))
        if message is None or version != table.version:
            message = table_message(table, worker.limits)
            self._tables[place] = table.version, message
        return message

    async def deliver(self) -> None:
        """Push updates, until cancelled, to workers that get no answer soon."""
        while True:
            await asyncio.sleep(PUSH_INTERVAL_S)
            quiet_since = time.monotonic() - BUSY_S
            for stream in list(self.open):
                if stream.heard_at < quiet_since and stream.writing_since is None and stream.has_news():
                    push = asyncio.create_task(stream.tell())
                    self._pushes.add(push)
                    push.add_done_callback(self._pushes.discard)

    async def sweep(self, interval_s: float = 1.0) -> None:
        """Until cancelled, end silent streams, and keep expected times and the sampling of reports fresh.

        Time during which this process did not run, as it was stopped or starved, does not count as silence.
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
        """Save, tell every worker how far it is saved, and end the streams. draining must have been set before."""
        await save()
        last_words = [asyncio.create_task(stream.tell()) for stream in self.open]
        if last_words:
            await asyncio.wait(last_words, timeout=self.settings.last_answer_s)
        self.end_all(self.draining)
        for task in last_words:
            task.cancel()
        await asyncio.gather(*last_words, return_exceptions=True)

    def end_all(self, reason: str) -> None:
        """End every stream, and accept no others."""
        self.draining = reason
        for stream in list(self.open):
            stream.finish(grpc.StatusCode.UNAVAILABLE, reason)
