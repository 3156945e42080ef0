"""Who reports: contexts and workers, their epochs and how far each was heard. Knows time only through its clock.

Of every worker the newest life counts. A report of an older one may come from a process that was believed dead, at any
time, so it is refused; a report of a newer one means that the worker has to introduce itself first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from speclen.controller.estimator.core import ContextKey, Limits, Probe
from speclen.controller.service.sequence import SeqWindow
from speclen.controller.wire.ingest import Group


class UnknownWorkerError(Exception):
    """Nobody registered under this name and epoch; registering helps."""


class OldEpochError(Exception):
    """A newer life of the worker is known, whose epoch is `newest`; this one must end."""

    def __init__(self, worker: Worker, epoch: int) -> None:
        self.newest = worker.epoch
        name = f"epoch {epoch} of worker {worker.worker_id!r}"
        super().__init__(f"{name} is over: epoch {self.newest} has registered since")


class ContextChangedError(Exception):
    """One life of a worker reports from two contexts."""


class FullError(Exception):
    """A bound on workers, contexts or streams is reached."""


@dataclass(slots=True)
class RegisteredContext:
    """A kind of hardware and engine with its pair of models. limits: the largest of any worker's.

    urgent_at: from when on all workers are to hear of a length that is much better than the one before; by time.monotonic.
    num_learned: rows of reports that were learned from since the start of the process.
    """

    context_id: int
    key: ContextKey
    limits: Limits
    created_at: float
    workers: set[str] = field(default_factory=set)
    urgent_at: float = 0.0
    num_learned: int = 0


@dataclass(slots=True)
class Worker:
    """The newest life of a worker. Times in seconds since 1970.

    group: reports that wait to be learned from, the oldest since waiting_since. durable_seq: every report up to it is on
    disk, or given up as missing. noted_at: when last_seen_at last went into a commit. num_*: over all epochs. teaches:
    whether its next window is learned from. probe_steps: steps that a probe takes there. follow_on: where a worker asks for
    every length by itself, the second step of a probe, which is to follow the first. ahead_s: seconds by which steps that it
    reported one by one took longer than they were apart (`AHEAD_S`).
    """

    worker_key: int
    worker_id: str
    epoch: int
    context: RegisteredContext
    limits: Limits
    address: str
    policy: str
    registered_at: float
    last_seen_at: float
    window: SeqWindow = field(default_factory=SeqWindow)
    group: Group = field(default_factory=Group)
    durable_seq: int = 0
    noted_at: float = 0.0
    waiting_since: float = 0.0
    num_reports: int = 0
    num_refused: int = 0
    teaches: bool = True
    probe_steps: int = 1
    follow_on: Probe | None = None
    ahead_s: float = 0.0


@dataclass(slots=True)
class Registration:
    """What a worker says of itself."""

    worker_id: str
    epoch: int
    key: ContextKey
    limits: Limits
    address: str = ""
    policy: str = ""
    probe_steps: int = 1


class Registry:
    """All contexts and workers, bounded; ids are given out here, one more than the highest so far."""

    def __init__(self, clock: Callable[[], float], max_workers: int, max_contexts: int) -> None:
        self.clock = clock
        self.max_workers = max_workers
        self.max_contexts = max_contexts
        self.contexts: dict[ContextKey, RegisteredContext] = {}
        self.workers: dict[str, Worker] = {}
        self._last_context_id = 0
        self._last_worker_key = 0

    def context(self, key: ContextKey, limits: Limits) -> RegisteredContext:
        """The context, made or enlarged where needed. Raises FullError."""
        context = self.contexts.get(key)
        if context is None:
            if len(self.contexts) >= self.max_contexts:
                raise FullError(
                    f"{self.max_contexts} contexts are known, which is the limit: "
                    "start the controller with a larger --max-contexts"
                )
            return self.add_context(RegisteredContext(self._last_context_id + 1, key, limits, self.clock()))
        context.limits = larger(context.limits, limits)
        return context

    def add_context(self, context: RegisteredContext) -> RegisteredContext:
        self.contexts[context.key] = context
        self._last_context_id = max(self._last_context_id, context.context_id)
        return context

    def add_worker(self, worker: Worker) -> Worker:
        self.workers[worker.worker_id] = worker
        worker.context.workers.add(worker.worker_id)
        self._last_worker_key = max(self._last_worker_key, worker.worker_key)
        return worker

    def register(self, registration: Registration) -> Worker:
        """Note a life of a worker: a new one starts at seq 0, a known one goes on where it was.

        Raises OldEpochError, FullError, and ContextChangedError when a life that is known reports another context.
        """
        known = self.workers.get(registration.worker_id)
        if known is None and len(self.workers) >= self.max_workers:
            raise FullError(
                f"{self.max_workers} workers are known, which is the limit: start the controller with a larger --max-workers"
            )
        if known is not None:
            check_epoch(known, registration.epoch)
        same_life = known is not None and known.epoch == registration.epoch
        if known is not None and same_life and known.context.key != registration.key:
            raise ContextChangedError(
                f"worker {known.worker_id!r} registered epoch {known.epoch} with another context; a context holds for a "
                "whole epoch"
            )
        context = self.context(registration.key, registration.limits)
        return self._revive(known, registration, context) if known else self._admit(registration, context)

    def _admit(self, registration: Registration, context: RegisteredContext) -> Worker:
        now = self.clock()
        return self.add_worker(
            Worker(
                worker_key=self._last_worker_key + 1,
                worker_id=registration.worker_id,
                epoch=registration.epoch,
                context=context,
                limits=registration.limits,
                address=registration.address,
                policy=registration.policy,
                probe_steps=registration.probe_steps,
                registered_at=now,
                last_seen_at=now,
            )
        )

    def _revive(self, worker: Worker, registration: Registration, context: RegisteredContext) -> Worker:
        if worker.epoch != registration.epoch:
            old = worker.window
            worker.window = SeqWindow(num_missing=old.num_missing, num_repeated=old.num_repeated)
            worker.durable_seq = 0
            worker.epoch = registration.epoch
            worker.context.workers.discard(worker.worker_id)
            worker.context = context
            context.workers.add(worker.worker_id)
        worker.limits, worker.address, worker.policy = registration.limits, registration.address, registration.policy
        worker.probe_steps, worker.follow_on = registration.probe_steps, None
        worker.registered_at = worker.last_seen_at = self.clock()
        return worker

    def find(self, worker_id: str, epoch: int) -> Worker:
        """The worker of this name and epoch. Raises UnknownWorkerError, OldEpochError."""
        worker = self.workers.get(worker_id)
        if worker is None:
            raise UnknownWorkerError(f"worker {worker_id!r} is unknown: call RegisterWorker first")
        check_epoch(worker, epoch)
        if epoch > worker.epoch:
            raise UnknownWorkerError(
                f"worker {worker_id!r} is known with epoch {worker.epoch}, not {epoch}: call RegisterWorker first"
            )
        return worker


def check_epoch(worker: Worker, epoch: int) -> None:
    if epoch < worker.epoch:
        raise OldEpochError(worker, epoch)


def larger(one: Limits, other: Limits) -> Limits:
    """The least limits that contain both."""
    return Limits(
        max(one.max_batch_size, other.max_batch_size),
        max(one.max_speculation_length, other.max_speculation_length),
        max(one.max_copied_tokens, other.max_copied_tokens),
    )
