"""The worker's side of the control stream: lengths in, reports out, and nothing that a step waits for.

A step calls `choice_for` (a tuple index) and `report` (an append). An asyncio task sends what was appended, in groups,
and replaces the table when a newer one arrives. A report is kept until the controller says that it is on disk, and sent
again after a reconnect; the buffer is bounded, and what falls out of it is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import grpc
import structlog
from grpc import aio

from speclen.transport.address import past_proxies
from speclen.transport.aio import prepare_aio
from speclen.transport.supervision import until_one_fails
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc
from speclen.worker.drafting.plan import Plan
from speclen.worker.engine.length_chooser import LengthChoice, StepResult
from speclen.worker.reporting.advice import why
from speclen.worker.reporting.buffer import ReportBuffer
from speclen.worker.reporting.length_mix import LengthMix
from speclen.worker.reporting.length_table import BucketLength, LengthTable
from speclen.worker.reporting.messages import plan_of
from speclen.worker.reporting.outgoing import Outgoing
from speclen.worker.reporting.steadiness import SteadyDrafts

log = structlog.get_logger()

ReportStream = aio.StreamStreamCall[pb.StreamReportsRequest, pb.StreamReportsResponse]

# Keepalive alone does not notice a stopped peer for more than a minute; with the ping timeout it takes seconds.
CHANNEL_OPTIONS = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
]


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """How the worker speaks with the controller. Times in seconds."""

    flush_interval_s: float = 0.2  # a report waits this long for company: fewer messages, still fresh
    # The same once a worker has told so many steps. A message costs both sides milliseconds, which is most of what the
    # controller takes of cores on which the worker computes.
    calm_interval_s: float = 0.5
    num_fresh_steps: int = 3000
    group_size: int = 256  # reports per message at most; the protocol allows 1024
    max_buffered: int = 65_536  # reports kept until durable: about half an hour of steps at 40 a second
    heartbeat_s: float = 1.0  # an empty message is sent when there was nothing to say for this long
    silence_s: float = 5.0  # no answer for this long: the stream is given up and opened again
    retry_s: float = 0.5  # first pause before a new attempt; doubles up to max_retry_s
    max_retry_s: float = 5.0
    rpc_timeout_s: float = 5.0  # deadline of RegisterWorker


# Of a trailing header of the controller's: where an epoch is refused as old, the one that counts.
NEWEST_EPOCH = "speclen-newest-epoch"
# Between two messages, however long a window is: a controller ends streams after 30 s of silence.
LONGEST_PAUSE_S = 10.0
MAX_PROBES = (
    16  # that wait for a step: nobody takes them while all steps feed prompts. A controller sends one at a time
)
MAX_WINDOW_S = 60.0  # of steps that a controller may ask for at once


class StreamClosedError(Exception):
    """The controller has ended the stream without an error: another can be opened."""


@dataclass(frozen=True, slots=True)
class WorkerCard:
    """How the worker introduces itself to the controller. probe_steps: as in pb.WorkerLimits."""

    worker_id: str
    epoch: int
    context: pb.ContextKey
    max_batch_size: int
    max_speculation_length: int
    address: str
    policy: str
    run_id: str = ""
    max_copied_tokens: int = 0
    probe_steps: int = 1

    def identity(self) -> pb.WorkerIdentity:
        return pb.WorkerIdentity(worker_id=self.worker_id, epoch=self.epoch)

    def register_request(self) -> pb.RegisterWorkerRequest:
        return pb.RegisterWorkerRequest(
            worker=self.identity(),
            context=self.context,
            limits=pb.WorkerLimits(
                max_batch_size=self.max_batch_size,
                max_speculation_length=self.max_speculation_length,
                max_copied_tokens=self.max_copied_tokens,
                probe_steps=self.probe_steps,
            ),
            address=self.address,
            policy=self.policy,
            run_id=self.run_id,
        )


@dataclass(slots=True)
class PendingProbe:
    """An exploratory plan waiting for the first step of a fitting batch size."""

    probe: pb.Probe
    plan: Plan
    expires_at: float
    steps_left: int = 1


class ControlClient:
    """Chooses lengths from the newest table and reports steps in the background.

    follow: True for the adaptive policy; False for a worker that keeps its own table and only reports. without_draft: what
    a length of 0 means in a table without plans, of a controller of an older version; for a worker that has no draft model,
    and copies all the same.
    """

    def __init__(
        self,
        card: WorkerCard,
        table: LengthTable,
        follow: bool,
        settings: ControlSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        without_draft: Plan | None = None,
    ) -> None:
        self._without_draft = without_draft
        self.reads_texts = follow and card.max_copied_tokens > 0  # so that copies can be chosen before any was tried
        self.card = card
        self.table = table
        self.follow = follow
        self.settings = settings or ControlSettings()
        self.clock = clock
        self.buffer = ReportBuffer(self.settings.max_buffered)
        self.connected = False
        self.controller: pb.ServerIdentity | None = None  # whose it was that answered last
        self.num_refused = 0
        self.window_s = 0.0  # steps of so long are added up before they are sent; 0: every step is sent by itself
        self.step_s = 0.0  # wall time of all steps
        self._steady = SteadyDrafts()
        self._incoming: deque[PendingProbe] = deque(maxlen=MAX_PROBES)  # event loop to engine; the newest ones
        self._probes: list[PendingProbe] = []  # the engine's own
        self._begun: PendingProbe | None = None  # one of them, of which steps are left
        self._last_answer = 0.0
        self._has_registered = False
        self._ending = asyncio.Event()

    # The engine's side: called once a step, from the engine's thread.

    def choice_for(
        self, batch_size: int, with_prompts: bool = False, rows_by_class: tuple[int, ...] = ()
    ) -> LengthChoice:
        table = self.table
        if self.follow:
            plan = self._steady.plan_for(table, batch_size, rows_by_class)
        else:
            plan = table.plan_for(batch_size, rows_by_class)
        # A step that feeds prompts along teaches acceptance alone, which only length 0 has to ask for. Other probes wait
        # or, once begun, end.
        begun, self._begun = self._begun, None
        if (begun or self._incoming or self._probes) and not (with_prompts and plan.draft_length):
            probe = self._take_probe(batch_size, begun)
            if probe is not None:
                probe_id = 0 if probe.steps_left else probe.probe.probe_id
                return LengthChoice.of(probe.plan, table.decision_version, probe_id)
        return LengthChoice.of(plan, table.decision_version)

    def report(self, choice: LengthChoice, result: StepResult) -> None:
        self.buffer.append(choice, result)
        self.step_s += result.latency_s

    def _take_probe(self, batch_size: int, begun: PendingProbe | None) -> PendingProbe | None:
        """The probe that was begun, or else the first live one for the batch size, removed: a probe is used once."""
        while self._incoming:
            self._probes.append(self._incoming.popleft())
        now = self.clock()
        self._probes = [pending for pending in self._probes if pending.expires_at > now]
        for pending in ([] if begun is None else [begun]) + self._probes:
            if pending.probe.batch_min <= batch_size <= pending.probe.batch_max:
                if pending is not begun:
                    self._probes.remove(pending)
                pending.steps_left -= 1
                self._begun = pending if pending.steps_left else None
                return pending
        return None

    # The event loop's side.

    async def run(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> None:
        """Keep a stream to the controller open until cancelled; without a controller the last table stays in use."""
        await until_one_fails(self.keep_bounded(), self._connect_forever(target, credentials, aio.Metadata(*metadata)))

    def hand_over(self) -> None:
        """The worker ends: wait with no report any more, neither for company nor for a window's end."""
        self._ending.set()

    async def keep_bounded(self) -> None:
        """Drop the oldest of the reports that nobody took, until cancelled. Also for a worker that has no controller."""
        while True:
            self.buffer.trim()
            await asyncio.sleep(1.0)

    async def _connect_forever(
        self, target: str, credentials: grpc.ChannelCredentials | None, metadata: aio.Metadata
    ) -> None:
        prepare_aio()
        pause, told = self.settings.retry_s, ""
        while True:
            started = self.clock()
            options = [*CHANNEL_OPTIONS, *past_proxies(target)]
            channel = (
                aio.secure_channel(target, credentials, options=options)
                if credentials
                else aio.insecure_channel(target, options=options)
            )
            try:
                async with channel:
                    await self._converse(rpc.ControlServiceStub(channel), metadata)
            except grpc.RpcError as error:
                reason = why(error)
            except StreamClosedError:
                reason = "closed by the controller"
            except TimeoutError:
                reason = f"no answer for {self.patience_s:g} s"
            if self.connected:
                log.warning("controller lost, going on with the last table", controller=target, reason=reason)
                self.connected = False
                if self.follow and self.table.source == "controller":
                    self.table = self._with_source("last table")
            elif (kind := reason.partition(":")[0]) != told:  # once: the next attempts fail likewise
                told = kind
                log.warning("no controller yet", controller=target, reason=reason, table=self.table.source)
            if self.clock() - started > self.settings.max_retry_s:
                pause = self.settings.retry_s
            await asyncio.sleep(pause)
            pause = min(2 * pause, self.settings.max_retry_s)

    async def _converse(self, stub: rpc.ControlServiceAsyncStub, metadata: aio.Metadata) -> None:
        registered = await self._register(stub, metadata)
        if registered.HasField("controller"):
            self.controller = registered.controller
        self._apply_table(registered.table)
        self._apply_thinning(registered.thinning)
        self.buffer.forget_until(registered.durable_seq)
        self._last_answer = self.clock()
        log.info("joined the controller", durable_seq=registered.durable_seq, worker=self.card.worker_id)
        self.connected = True
        call = stub.StreamReports(metadata=metadata)
        try:
            await until_one_fails(self._send(call, registered.durable_seq), self._receive(call), self._watch())
        finally:
            call.cancel()

    async def _register(self, stub: rpc.ControlServiceAsyncStub, metadata: aio.Metadata) -> pb.RegisterWorkerResponse:
        """Introduce this life of the worker; where its epoch is taken for an old one's by the clock alone, with a newer."""
        timeout_s = self.settings.rpc_timeout_s
        try:
            response = await stub.RegisterWorker(self.card.register_request(), timeout=timeout_s, metadata=metadata)
        except aio.AioRpcError as error:
            newest = error.trailing_metadata().get(NEWEST_EPOCH)
            if self._has_registered or newest is None:
                raise
            # It has just begun, so whoever registered that epoch did so before: its clock was ahead, or ours is behind.
            log.warning("the clock is behind that of this worker's last start", epoch=self.card.epoch, newest=newest)
            self.card = replace(self.card, epoch=int(newest) + 1)
            response = await stub.RegisterWorker(self.card.register_request(), timeout=timeout_s, metadata=metadata)
        self._has_registered = True
        return response

    async def _send(self, call: ReportStream, durable_seq: int) -> None:
        """Write until the stream is over; `_receive` gets to know why. Not by an iterator that gRPC reads: an error of ours
        in it would cancel the call without a word."""
        async for request in self._requests(durable_seq):
            try:
                await call.write(request)
            except (grpc.RpcError, asyncio.InvalidStateError):
                return

    async def _requests(self, durable_seq: int) -> AsyncIterator[pb.StreamReportsRequest]:
        """The first message names the worker; then groups of reports as they come, and heartbeats."""
        yield pb.StreamReportsRequest(worker=self.card.identity())
        outgoing, quiet_since = Outgoing(self.buffer, durable_seq, self.settings.group_size, self.clock), self.clock()
        while True:
            request = outgoing.next(self.window_s, at_once=self._ending.is_set())
            if request is not None or self.clock() - quiet_since >= self.pause_s:
                yield request or pb.StreamReportsRequest()
                quiet_since = self.clock()
            if not outgoing.more:
                await self._rest(outgoing.pause_s(self.window_s, self._flush_interval_s(outgoing.sent_seq)))

    async def _rest(self, seconds: float) -> None:
        """For so long, or until the worker ends; then between two questions whether all is durable."""
        if self._ending.is_set():
            await asyncio.sleep(self.settings.flush_interval_s)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ending.wait()

    def _flush_interval_s(self, num_steps: int) -> float:
        """Seconds that a report waits, after so many."""
        fresh, calm = self.settings.flush_interval_s, self.settings.calm_interval_s
        return fresh if num_steps < self.settings.num_fresh_steps else max(fresh, calm)

    @property
    def pause_s(self) -> float:
        """Seconds after which a message goes out that says nothing: it would cost the controller as much as a window.

        At the worker's end it asks for the answer that says what is durable.
        """
        if self._ending.is_set():
            return 0.0
        return max(self.settings.heartbeat_s, min(self.window_s, LONGEST_PAUSE_S))

    @property
    def patience_s(self) -> float:
        """Seconds without an answer after which the stream is given up: of messages, several have got none by then."""
        return max(self.settings.silence_s, 3.0 * self.pause_s)

    async def _receive(self, call: ReportStream) -> None:
        async for response in call:
            self._last_answer = self.clock()
            if response.HasField("table"):
                self._apply_table(response.table)
            if response.HasField("thinning"):
                self._apply_thinning(response.thinning)
            self.buffer.forget_until(response.durable_seq)
            if self.follow:
                self._add_probes(response.probes)
            if response.num_refused > self.num_refused:
                log.error("controller refused reports", num=response.num_refused, reason=response.last_refusal)
            self.num_refused = response.num_refused
        raise StreamClosedError

    async def _watch(self) -> None:
        """Give the stream up when the controller has been silent for too long."""
        while self.clock() - self._last_answer < self.patience_s:
            await asyncio.sleep(self.settings.silence_s / 5)
        raise TimeoutError

    def _add_probes(self, probes: Iterable[pb.Probe]) -> None:
        now = self.clock()
        for probe in probes:
            try:
                plan = plan_of(probe) or Plan(probe.speculation_length)
            except ValueError as error:
                log.error("a probe of the controller is not used", reason=str(error))
                continue
            if plan.within(self.card.max_speculation_length, self.card.max_copied_tokens) == plan:
                self._incoming.append(PendingProbe(probe, plan, now + probe.valid_for_s, self.card.probe_steps))

    def _apply_thinning(self, message: pb.Thinning) -> None:
        """Add steps up from now on, or not any more; what was sent stays as it was."""
        if not 0.0 <= message.window_s <= MAX_WINDOW_S:
            log.error("a window of the controller is not used", window_s=message.window_s, allowed=MAX_WINDOW_S)
            return
        if message.window_s != self.window_s:
            log.info("reports are added up", window_s=message.window_s)
        self.window_s = message.window_s

    def _apply_table(self, message: pb.LengthTable) -> None:
        if not self.follow or not message.choices:
            return
        before = self.table
        try:
            self.table = LengthTable.from_buckets(
                [self._bucket(choice) for choice in message.choices],
                self.card.max_batch_size,
                self.card.max_speculation_length,
                message.decision_version,
                "controller",
                self.card.max_copied_tokens,
                LengthMix.from_message(message.mix) if message.HasField("mix") else None,
            )
        except ValueError as error:
            log.error("table of the controller not used", reason=str(error))
            return
        if self.table.plans != before.plans:
            plans = {f"{b.batch_min}-{b.batch_max}": str(b.plan or b.speculation_length) for b in self.table.buckets}
            log.info("lengths changed", version=message.decision_version, lengths=plans)

    def _bucket(self, choice: pb.BucketChoice) -> BucketLength:
        """Raises ValueError for a plan that is none."""
        length, plan = choice.speculation_length, plan_of(choice)
        if plan is None and not length:
            plan = self._without_draft
        return BucketLength(choice.batch_min, choice.batch_max, length, plan)

    def _with_source(self, source: str) -> LengthTable:
        return replace(self.table, source=source)
