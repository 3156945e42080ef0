"""Rows of the database, made of the registry's and the estimator's values."""

from __future__ import annotations

from collections.abc import Iterable

from speclen.controller.estimator import Estimator
from speclen.controller.service.registry import Context, Worker
from speclen.controller.service.sequence import SeqWindow
from speclen.records import Decision, DriftEvent, Limits, Profile
from speclen.store.records import (
    AcceptanceRow,
    ArmEstimateRow,
    ContextLimitsRow,
    ContextRow,
    DecisionRow,
    DriftEventRow,
    ProfileCellRow,
    ProfileRow,
    WorkerRow,
)


def context_row(context: Context, version: int, now: float) -> ContextRow:
    return ContextRow(
        context_id=context.context_id,
        **context.key._asdict(),
        **context.limits._asdict(),
        decision_version=version,
        created_at=context.created_at,
        updated_at=now,
    )


def limits_row(context: Context, after_group_id: int, now: float) -> ContextLimitsRow:
    return ContextLimitsRow(context.context_id, *context.limits, after_group_id, now)


def worker_row(worker: Worker) -> WorkerRow:
    seqs = worker.seqs
    return WorkerRow(
        worker_key=worker.worker_key,
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        context_id=worker.context.context_id,
        address=worker.address,
        policy=worker.policy,
        **worker.limits._asdict(),
        applied_seq=seqs.applied_seq,
        missing_ranges=seqs.missing_json(),
        num_reports=worker.num_reports,
        num_repeated=seqs.num_repeated,
        num_missing=seqs.num_missing,
        num_refused=worker.num_refused,
        registered_at=worker.registered_at,
        last_seen_at=worker.last_seen_at,
    )


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


def estimate_rows(estimator: Estimator, context: Context, now: float) -> list[ArmEstimateRow]:
    """The learned table of a context."""
    return [
        ArmEstimateRow(
            context_id=context.context_id,
            batch_min=each.batch_min,
            batch_max=each.batch_max,
            **each.arm._asdict(),
            step_s=each.step_s,
            expected_tokens=each.expected_tokens,
            ms_per_token_low=each.ms_per_token_low,
            ms_per_token_high=each.ms_per_token_high,
            num_steps=each.num_steps,
            observed_step_s=each.observed_step_s,
            source=each.source,
            is_best=each.is_best,
            updated_at=now,
        )
        for each in estimator.rows(context.key)
    ]


def acceptance_rows(estimator: Estimator, pair: tuple[str, str], now: float) -> list[AcceptanceRow]:
    return [
        AcceptanceRow(*pair, position, survival, num_trials, now)
        for position, (survival, num_trials) in enumerate(estimator.survival(pair), start=1)
    ]


def decision_rows(decisions: Iterable[tuple[Context, Decision]], after_group_id: int, now: float) -> list[DecisionRow]:
    """Decisions of workers that are alike: the tables are kept for these. An isolated worker is an event."""
    return [
        DecisionRow(
            context_id=context.context_id,
            batch_min=each.batch_min,
            batch_max=each.batch_max,
            decision_version=each.version,
            previous_speculation_length=each.previous_arm and each.previous_arm.speculation_length,
            previous_ngram=each.previous_arm and each.previous_arm.ngram,
            **each.arm._asdict(),
            previous_ms_per_token=each.previous_ms_per_token,
            ms_per_token=each.ms_per_token,
            reason=each.reason,
            after_group_id=after_group_id,
            decided_at=now,
        )
        for context, each in decisions
        if not each.isolated
    ]


def drift_rows(events: Iterable[tuple[Context, DriftEvent]], after_group_id: int, now: float) -> list[DriftEventRow]:
    return [
        DriftEventRow(context.context_id, each.factor, each.statistic, each.detail, after_group_id, now)
        for context, each in events
    ]


def profile_row(profile_id: int, context: Context, profile: Profile, after_group_id: int, now: float) -> ProfileRow:
    return ProfileRow(
        profile_id=profile_id,
        context_id=context.context_id,
        source=profile.source,
        as_prior=profile.as_prior,
        survival=profile.survival,
        num_survival_rows=profile.num_survival_rows,
        after_group_id=after_group_id,
        imported_at=now,
        cells=tuple(ProfileCellRow(*cell) for cell in profile.cells),
    )
