"""Contexts and workers, their incarnations (epochs), and which of their reports have arrived.

Only the newest incarnation of a worker counts. A report of an older one may arrive at any time from a process that was
believed dead, and is refused. A report of a newer one means that the worker has to register first.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from speclen.controller.wire.messages import InvalidMessageError
from speclen.records import Choice, ContextKey, Limits, Probe, StepRecord

MAX_RANGES = 256  # ranges of missing numbers that are remembered; the oldest are given up first
MAX_COUNT = 2**63 - 1  # SQLite's largest integer; counts stop there
# Seconds for which a skipped number may still arrive: at least this, at most twice as long. Reports overtake each other
# within a moment; until then the worker keeps everything after the gap.
GAP_PATIENCE_S = 5.0


class SeqWindow:
    """Sequence numbers of one worker and epoch.

    Reports are numbered 1, 2, 3, ... `applied_seq` is the largest number seen. A larger number is new, and the numbers that
    it skips are remembered as missing, so that a report which was overtaken on its way still counts, once. Numbers that
    stay missing for some seconds are given up: the worker had to drop these reports. Any other number up to `applied_seq`
    is a repetition. `settled_seq` is the largest number below which nothing is missing. It only grows, and once it is on
    disk the worker may drop the reports up to it. num_missing: numbers that never arrived. num_repeated: reports recognised
    and ignored, over all epochs.
    """

    __slots__ = ("_closing_at", "_closing_seq", "applied_seq", "missing", "num_missing", "num_repeated")

    def __init__(self, applied_seq: int = 0, missing: str = "[]", num_missing: int = 0, num_repeated: int = 0) -> None:
        self.applied_seq = applied_seq
        self.missing = read_ranges(missing, applied_seq)
        self.num_missing = num_missing
        self.num_repeated = num_repeated
        self._closing_at, self._closing_seq = 0.0, 0

    @property
    def settled_seq(self) -> int:
        """All numbers up to it were seen or given up. It never decreases."""
        return self.missing[0][0] - 1 if self.missing else self.applied_seq

    def close_gaps(self, now: float) -> bool:
        """Give up numbers that have been missing for long enough. True if that settles anything. now: in seconds."""
        waiting_s = self._closing_at - now
        if not self.missing or 0.0 < waiting_s <= GAP_PATIENCE_S:  # a longer wait means that the clock was set back
            return False
        before = self.settled_seq
        while self.missing and self.missing[0][1] <= self._closing_seq:
            del self.missing[0]
        self._closing_at, self._closing_seq = now + GAP_PATIENCE_S, self.applied_seq
        return self.settled_seq != before

    def admit(self, seq: int) -> bool:
        """Note that a number was seen. True if it is new. Numbers that no worker assigns pass, to be refused later."""
        if seq == self.applied_seq + 1 <= MAX_COUNT:
            self.applied_seq = seq
            return True
        if not 0 < seq <= MAX_COUNT:
            return True
        if seq > self.applied_seq:
            self._skip(self.applied_seq + 1, seq - 1)
            self.applied_seq = seq
            return True
        if self._fill(seq):
            return True
        self.num_repeated = min(self.num_repeated + 1, MAX_COUNT)
        return False

    def _skip(self, first: int, last: int) -> None:
        self.num_missing = min(self.num_missing + last - first + 1, MAX_COUNT)
        self.missing.append([first, last])
        del self.missing[:-MAX_RANGES]

    def _fill(self, seq: int) -> bool:
        """Remove a number from the missing ones. False if it is not missing."""
        index = bisect_right(self.missing, seq, key=lambda bounds: bounds[0]) - 1
        if index < 0 or self.missing[index][1] < seq:
            return False
        low, high = self.missing[index]
        self.missing[index : index + 1] = [each for each in ([low, seq - 1], [seq + 1, high]) if each[0] <= each[1]]
        del self.missing[:-MAX_RANGES]
        self.num_missing = max(self.num_missing - 1, 0)
        return True

    @property
    def missing_ranges(self) -> str:
        """Missing ranges in the form of the store: [[first, last], ...]."""
        return json.dumps(self.missing) if self.missing else "[]"


def read_ranges(text: str, applied_seq: int) -> list[list[int]]:
    """Parse ranges of missing numbers, ascending and below applied_seq. Raises ValueError for anything else."""
    ranges = json.loads(text)
    if not isinstance(ranges, list) or not all(
        isinstance(each, list) and [type(seq) for seq in each] == [int, int] for each in ranges
    ):
        raise ValueError(f"{text!r} are not ranges of numbers")
    flat = [0, *(seq + side for bounds in ranges for side, seq in enumerate(bounds)), applied_seq + 1]
    if any(later <= earlier for earlier, later in pairwise(flat)):
        raise ValueError(f"{text!r} are not ascending ranges below {applied_seq}")
    return ranges


class UnregisteredError(Exception):
    """No worker is registered with this name, epoch and context; registering helps."""


class OldEpochError(Exception):
    """A newer incarnation of the worker is registered, with the epoch `newest`; this one must end."""

    def __init__(self, worker: Worker, epoch: int) -> None:
        self.newest = worker.epoch
        super().__init__(
            f"epoch {epoch} of worker {worker.worker_id!r} is over: epoch {self.newest} has registered since"
        )


class FullError(Exception):
    """A bound on workers, contexts or streams is reached."""


@dataclass(slots=True)
class Context:
    """Hardware and engine with a pair of models. limits: the smallest that contain those of all its workers.

    num_learned: reports that were learned from since the process started.
    """

    context_id: int
    key: ContextKey
    limits: Limits
    created_at: float
    num_learned: int = 0


@dataclass(slots=True)
class Worker:
    """The newest incarnation of a worker. Times in seconds since 1970.

    seqs: numbers of its reports. waiting: steps that are not learned from yet, the oldest one since waiting_since.
    last_batch_size, last_step_s: of its newest report. probe: to be sent to it. durable_seq: all reports up to it are on
    disk, or given up as missing. noted_at: last_seen_at in the last commit. num_*: over all epochs. probe_steps:
    consecutive steps of a probe. transition_steps: steps after a change of arm that are excluded samples. baseline: arms
    that it would use without learning.
    """

    worker_key: int
    worker_id: str
    epoch: int
    context: Context
    registered_at: float
    last_seen_at: float
    limits: Limits = field(default_factory=Limits)
    address: str = ""
    policy: str = ""
    probe_steps: int = 3
    transition_steps: int = 4
    baseline: tuple[Choice, ...] = ()
    seqs: SeqWindow = field(default_factory=SeqWindow)
    waiting: list[StepRecord] = field(default_factory=list)
    waiting_since: float = 0.0
    last_batch_size: int = 0
    last_step_s: float = 0.0
    probe: Probe | None = None
    durable_seq: int = 0
    noted_at: float = 0.0
    num_reports: int = 0
    num_refused: int = 0
    last_refusal: str = ""

    def check_epoch(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise OldEpochError(self, epoch)

    def note_refusals(self, number: int, reason: str) -> None:
        """Count reports that were not learned from or not stored, for the worker's answers. reason: of the last one."""
        self.num_refused += number
        self.last_refusal = reason

    def take_probe_step(self, batch_size: int) -> Probe | None:
        """Take one step of the waiting probe, for a worker that asks for every arm by itself."""
        probe = self.probe
        if probe is None or not probe.batch_min <= batch_size <= probe.batch_max:
            return None
        self.probe = probe._replace(num_steps=probe.num_steps - 1) if probe.num_steps > 1 else None
        return probe


@dataclass(slots=True)
class Registration:
    """A worker's description of itself."""

    worker_id: str
    epoch: int
    key: ContextKey
    limits: Limits
    address: str = ""
    policy: str = ""
    probe_steps: int = 3
    transition_steps: int = 4
    baseline: tuple[Choice, ...] = ()


class Registry:
    """All contexts and workers, within bounds. Assigns ids, one more than the highest so far."""

    def __init__(self, clock: Callable[[], float], max_workers: int, max_contexts: int) -> None:
        self.clock = clock
        self.max_workers = max_workers
        self.max_contexts = max_contexts
        self.contexts: dict[ContextKey, Context] = {}
        self.workers: dict[str, Worker] = {}
        self._last_context_id = 0
        self._last_worker_key = 0

    def context(self, key: ContextKey, limits: Limits) -> Context:
        """The context, added or widened if necessary. Raises FullError."""
        context = self.contexts.get(key)
        if context is None:
            check_room("contexts", len(self.contexts), self.max_contexts)
            return self.add_context(Context(self._last_context_id + 1, key, limits, self.clock()))
        context.limits = context.limits.widened(limits)
        return context

    def add_context(self, context: Context) -> Context:
        self.contexts[context.key] = context
        self._last_context_id = max(self._last_context_id, context.context_id)
        return context

    def add_worker(self, worker: Worker) -> Worker:
        self.workers[worker.worker_id] = worker
        self._last_worker_key = max(self._last_worker_key, worker.worker_key)
        return worker

    def register(self, registration: Registration) -> Worker:
        """Register an incarnation of a worker. A new one starts at seq 0; a known one continues where it was.

        Raises OldEpochError, FullError, and InvalidMessageError if a known incarnation has another context.
        """
        worker, epoch, now = self.workers.get(registration.worker_id), registration.epoch, self.clock()
        if worker is None:
            check_room("workers", len(self.workers), self.max_workers)
            context = self.context(registration.key, registration.limits)
            worker = self.add_worker(
                Worker(self._last_worker_key + 1, registration.worker_id, epoch, context, now, now)
            )
        worker.check_epoch(epoch)
        if worker.epoch == epoch and worker.context.key != registration.key:
            raise InvalidMessageError(
                "context",
                f"worker {worker.worker_id!r} registered epoch {epoch} with another context: use a larger epoch",
            )
        context = self.context(registration.key, registration.limits)
        if worker.epoch != epoch:
            worker.seqs = SeqWindow(num_missing=worker.seqs.num_missing, num_repeated=worker.seqs.num_repeated)
            worker.durable_seq, worker.epoch, worker.context = 0, epoch, context
        for name in ("limits", "address", "policy", "probe_steps", "transition_steps", "baseline"):
            setattr(worker, name, getattr(registration, name))
        worker.registered_at, worker.last_seen_at, worker.probe = now, now, None
        return worker

    def find(self, worker_id: str, epoch: int) -> Worker:
        """The worker with this name and epoch. Raises UnregisteredError or OldEpochError."""
        worker = self.workers.get(worker_id)
        if worker is None:
            raise UnregisteredError(f"worker {worker_id!r} is unknown: call RegisterWorker first")
        worker.check_epoch(epoch)
        if epoch > worker.epoch:
            raise UnregisteredError(
                f"worker {worker_id!r} is known with epoch {worker.epoch}, not {epoch}: call RegisterWorker first"
            )
        return worker


def check_room(what: str, number: int, limit: int) -> None:
    if number >= limit:
        raise FullError(
            f"{limit} {what} are known, which is the limit: start the controller with a larger --max-{what}"
        )
