"""Rows of the database, made of the registry's and the estimator's values: fields and columns have the same names."""

from __future__ import annotations

import json
from collections.abc import Sequence

from speclen.controller.estimator import Contexts
from speclen.controller.service.registry import Context, Worker
from speclen.controller.service.sequence import SeqWindow
from speclen.records import Decision, Hold, Limits, Table, Trial, parse_arm
from speclen.store.schema import AcceptanceRow, ArmEstimateRow, DecisionRow, HoldsRow, TrialRow, WorkerRow, filled


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


def estimate_rows(estimator: Contexts, context: Context, in_use: Table, now: float) -> list[ArmEstimateRow]:
    """The learned table of a context. in_use: arms that its workers use, by holds and verdicts, too."""
    more = {"context_id": context.context_id, "updated_at": now}
    return [
        filled(ArmEstimateRow, each, each.arm, is_best=each.arm == in_use.arm_for(each.batch_min), **more)
        for each in estimator.rows(context.key)
    ]


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


def trial_row(context: Context, trial: Trial, worker: Worker, after_group_id: int, now: float) -> TrialRow:
    return filled(
        TrialRow,
        trial,
        worker,
        context_id=context.context_id,
        learned_speculation_length=trial.learned.speculation_length,
        learned_ngram=trial.learned.ngram,
        baseline_speculation_length=trial.baseline.speculation_length,
        baseline_ngram=trial.baseline.ngram,
        after_group_id=after_group_id,
        ended_at=now,
    )


def holds_row(context: Context, holds: Sequence[Hold], now: float) -> HoldsRow:
    words = [[hold.batch_min, hold.batch_max, None if hold.arm is None else str(hold.arm)] for hold in holds]
    return HoldsRow(context.context_id, json.dumps(words), now)


def holds_of(row: HoldsRow) -> list[Hold]:
    """The holds of a row. Raises ValueError or TypeError for text that `holds_row` does not write."""
    return [Hold(low, high, None if arm is None else parse_arm(arm)) for low, high, arm in json.loads(row.holds)]
