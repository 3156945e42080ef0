"""Rows of the database, made of the registry's and the estimator's values: fields and columns have the same names."""

from __future__ import annotations

from speclen.controller.estimator import Contexts
from speclen.controller.service.registry import Context, Worker
from speclen.controller.service.sequence import SeqWindow
from speclen.records import Decision, Limits
from speclen.store.records import AcceptanceRow, ArmEstimateRow, DecisionRow, WorkerRow, filled


def worker_of(row: WorkerRow, context: Context) -> Worker:
    """A worker as of its last commit: what was settled then is durable. Raises ValueError for ranges that are none."""
    seqs = SeqWindow(row.applied_seq, row.missing_ranges, row.num_missing, row.num_repeated)
    return Worker(
        worker_key=row.worker_key,
        worker_id=row.worker_id,
        epoch=row.epoch,
        context=context,
        limits=Limits(row.max_batch_size, row.max_speculation_length, row.ngram),
        address=row.address,
        policy=row.policy,
        registered_at=row.registered_at,
        last_seen_at=row.last_seen_at,
        seqs=seqs,
        durable_seq=seqs.settled_seq,
        num_reports=row.num_reports,
        num_refused=row.num_refused,
    )


def estimate_rows(estimator: Contexts, context: Context, now: float) -> list[ArmEstimateRow]:
    """The learned table of a context."""
    more = {"context_id": context.context_id, "updated_at": now}
    return [filled(ArmEstimateRow, each, each.arm, **more) for each in estimator.rows(context.key)]


def acceptance_rows(estimator: Contexts, context: Context, now: float) -> list[AcceptanceRow]:
    survival = enumerate(estimator.survival(context.key), start=1)
    return [AcceptanceRow(context.context_id, position, *each, now) for position, each in survival]


def decision_row(context: Context, decision: Decision, after_group_id: int, now: float) -> DecisionRow:
    previous = decision.previous_arm
    return filled(
        DecisionRow,
        decision,
        decision.arm,
        context_id=context.context_id,
        decision_version=decision.version,
        previous_speculation_length=None if previous is None else previous.speculation_length,
        previous_ngram=None if previous is None else previous.ngram,
        after_group_id=after_group_id,
        decided_at=now,
    )
