"""The worker's side of the control stream: it selects arms and reports steps, and a step never waits for it.

A step calls `choose` (a tuple index) and `report` (an append). `ControlStream` sends the reports in groups and receives
tables and probes. A report is kept until the controller has made it durable, and is sent again after a reconnect. The
buffer is bounded, and dropped reports are counted.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import grpc
import structlog

from speclen.process.embedded import FindController
from speclen.process.supervision import until_one_fails
from speclen.records import Probe, StepRecord
from speclen.v1 import control_pb2 as pb
from speclen.worker.arms import ArmChoice, ArmTable, SteadyDrafts
from speclen.worker.reporting.control_stream import ControlSettings, ControlStream
from speclen.worker.reporting.conversions import WorkerCard, read_probe, read_table

log = structlog.get_logger()

BLOCK = 64  # consecutive steps reported out of each BLOCK x sample_every
MAX_PROBES = 16  # probes that wait for a fitting step; none fits while all steps have prefill
MAX_PREFILLS = 32  # steps with prefill in a trial
MAX_SAMPLE_EVERY = 1024
LAST_INTERVAL_S = 0.02  # between messages when the worker ends


@dataclass(slots=True)
class ReportBuffer:
    """Reports that the controller has not made durable yet.

    The engine's thread only appends. The event loop moves appended records into a deque of its own, so no lock is needed,
    and keeps the bound with `trim`. sample_every: 1 to report all steps. Only reported steps have a seq.
    """

    max_buffered: int
    sample_every: int = 1
    records: deque[StepRecord] = field(default_factory=deque)
    num_dropped: int = 0
    _appended: deque[StepRecord] = field(default_factory=deque)
    _last_seq: int = 0
    _place: int = 0  # of the next step within BLOCK x sample_every steps

    def append(self, record: StepRecord) -> None:
        """Number and keep the record of a step, if the step is in the sample."""
        place, self._place = self._place, (self._place + 1) % (BLOCK * self.sample_every)
        if place < BLOCK:
            self._last_seq += 1
            self._appended.append(record._replace(seq=self._last_seq))

    def will_report(self, num_steps: int = 1) -> bool:
        """True if all of the next num_steps steps are in the sample."""
        return self.sample_every == 1 or self._place + num_steps <= BLOCK

    def __len__(self) -> int:
        """Number of kept reports; from any thread."""
        return len(self.records) + len(self._appended)

    def _fetch(self) -> None:
        while self._appended:
            self.records.append(self._appended[0])  # before popleft, so that __len__ always counts it
            self._appended.popleft()

    def trim(self) -> None:
        """Drop and count the oldest reports beyond the bound."""
        self._fetch()
        while len(self.records) > self.max_buffered:
            self.records.popleft()
            self.num_dropped += 1

    def forget_until(self, durable_seq: int) -> None:
        """Remove the reports up to durable_seq."""
        self._fetch()
        while self.records and self.records[0].seq <= durable_seq:
            self.records.popleft()

    def after(self, seq: int, limit: int) -> list[StepRecord]:
        """Up to `limit` records after `seq`, in order. Their numbers are consecutive, so this is one slice."""
        self._fetch()
        if not self.records:
            return []
        skip = max(0, seq - self.records[0].seq + 1)
        return list(itertools.islice(self.records, skip, skip + limit))


@dataclass(slots=True)
class PendingProbe:
    """A probe that has not started, or has steps left. prefills_left: steps with prefill that a trial may still include."""

    probe: Probe
    expires_at: float
    steps_left: int
    prefills_left: int = 0

    def fits(self, batch_size: int) -> bool:
        return self.probe.batch_min <= batch_size <= self.probe.batch_max


class ControlClient:
    """An `ArmChooser` that selects arms from the newest table and probes, and reports steps in the background.

    follow: True for the adaptive policy; False for a worker that keeps its own table and only reports.
    """

    def __init__(
        self,
        card: WorkerCard,
        table: ArmTable,
        follow: bool,
        settings: ControlSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.card = card
        self.table = table
        self.follow = follow
        self.settings = settings or ControlSettings()
        self.clock = clock
        self.buffer = ReportBuffer(self.settings.max_buffered)
        self.connected = self.has_registered = False
        self.controller: pb.ServerIdentity | None = None  # the newest that answered
        self.num_refused = 0
        self.step_s = 0.0  # wall time of all steps
        self._steady = SteadyDrafts()
        self._incoming: deque[PendingProbe] = deque(maxlen=MAX_PROBES)  # event loop to engine; the newest ones
        self._probes: list[PendingProbe] = []  # the engine's own
        self._begun: PendingProbe | None = None  # the running one, if it has steps left

    # The engine's side: called once a step, from the engine's thread.

    @property
    def wants_evaluations(self) -> bool:
        return self.card.evaluates and self.follow and self.connected and self.buffer.will_report()

    def choose(self, batch_size: int, with_prefill: bool = False) -> ArmChoice:
        """Select the table's arm, or that of a probe. A probe waits for a step without prefill, whose time can be used.

        A probe does not wait if the table does not draft and outputs are not evaluated: then probes are the only source of
        acceptance.
        """
        table = self.table
        arm = self._steady.arm_for(table, batch_size) if self.follow else table.arms[batch_size]
        begun, self._begun = self._begun, None
        if with_prefill and begun is not None and begun.prefills_left and begun.fits(batch_size):
            begun.prefills_left -= 1
            self._begun = begun
            return ArmChoice(begun.probe.arm, table.version, begun.probe.probe_id)
        waits = with_prefill and (arm.speculation_length or self.card.evaluates)
        if (begun or self._incoming or self._probes) and not waits:
            probe = self._next_probe(batch_size, begun)
            if probe is not None:
                return ArmChoice(probe.arm, table.version, probe.probe_id)
        return ArmChoice(arm, table.version)

    def report(self, record: StepRecord) -> None:
        self.buffer.append(record)
        self.step_s += record.latency_s

    def _next_probe(self, batch_size: int, begun: PendingProbe | None) -> Probe | None:
        """The running probe, or else the first active probe for this batch size, which starts now."""
        while self._incoming:
            self._probes.append(self._incoming.popleft())
        if begun is None or not begun.fits(batch_size):
            now = self.clock()
            self._probes = [each for each in self._probes if each.expires_at > now]
            fitting = (each for each in self._probes if each.fits(batch_size))
            begun = next((each for each in fitting if self.buffer.will_report(each.steps_left)), None)
            if begun is None:
                return None
            self._probes.remove(begun)
        begun.steps_left -= 1
        self._begun = begun if begun.steps_left else None
        return begun.probe

    # The event loop's side.

    async def run(
        self,
        find: FindController,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> None:
        """Keep a stream to the controller open until cancelled. While there is none, the last table stays in use.

        find: returns the controller's address; called before every connection.
        """
        stream = ControlStream(self, find, credentials, metadata)
        await until_one_fails(self.keep_bounded(), stream.run())

    def send_last(self) -> None:
        """Send the last reports without delay, and poll for their durability: for a worker that ends."""
        last = LAST_INTERVAL_S
        self.settings = replace(self.settings, flush_interval_s=last, calm_interval_s=last, heartbeat_s=last)

    async def keep_bounded(self) -> None:
        """Keep the buffer within its bound until cancelled, with or without a controller."""
        while True:
            self.buffer.trim()
            await asyncio.sleep(1.0)

    def lose_controller(self) -> None:
        """Note that the connection is lost."""
        self.connected = False
        if self.follow and self.table.source == "controller":
            self.table = replace(self.table, source="last table")

    def use_table(self, message: pb.Table) -> None:
        """Use the controller's table from now on, unless the policy keeps its own."""
        if not self.follow or not message.choices:
            return
        table, before = read_table(message), self.table
        try:
            self.table = ArmTable.of(table.choices, self.card.limits, "controller", table.version)
        except ValueError as error:
            log.error("the controller's table is ignored", reason=str(error))
            return
        if self.table.arms != before.arms:
            arms = {f"{one.batch_min}-{one.batch_max}": str(one.arm) for one in self.table.choices}
            log.info("arms changed", version=table.version, arms=arms)

    def use_sampling(self, sample_every: int) -> None:
        """Report one block of steps in `sample_every` from now on."""
        sample_every = max(1, sample_every)
        if sample_every > MAX_SAMPLE_EVERY:
            log.error("the controller's sampling is ignored", sample_every=sample_every, allowed=MAX_SAMPLE_EVERY)
        elif sample_every != self.buffer.sample_every:
            log.info("reports are sampled", sample_every=sample_every)
            self.buffer.sample_every = sample_every

    def use_probes(self, messages: Iterable[pb.Probe]) -> None:
        """Queue those probes that this worker can run."""
        now, limits = self.clock(), self.card.limits
        for message in messages if self.follow else ():
            probe = read_probe(message)
            if probe.arm == probe.arm.within(limits):
                prefills = MAX_PREFILLS * probe.is_trial
                self._incoming.append(PendingProbe(probe, now + message.valid_for_s, probe.num_steps, prefills))
