"""Open StreamReports calls: one task reads and answers, another sends news, and a sweep ends those that went silent.

A worker that does not read its answers is not read from either (the answer waits for the connection's window), so it
costs one message of memory, however much it sends; after a while its stream is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from grpc import aio

from speclen.controller.estimator.core import Mix
from speclen.controller.service.learning_service import LearningService
from speclen.controller.service.news import News
from speclen.controller.service.registry import FullError, Worker, check_epoch
from speclen.controller.wire.messages import mix_message, probe_message, table_message
from speclen.controller.wire.sums import MAX_WINDOWS
from speclen.controller.wire.validation import MAX_REPORTS, InvalidMessageError
from speclen.v1 import control_pb2 as pb

# A stream that spoke within this time will speak again, and its next answer carries what is new: a message saved. With
# many busy workers those messages would be a good part of the work, and all be sent while everybody's answers wait.
BUSY_S = 0.7
# Between two looks at who has news.
NEWS_INTERVAL_S = 0.05
# A worker that adds its steps up is answered at least so often; it gives a stream up after five seconds without a word.
ANSWER_WITHIN_S = 0.7

# Rounds of the event loop between two messages while more wait. A message makes two events: its answer is written, the
# next one is read.
EVENTS_PER_MESSAGE = 2

EOF: Any = aio.EOF  # type: ignore[attr-defined]

if TYPE_CHECKING:
    StreamContext = aio.ServicerContext[pb.StreamReportsRequest, pb.StreamReportsResponse]
else:
    StreamContext = Any


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
        self.service = hub.service
        self.worker: Worker | None = None
        self.epoch = 0
        self.heard_at = time.monotonic()
        self.writing_since: float | None = None
        self.news = asyncio.Event()
        self.end: asyncio.Future[StreamEndError] = asyncio.get_running_loop().create_future()
        self._num_refused = 0
        self._last_refusal = ""
        self._sent_table: pb.LengthTable | None = None
        self._sent_durable_seq = -1
        self._sent_window_s: float | None = None  # it may have been told another one when it registered
        self._sent_refused = 0
        self._sent_at = 0.0
        self._lock = asyncio.Lock()

    async def serve(self) -> None:
        """Raises StreamEndError, and what the registry raises for an unknown worker or an old epoch."""
        reader, pusher = asyncio.create_task(self._read()), asyncio.create_task(self._push())
        ends: set[asyncio.Future[Any]] = {reader, pusher, self.end}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self.end.done():
                raise self.end.result()
            for task in (reader, pusher):
                if task.done():
                    task.result()
        except aio.BaseError:
            pass  # the worker is gone; it will be back with what it still has
        finally:
            reader.cancel()
            pusher.cancel()
            await asyncio.gather(reader, pusher, return_exceptions=True)

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
        while (request := await self.call.read()) is not EOF:
            if self.hub.draining:
                await self.end  # what comes now is taken by the next controller
            self.heard_at = time.monotonic()
            if self.worker is None:
                self._introduce(request)
            async with self.hub.turn():
                probes = self._take(request)
            if probes or not request.windows or self._is_owed_an_answer():
                await self._send(probes)
            await self.service.wait_for_room()
        await self._wait_until_durable()

    def _introduce(self, request: pb.StreamReportsRequest) -> None:
        if not request.HasField("worker"):
            raise InvalidMessageError("worker", "the first message of a stream must name the worker")
        self.worker = self.hub.find(request.worker)
        self.epoch = self.worker.epoch
        self.hub.name(self)

    def _take(self, request: pb.StreamReportsRequest) -> list[pb.Probe]:
        """Take the reports of a message; probes come back if it is this worker's turn."""
        worker, reports, windows = self.worker, request.reports, request.windows
        assert worker is not None
        if worker.epoch != self.epoch:
            check_epoch(worker, self.epoch)
        check_size(request)
        refusals = self.service.take(worker, reports, windows)
        if refusals:
            self._num_refused += len(refusals)
            self._last_refusal = str(refusals[-1])
        batch_size, step_s = newest_step(request)
        if not batch_size:
            return []
        self.service.learn_if_many(worker)
        probes = self.service.take_probes(worker, batch_size)
        settings = self.hub.settings
        valid_s = max(settings.probe_valid_s, min(settings.probe_valid_steps * step_s, settings.silence_s))
        return [probe_message(probe, valid_s) for probe in probes]

    async def _push(self) -> None:
        """Send a new table or durable_seq when no answer will bring it soon."""
        while True:
            await self.news.wait()
            self.news.clear()
            if self.has_news():
                await self._send()

    def has_news(self) -> bool:
        """Whether the worker does not know the table or durable_seq of now."""
        worker = self.worker
        if worker is None or worker.epoch != self.epoch:
            return False
        return worker.durable_seq != self._sent_durable_seq or self.hub.table(worker) is not self._sent_table

    def _is_owed_an_answer(self) -> bool:
        """Whether a window is answered at once: half of what it costs is the answer, and most would say little."""
        told = self._num_refused == self._sent_refused and self._window_s() == self._sent_window_s
        return not told or not self.is_patient or self.heard_at - self._sent_at > ANSWER_WITHIN_S

    def _window_s(self) -> float:
        """Seconds of steps that the worker is asked to add up."""
        assert self.worker is not None
        return self.service.thinning.window_s(self.service.learns_from(self.worker))

    @property
    def news_waits_s(self) -> float:
        """Seconds for which its news waits, none or less if it does not: an answer will soon carry it, or all workers of the
        context have just been told some.
        """
        now = time.monotonic()
        if not self._sent_window_s or self.worker is None:
            return self.heard_at + BUSY_S - now
        return self.worker.context.urgent_at - now

    @property
    def is_patient(self) -> bool:
        """Whether its news may wait for an answer, be that late: of a worker that adds up, and that no decision concerns
        which is worth a message to each of thousands.
        """
        return bool(self._sent_window_s) and self.worker is not None and self._sent_at >= self.worker.context.urgent_at

    async def tell(self) -> None:
        """Send durable_seq if it has moved."""
        worker = self.worker
        if worker is not None and worker.epoch == self.epoch and worker.durable_seq != self._sent_durable_seq:
            await self._send()

    async def _send(self, probes: Sequence[pb.Probe] = ()) -> None:
        """Send the state of this moment; one message at a time."""
        async with self._lock:
            response = self._response()
            response.probes.extend(probes)
            self.writing_since = time.monotonic()
            await self.call.write(response)
            self.writing_since = None

    def _response(self) -> pb.StreamReportsResponse:
        worker = self.worker
        assert worker is not None
        self._sent_durable_seq, self._sent_refused = worker.durable_seq, self._num_refused
        self._sent_at = time.monotonic()
        response = pb.StreamReportsResponse(
            applied_seq=worker.window.applied_seq,
            durable_seq=worker.durable_seq,
            num_refused=self._num_refused,
            last_refusal=self._last_refusal,
        )
        table = self.hub.table(worker)
        if table is not self._sent_table:
            response.table.CopyFrom(table)
            self._sent_table = table
        window_s = self._window_s()
        if window_s != self._sent_window_s:
            response.thinning.window_s = self._sent_window_s = window_s
        return response

    async def _wait_until_durable(self) -> None:
        """The worker has said all: let the disk catch up, so that it can forget what it sent."""
        worker = self.worker
        if worker is None:
            return
        give_up_at = time.monotonic() + self.hub.settings.last_answer_s
        while worker.durable_seq < worker.window.settled_seq and time.monotonic() < give_up_at:
            await asyncio.sleep(0.02)
        await self.tell()


def check_size(request: pb.StreamReportsRequest) -> None:
    """Raises InvalidMessageError for a message with too much in it."""
    num_reports = len(request.reports) + sum(len(each.sums) + len(each.reports) for each in request.windows)
    if num_reports > MAX_REPORTS:
        raise InvalidMessageError("reports", f"a message has {num_reports} reports; it may have {MAX_REPORTS}")
    if len(request.windows) > MAX_WINDOWS:
        raise InvalidMessageError("windows", f"a message has {len(request.windows)} windows; it may have {MAX_WINDOWS}")


def newest_step(request: pb.StreamReportsRequest) -> tuple[int, float]:
    """Batch size and seconds of the newest step that a message tells of by name; zeros for none."""
    if not request.windows:
        newest = request.reports[-1] if request.reports else pb.StepReport()
        return newest.batch_size, newest.latency_s
    last = request.windows[-1]
    sums = [(each.first_seq, each.batch_size, each.latency_sum_s / max(each.num_steps, 1)) for each in last.sums]
    steps = [(each.seq, each.batch_size, each.latency_s) for each in last.reports]
    return max([*sums, *steps], default=(0, 0, 0.0))[1:]


class Streams:
    """All open streams: admission, news, and the sweep."""

    def __init__(
        self,
        service: LearningService,
        find: Callable[[pb.WorkerIdentity], Worker],
        news: News,
        settings: StreamSettings | None = None,
    ) -> None:
        self.service = service
        self.find = find
        self.news = news
        self.settings = settings or StreamSettings()
        self.open: set[Stream] = set()
        self.by_worker: dict[str, Stream] = {}
        self.draining = ""  # why nothing is taken any more
        self._with_news: set[Stream] = set()
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._tables: dict[object, tuple[int, Mix | None, pb.LengthTable]] = {}

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
            self._with_news.discard(stream)
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

    def name(self, stream: Stream) -> None:
        """The stream has said whose it is; it takes the place of an earlier one, which must be a dead connection."""
        assert stream.worker is not None
        earlier = self.by_worker.get(stream.worker.worker_id)
        if earlier is not None:
            earlier.finish(grpc.StatusCode.ABORTED, "the worker has opened another stream")
        self.by_worker[stream.worker.worker_id] = stream

    def end_old_epoch(self, worker: Worker) -> None:
        """A new life has registered: the stream of the old one ends."""
        stream = self.by_worker.get(worker.worker_id)
        if stream is not None and stream.epoch != worker.epoch:
            stream.finish(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"epoch {stream.epoch} of worker {worker.worker_id!r} is over: "
                f"epoch {worker.epoch} has registered since",
            )

    def table(self, worker: Worker) -> pb.LengthTable:
        """The table, with lengths that this worker can use; built once per version, and as often as its mix is."""
        table, mix = self.service.table(worker), self.service.mix(worker)
        most = worker.limits.max_speculation_length
        place = worker.context.key, self.service.kind_of(worker), (most, worker.limits.max_copied_tokens)
        kept = self._tables.get(place)
        if kept is None or kept[0] != table.version or kept[1] is not mix:
            message = table_message(table, worker.limits)
            if mix is not None:
                message.mix.CopyFrom(mix_message(mix, most))
            kept = self._tables[place] = (table.version, mix, message)
        return kept[2]

    async def deliver(self) -> None:
        """For ever: have news sent that no answer has carried."""
        while True:
            await self._until_news()
            self._with_news |= {self.by_worker[worker_id] for worker_id in self.news.take() & self.by_worker.keys()}
            for stream in list(self._with_news):
                if not stream.has_news():
                    self._with_news.discard(stream)
                elif stream.news_waits_s <= 0.0:
                    self._with_news.discard(stream)
                    if not stream.is_patient:
                        stream.news.set()

    async def _until_news(self) -> None:
        """Until there is some, or what there was waits no longer. Every look may take a core from a worker."""
        await asyncio.sleep(NEWS_INTERVAL_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min((stream.news_waits_s for stream in self._with_news), default=None)):
                await self.news.wait()

    async def sweep(self, interval_s: float = 1.0) -> None:
        """For ever: end silent streams and keep expected times fresh.

        Time in which this process itself did not run (stopped, or starved) is nobody's silence.
        """
        expected = time.monotonic() + interval_s
        while True:
            await asyncio.sleep(interval_s)
            self.service.refresh()
            now = time.monotonic()
            self.service.judge_load(now, [stream.worker for stream in self.open if stream.worker is not None])
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
