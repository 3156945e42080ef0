"""One StreamReports call: reads messages, hands their reports on, and answers each.

A worker that does not read its answers is not read from either (the answer waits for the connection's window), so it
costs one message of memory, however much it sends; after a while its stream is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import grpc
from grpc import aio

from speclen.controller.service.registry import Worker
from speclen.controller.wire.ingest import MAX_REPORTS
from speclen.controller.wire.messages import probe_message
from speclen.controller.wire.validation import InvalidMessageError, check_range
from speclen.v1 import control_pb2 as pb

EOF: Any = aio.EOF  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from speclen.controller.service.streams import Streams

    StreamContext = aio.ServicerContext[pb.StreamReportsRequest, pb.StreamReportsResponse]
else:
    StreamContext = Any


class StreamEndError(Exception):
    """The controller ends a stream, with this status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code


class Stream:
    """One call. `serve` runs until the worker or the controller ends it."""

    def __init__(self, call: StreamContext, hub: Streams) -> None:
        self.call = call
        self.hub = hub
        self.worker: Worker | None = None
        self.epoch = 0
        self.heard_at = time.monotonic()
        self.writing_since: float | None = None
        self.end: asyncio.Future[StreamEndError] = asyncio.get_running_loop().create_future()
        self._num_refused_before = 0
        self._sent_table: pb.LengthTable | None = None
        self._sent_durable_seq = -1
        self._lock = asyncio.Lock()

    async def serve(self) -> None:
        """Raises StreamEndError, and what the registry raises for an unknown worker or an old epoch."""
        reader = asyncio.create_task(self._read())
        ends: set[asyncio.Future[Any]] = {reader, self.end}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self.end.done():
                raise self.end.result()
            reader.result()
        except aio.BaseError:
            pass  # the worker is gone; it will be back with what it still has
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def finish(self, code: grpc.StatusCode, details: str) -> None:
        """End the stream from the controller's side."""
        if not self.end.done():
            self.end.set_result(StreamEndError(code, details))

    def excuse(self, seconds: float) -> None:
        """Do not count these seconds as silence or as waiting for the worker."""
        self.heard_at += seconds
        if self.writing_since is not None:
            self.writing_since += seconds

    async def _read(self) -> None:
        """Take and answer messages until the worker has closed its side."""
        while (request := await self.call.read()) is not EOF:
            if self.hub.draining:
                await self.end  # what comes now is taken by the next controller
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
            self.hub.intake.take(worker, request.reports)

    def has_news(self) -> bool:
        """True if the worker does not know the table, durable_seq or probe of this moment."""
        worker = self.worker
        if worker is None or worker.epoch != self.epoch:
            return False
        stale = worker.durable_seq != self._sent_durable_seq or worker.probe is not None
        return stale or self.hub.table(worker) is not self._sent_table

    async def send(self, worker: Worker) -> None:
        """Send the state of this moment; one message at a time."""
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
        table = self.hub.table(worker)
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
        """Send updates, if there are any."""
        if self.worker is not None and self.has_news():
            with contextlib.suppress(aio.BaseError):  # the worker is gone; the reader will notice
                await self.send(self.worker)

    async def _wait_until_durable(self) -> None:
        """The worker has said all: let the disk catch up, so that it can forget what it sent."""
        worker = self.worker
        if worker is None:
            return
        give_up_at = time.monotonic() + self.hub.settings.last_answer_s
        while worker.durable_seq < worker.seqs.settled_seq and time.monotonic() < give_up_at:
            await asyncio.sleep(0.02)
        await self.tell()
