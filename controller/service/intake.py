"""Intake of reports: repeated ones are recognised, new ones are checked and wait with their worker to be learned from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from speclen.controller.service.journal import Journal
from speclen.controller.service.learner import Learner, Totals
from speclen.controller.service.registry import Registration, Registry, Worker
from speclen.controller.wire.ingest import read_step
from speclen.controller.wire.messages import InvalidMessageError
from speclen.v1 import control_pb2 as pb

# Seconds after which last_seen_at of a worker without reports is stored again.
QUIET_NOTE_S = 10.0


class Intake:
    """Takes registrations and reports of workers. Runs on one thread and never waits."""

    def __init__(
        self, registry: Registry, learner: Learner, journal: Journal, totals: Totals, clock: Callable[[], float]
    ) -> None:
        self.registry = registry
        self.learner = learner
        self.journal = journal
        self.totals = totals
        self.clock = clock

    def register(self, registration: Registration) -> Worker:
        """Register a worker. Raises the errors of Registry.register."""
        known = self.registry.workers.get(registration.worker_id)
        if known is not None:
            self.learner.learn(known)  # of its last incarnation
        worker = self.registry.register(registration)
        self.learner.prepare(worker.context)
        self.journal.note_worker(worker)
        return worker

    def take(self, worker: Worker, reports: Sequence[pb.StepReport]) -> list[InvalidMessageError]:
        """Queue reports that are new and valid, and learn from them if it is time. Returns why others were refused."""
        now = worker.last_seen_at = self.clock()
        if worker.seqs.close_gaps(now) or now - worker.noted_at > QUIET_NOTE_S:
            self.journal.note_worker(worker)
        if not reports:
            return []
        if not worker.waiting:
            worker.waiting_since = now
        refusals: list[InvalidMessageError] = []
        for report in self._new(worker, reports):
            try:
                worker.waiting.append(read_step(report, worker.limits))
            except InvalidMessageError as error:
                refusals.append(error)
        if refusals:
            worker.note_refusals(len(refusals), str(refusals[-1]))
        self.totals.refused.update(error.reason for error in refusals)
        if not self.learner.expect(worker):
            self.journal.note_worker(worker)  # counts changed
        return refusals

    def _new(self, worker: Worker, reports: Sequence[pb.StepReport]) -> list[pb.StepReport]:
        """The reports that have not been seen before."""
        seqs = worker.seqs
        missing, repeated = seqs.num_missing, seqs.num_repeated
        new = [report for report in reports if seqs.admit(report.seq)]
        self.totals.num_missing += seqs.num_missing - missing
        self.totals.num_repeated += seqs.num_repeated - repeated
        return new
