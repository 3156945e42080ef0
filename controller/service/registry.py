"""Contexts and workers, their incarnations (epochs), and how far each one's reports arrived.

Of every worker the newest incarnation counts. A report of an older one may come from a process that was believed dead, at
any time, and is refused; a report of a newer one means that the worker has to register first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from speclen.controller.service.sequence import SeqWindow
from speclen.controller.wire.validation import InvalidMessageError
from speclen.records import Choice, ContextKey, Limits, Probe, StepRecord


class UnregisteredError(Exception):
    """Nobody registered under this name and epoch, or with this context; registering helps."""


class OldEpochError(Exception):
    """A newer incarnation of the worker is known, whose epoch is `newest`; this one must end."""

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

    num_learned: reports that were learned from since the start of the process.
    """

    context_id: int
    key: ContextKey
    limits: Limits
    created_at: float
    num_learned: int = 0


@dataclass(slots=True)
class Worker:
    """The newest incarnation of a worker. Times in seconds since 1970.

    seqs: numbers of its reports. waiting: steps not learned from yet, the oldest since waiting_since. last_batch_size,
    last_step_s: of its newest report. probe: to be handed out. durable_seq: every report up to it is on disk, or given up
    as missing. noted_at: last_seen_at in the last commit. num_*: over all epochs. probe_steps: consecutive steps of a probe.
    transition_steps: after a change of arm, no samples. baseline: arms that the worker would use without learning.
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
        """Count reports that are not learned from or not stored, for the worker's answers. reason: of the last one."""
        self.num_refused += number
        self.last_refusal = reason

    def take_probe_step(self, batch_size: int) -> Probe | None:
        """One step of the probe that is to be handed out, for a worker that asks for every arm by itself."""
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
    """All contexts and workers, bounded. Gives out ids, one more than the highest so far."""

    def __init__(self, clock: Callable[[], float], max_workers: int, max_contexts: int) -> None:
        self.clock = clock
        self.max_workers = max_workers
        self.max_contexts = max_contexts
        self.contexts: dict[ContextKey, Context] = {}
        self.workers: dict[str, Worker] = {}
        self._last_context_id = 0
        self._last_worker_key = 0

    def context(self, key: ContextKey, limits: Limits) -> Context:
        """The context, made or widened where needed. Raises FullError."""
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
        """Note an incarnation of a worker: a new one starts at seq 0, a known one goes on where it was.

        Raises OldEpochError, FullError, and InvalidMessageError for a known incarnation with another context.
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
        """The worker of this name and epoch. Raises UnregisteredError, OldEpochError."""
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
