"""The rows that a commit takes from the estimator and the registry, and the way back at start."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field

import structlog

from speclen.controller.estimator.acceptance import AcceptanceModel
from speclen.controller.estimator.controller import Controller
from speclen.controller.estimator.core import ContextKey, Limits, ObserveOutcome, Profile
from speclen.controller.service.registry import Context, Registry, Worker
from speclen.controller.service.sequence import SeqWindow
from speclen.store.records import (
    AcceptanceRow,
    ContextRow,
    DecisionRow,
    DriftEventRow,
    LatencyCellRow,
    ProfileCellRow,
    ProfileRow,
    StateRow,
    StoredState,
    WorkerRow,
)

log = structlog.get_logger()


@dataclass(slots=True)
class Estimates:
    """What is believed about one pair and some of its contexts, at one moment."""

    contexts: list[ContextRow] = field(default_factory=list)
    acceptance: list[AcceptanceRow] = field(default_factory=list)
    latency_cells: list[LatencyCellRow] = field(default_factory=list)
    states: list[StateRow] = field(default_factory=list)


class Snapshots:
    """Reads the estimator; writes to it only in `restore`."""

    def __init__(self, estimator: Controller, registry: Registry) -> None:
        self.estimator = estimator
        self.registry = registry

    def of_pair(self, pair: tuple[str, str], contexts: Collection[Context], now: float) -> Estimates:
        """contexts: at least one of the pair's."""
        estimates = Estimates()
        for context in contexts:
            self._add_context(estimates, context, now)
            acceptance = self.estimator.model(context.key).acceptance  # one for all contexts of the pair
        estimates.acceptance = acceptance_rows(pair, acceptance, now)
        state = self.estimator.export_pair_state(pair)
        estimates.states.append(StateRow("pair", json.dumps(pair), json.dumps(state), now))
        return estimates

    def _add_context(self, estimates: Estimates, context: Context, now: float) -> None:
        key = context.key
        version = self.estimator.table(key).version
        estimates.contexts.append(context_row(context, version, now))
        estimates.states.append(
            StateRow("context", str(context.context_id), json.dumps(self.estimator.export_state(key)), now)
        )
        for row in self.estimator.learned_rows(key):
            estimate = row.estimate
            estimates.latency_cells.append(
                LatencyCellRow(
                    context_id=context.context_id,
                    batch_min=row.bucket.batch_min,
                    batch_max=row.bucket.batch_max,
                    speculation_length=estimate.speculation_length,
                    step_s=estimate.step_s,
                    expected_tokens=estimate.expected_tokens,
                    ms_per_token_low=estimate.ms_per_token_low,
                    ms_per_token_high=estimate.ms_per_token_high,
                    num_steps=row.num_steps,
                    source=row.source,
                    is_best=row.is_best,
                    updated_at=now,
                )
            )

    def event_rows(
        self, outcome: ObserveOutcome, after_group_id: int, now: float
    ) -> tuple[list[DecisionRow], list[DriftEventRow]]:
        contexts = self.registry.contexts
        decisions = [
            DecisionRow(
                context_id=contexts[decision.context].context_id,
                batch_min=decision.bucket.batch_min,
                batch_max=decision.bucket.batch_max,
                decision_version=decision.version,
                previous_length=decision.previous_length,
                speculation_length=decision.speculation_length,
                previous_ms_per_token=decision.previous_ms_per_token,
                ms_per_token=decision.ms_per_token,
                reason=decision.reason,
                after_group_id=after_group_id,
                decided_at=now,
            )
            for decision in outcome.decisions
        ]
        events = [
            DriftEventRow(
                contexts[event.context].context_id, event.factor, event.statistic, event.detail, after_group_id, now
            )
            for event in outcome.drift_events
        ]
        return decisions, events

    def restore(self, stored: StoredState) -> None:
        """Go on where the stored state stopped."""
        contexts = {}
        for row in stored.contexts:
            key = ContextKey(row.target, row.draft, row.device, row.dtype, row.engine_fingerprint)
            limits = Limits(row.max_batch_size, row.max_speculation_length)
            contexts[row.context_id] = self.registry.add_context(Context(row.context_id, key, limits, row.created_at))
            state = stored.states.get(("context", str(row.context_id)))
            pair_state = stored.states.get(("pair", json.dumps(key.pair)))
            self._restore_context(key, limits, state, pair_state)
        for worker in stored.workers:
            self.registry.add_worker(restored_worker(worker, contexts[worker.context_id]))

    def _restore_context(self, key: ContextKey, limits: Limits, state: str | None, pair_state: str | None) -> None:
        if state is None or pair_state is None:
            self.estimator.add_context(key, limits)
            return
        try:
            self.estimator.restore(key, limits, json.loads(state), json.loads(pair_state))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            # Written by another version. What it knew is learned again within seconds; not serving would cost more.
            log.warning("a stored state cannot be used, the context starts anew", context=str(key), reason=str(error))
            self.estimator.restore(key, limits, None, None)


def acceptance_rows(pair: tuple[str, str], model: AcceptanceModel, now: float) -> list[AcceptanceRow]:
    """Survival by position: of everybody (batch sizes 0 to 0), then of every band of load."""
    rows = survival_rows(pair, (0, 0), model.acceptance.cumprod().tolist(), model.reached.tolist(), now)
    bands = zip(model.band_survival.tolist(), model.band_reached.tolist(), strict=True)
    for band, (survival, reached) in enumerate(bands):
        rows += survival_rows(pair, ((1 << band) // 2 + 1, 1 << band), survival, reached, now)
    return rows


def survival_rows(
    pair: tuple[str, str], batch_sizes: tuple[int, int], survival: list[float], reached: list[float], now: float
) -> list[AcceptanceRow]:
    return [
        AcceptanceRow(*pair, *batch_sizes, position, probability, num_trials, now)
        for position, (probability, num_trials) in enumerate(zip(survival, reached, strict=True), start=1)
    ]


def context_row(context: Context, version: int, now: float) -> ContextRow:
    key, limits = context.key, context.limits
    return ContextRow(
        context_id=context.context_id,
        target=key.target,
        draft=key.draft,
        device=key.device,
        dtype=key.dtype,
        engine_fingerprint=key.engine_fingerprint,
        max_batch_size=limits.max_batch_size,
        max_speculation_length=limits.max_speculation_length,
        decision_version=version,
        created_at=context.created_at,
        updated_at=now,
    )


def worker_row(worker: Worker) -> WorkerRow:
    window = worker.window
    return WorkerRow(
        worker_key=worker.worker_key,
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        context_id=worker.context.context_id,
        address=worker.address,
        policy=worker.policy,
        max_batch_size=worker.limits.max_batch_size,
        max_speculation_length=worker.limits.max_speculation_length,
        applied_seq=window.applied_seq,
        num_reports=worker.num_reports,
        num_repeated=window.num_repeated,
        num_missing=window.num_missing,
        num_refused=worker.num_refused,
        registered_at=worker.registered_at,
        last_seen_at=worker.last_seen_at,
        missing_ranges=window.missing_json(),
    )


def restored_worker(row: WorkerRow, context: Context) -> Worker:
    """A worker as of its last commit: what was applied then is durable."""
    return Worker(
        worker_key=row.worker_key,
        worker_id=row.worker_id,
        epoch=row.epoch,
        context=context,
        limits=Limits(row.max_batch_size, row.max_speculation_length),
        address=row.address,
        policy=row.policy,
        registered_at=row.registered_at,
        last_seen_at=row.last_seen_at,
        window=SeqWindow(row.applied_seq, row.missing_ranges, row.num_missing, row.num_repeated),
        committed_seq=row.applied_seq,
        num_reports=row.num_reports,
        num_refused=row.num_refused,
    )


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
        cells=tuple(
            ProfileCellRow(
                cell.batch_size,
                cell.speculation_length,
                cell.step_s,
                cell.step_s_stderr,
                cell.num_steps,
                cell.mean_context_length,
            )
            for cell in profile.cells
        ),
    )
