"""The rows that a commit takes from the estimator and the registry, and the way back at start."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from speclen.controller.estimator.acceptance import Acceptance
from speclen.controller.estimator.core import Bucket, ContextKey, Limits, ObserveOutcome, Profile
from speclen.controller.estimator.estimator import Estimator
from speclen.controller.estimator.plans.choice import ShownPlan
from speclen.controller.estimator.policies import is_policy
from speclen.controller.service.registry import RegisteredContext, Registry, Worker
from speclen.controller.service.sequence import SeqWindow
from speclen.store.records import (
    AcceptanceRow,
    ContextRow,
    DecisionRow,
    DriftEventRow,
    LatencyCellRow,
    PlanEstimateRow,
    ProfileCellRow,
    ProfileRow,
    StateRow,
    StoredState,
    StoreEventRow,
    WorkerRow,
)

log = structlog.get_logger()

MOST_OTHERS = 8  # contexts of a pair whose tables a commit shows anew although none of their own reports came


@dataclass(slots=True)
class Estimates:
    """What is believed about one pair and some of its contexts, at one moment."""

    contexts: list[ContextRow] = field(default_factory=list)
    acceptance: list[AcceptanceRow] = field(default_factory=list)
    latency_cells: list[LatencyCellRow] = field(default_factory=list)
    states: list[StateRow] = field(default_factory=list)
    plan_estimates: list[PlanEstimateRow] = field(default_factory=list)
    replaced: list[int] = field(default_factory=list)  # contexts of which rows may be stored that are shown no more


class Snapshots:
    """Reads the estimator; writes to it only in `restore`."""

    def __init__(self, estimator: Estimator, registry: Registry) -> None:
        self.estimator = estimator
        self.registry = registry
        self.unknown: list[RegisteredContext] = []  # contexts whose stored state could not be used
        # By context_id: buckets whose plans and cells the last commit held.
        self._shown: dict[int, set[tuple[str, int]]] = {}

    def of_pair(self, pair: tuple[str, str], contexts: Collection[RegisteredContext], now: float) -> Estimates:
        """contexts: at least one of the pair's. The tables of others with workers move along with the acceptance."""
        estimates = Estimates()
        for context in contexts:
            self._add_context(estimates, context, now)
            self._add_table(estimates, context, now)
        changed = {context.context_id for context in contexts}
        others = [other for key, other in self.registry.contexts.items() if key.pair == pair and other.workers]
        for other in [other for other in others if other.context_id not in changed][:MOST_OTHERS]:
            self._add_table(estimates, other, now)
        estimates.acceptance = acceptance_rows(pair, self.estimator.acceptance(pair), now)
        state = self.estimator.export_pair_state(pair)
        estimates.states.append(StateRow("pair", json.dumps(pair), state_text(state), now))
        return estimates

    def _add_context(self, estimates: Estimates, context: RegisteredContext, now: float) -> None:
        key = context.key
        version = self.estimator.table(key).version
        estimates.contexts.append(context_row(context, version, now))
        estimates.states.append(
            StateRow("context", str(context.context_id), state_text(self.estimator.export_state(key)), now)
        )

    def _add_table(self, estimates: Estimates, context: RegisteredContext, now: float) -> None:
        found, rows = self.estimator.plan_estimates(context.key), self.estimator.learned_rows(context.key)
        buckets = {("plan", bucket.batch_min) for bucket in found} | {("cell", row.bucket.batch_min) for row in rows}
        before = self._shown.get(context.context_id)
        if before is None or not before <= buckets:  # a row that none replaces would be shown for ever, as in use
            estimates.replaced.append(context.context_id)
        self._shown[context.context_id] = buckets
        for bucket, plans in found.items():
            estimates.plan_estimates += [
                plan_row(context.context_id, bucket, place, shown, now) for place, shown in enumerate(plans)
            ]
        for row in rows:
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
                    observed_step_s=row.observed_step_s,
                    num_reports_since=row.num_reports_since,
                    bare_step_s=estimate.bare_step_s,
                )
            )

    def event_rows(
        self, outcome: ObserveOutcome, after_group_id: int, now: float
    ) -> tuple[list[DecisionRow], list[DriftEventRow]]:
        """Decisions are kept as the tables are: of workers that are alike. A worker set apart is an event."""
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
                previous_plan=None if decision.previous_plan is None else str(decision.previous_plan),
                plan=None if decision.plan is None else str(decision.plan),
            )
            for decision in outcome.decisions
            if decision.of_all
        ]
        events = [
            DriftEventRow(
                contexts[event.context].context_id, event.factor, event.statistic, event.detail, after_group_id, now
            )
            for event in outcome.drift_events
        ]
        return decisions, events

    def restore(self, stored: StoredState) -> list[StoreEventRow]:
        """Go on where the stored state stopped; returns what of it could not be used."""
        contexts, aside = {}, []
        self._restore_copying(stored.states)
        for row in stored.contexts:
            key = ContextKey(row.target, row.draft, row.device, row.dtype, row.engine_fingerprint)
            limits = Limits(row.max_batch_size, row.max_speculation_length, row.max_copied_tokens)
            contexts[row.context_id] = self.registry.add_context(
                RegisteredContext(row.context_id, key, limits, row.created_at)
            )
            given_up = self._restore_context(key, limits, stored.states, ("context", str(row.context_id)))
            if any(event.detail.startswith("state of context") for event in given_up):
                self.unknown.append(contexts[row.context_id])
            self.estimator.count_from(key, row.decision_version)
            aside += given_up
        for worker in stored.workers:
            try:
                self.registry.add_worker(restored_worker(worker, contexts[worker.context_id]))
            except ValueError as error:
                aside.append(set_aside(f"numbers of worker {worker.worker_id!r}", str(error), worker.missing_ranges))
                intact = replace(worker, missing_ranges="[]")
                self.registry.add_worker(restored_worker(intact, contexts[worker.context_id]))
        return aside

    def _restore_copying(self, states: dict[tuple[str, str], str]) -> None:
        """What is known of copying belongs to a target, and stands in the state of each of its pairs: the newest counts."""
        for (kind, name), text in reversed(states.items()):
            if kind == "pair":
                # What is wrong with it is told where the pair's context is restored.
                with contextlib.suppress(ValueError, TypeError, RecursionError):
                    self.estimator.restore_copying(json.loads(name)[0], json.loads(text))

    def _restore_context(
        self, key: ContextKey, limits: Limits, states: dict[tuple[str, str], str], scope: tuple[str, str]
    ) -> list[StoreEventRow]:
        """As much as can be used of a context's state and of its pair's; what is left out comes back.

        Written by another version, or by a mistake: what it knew is learned again within seconds, not serving would cost
        more.
        """
        texts = {name: states[name] for name in (scope, ("pair", json.dumps(key.pair))) if name in states}
        aside: list[StoreEventRow] = []
        reason = ""
        for left_out in ((), tuple(texts)[:1], tuple(texts)[1:], tuple(texts)):
            used = {name: text for name, text in texts.items() if name not in left_out}
            try:
                parsed = {name[0]: json.loads(text) for name, text in used.items()}
                self.estimator.restore(key, limits, parsed.get("context"), parsed.get("pair"))
            except (ValueError, RecursionError) as error:
                reason = str(error)
            else:
                aside += [set_aside(f"state of {kind} {name}", reason, texts[kind, name]) for kind, name in left_out]
                return aside
        raise AssertionError("a context can start from nothing")


def set_aside(what: str, reason: str, content: str) -> StoreEventRow:
    """Note that something stored is not used, and keep it."""
    log.error("something stored cannot be used and is set aside", what=what, reason=reason)
    return StoreEventRow("state_set_aside", 1, f"{what}: {reason}", time.time(), content)


def stored_policy(stored: StoredState) -> str:
    """The policy of the context that was saved last; "" where no state names one."""
    for (kind, _), text in reversed(stored.states.items()):
        if kind == "context":
            with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
                name = json.loads(text)["policy"][0]
                if isinstance(name, str) and is_policy(name):
                    return name
    return ""


def state_text(state: dict[str, Any]) -> str:
    """A state as the database keeps it. Raises ValueError where a number in it is none."""
    return json.dumps(state, allow_nan=False)


def plan_row(context_id: int, bucket: Bucket, place: int, shown: ShownPlan, now: float) -> PlanEstimateRow:
    known = shown.estimate
    return PlanEstimateRow(
        context_id=context_id,
        batch_min=bucket.batch_min,
        batch_max=bucket.batch_max,
        place=place,
        plan=str(known.plan),
        speculation_length=known.plan.draft_length,
        step_s=known.step_s,
        expected_tokens=known.expected_tokens,
        ms_per_token_low=known.ms_per_token_low,
        ms_per_token_high=known.ms_per_token_high,
        is_best=shown.is_best,
        updated_at=now,
    )


def acceptance_rows(pair: tuple[str, str], model: Acceptance, now: float) -> list[AcceptanceRow]:
    """Survival by position: of everybody (batch sizes 0 to 0), then of every band of load."""
    rows = survival_rows(pair, (0, 0), model.shared.cumprod().tolist(), model.everybody[0].tolist(), now)
    bands = zip(model.of_band().cumprod(axis=1).tolist(), model.rows[:, :, 0].sum(axis=0).tolist(), strict=True)
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


def context_row(context: RegisteredContext, version: int, now: float) -> ContextRow:
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
        max_copied_tokens=limits.max_copied_tokens,
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
        max_copied_tokens=worker.limits.max_copied_tokens,
    )


def restored_worker(row: WorkerRow, context: RegisteredContext) -> Worker:
    """A worker as of its last commit: what was settled then is durable. Raises ValueError for numbers that are none."""
    window = SeqWindow(row.applied_seq, row.missing_ranges, row.num_missing, row.num_repeated)
    return Worker(
        worker_key=row.worker_key,
        worker_id=row.worker_id,
        epoch=row.epoch,
        context=context,
        limits=Limits(row.max_batch_size, row.max_speculation_length, row.max_copied_tokens),
        address=row.address,
        policy=row.policy,
        registered_at=row.registered_at,
        last_seen_at=row.last_seen_at,
        window=window,
        durable_seq=window.settled_seq,
        num_reports=row.num_reports,
        num_refused=row.num_refused,
    )


def profile_row(
    profile_id: int, context: RegisteredContext, profile: Profile, after_group_id: int, now: float
) -> ProfileRow:
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
