"""What goes into the store and what comes out: one plain value per row, named like its columns.

Times ending in `_at` are seconds since 1970 (UTC), other times end in their unit, counts begin with `num_`. Ids
(context_id, worker_key, profile_id) are given out by the caller, one more than the highest in `StoredState`, so that
nobody ever waits for the disk to learn one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ContextRow:
    """What step times depend on, with the largest limits any of its workers had. Inserted or updated by context_id."""

    context_id: int
    target: str
    draft: str
    device: str
    dtype: str
    engine_fingerprint: str
    max_batch_size: int
    max_speculation_length: int
    decision_version: int
    created_at: float
    updated_at: float
    max_copied_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """The newest life of a worker and its high-water mark. Inserted or updated by worker_key.

    applied_seq: every report of `epoch` up to it is contained in the estimates of the same commit, except those in
    missing_ranges; once committed it is the durable_seq. missing_ranges: JSON `[[first, last], ...]`, seqs below
    applied_seq that never arrived. num_reports: learned from over all epochs; num_repeated: recognised and ignored;
    num_missing: skipped by a gap; num_refused: not plausible.
    """

    worker_key: int
    worker_id: str
    epoch: int
    context_id: int
    address: str
    policy: str
    max_batch_size: int
    max_speculation_length: int
    applied_seq: int
    num_reports: int
    num_repeated: int
    num_missing: int
    num_refused: int
    registered_at: float
    last_seen_at: float
    missing_ranges: str = "[]"
    max_copied_tokens: int = 0


class ReportRow(NamedTuple):
    """One report, in the order of step_reports' columns; a plain tuple in this order will do (and is faster).

    group_id: reports that were learned from in one call share it, and it ascends, so that a replay can make the same
    calls. accepted_histogram: JSON array text, such as "[3,1,0]". num_accepted_tokens: sum of j * histogram[j].
    flags: lower-case names joined by a space ("prefill catch_up"), empty for a step that teaches. class_histograms: JSON
    text such as '{"greedy":[1,0],"hot":[2,1]}', None where the worker did not tell classes of requests apart.
    num_steps: how many steps that were alike it stands for. Where these are several, seq is of the first, latency_s and
    mean_context_length are means, latency_sd_s is the standard deviation, histograms are sums over the steps, and
    num_accepted_tokens is per step, rounded down.
    copying: JSON text of what copying did, and under "read" and "reviews" of what was read and reviewed, whatever the plan.
    draft_prompt_s: of the draft model since the report before. num_new_rows: rows that sequences got as the step
    began, summed over the steps.
    """

    group_id: int
    context_id: int
    worker_key: int
    epoch: int
    seq: int
    batch_size: int
    speculation_length: int
    latency_s: float
    accepted_histogram: str
    num_accepted_tokens: int
    mean_context_length: float
    decision_version: int
    probe_id: int
    flags: str
    received_at: float
    class_histograms: str | None = None
    num_steps: int = 1
    latency_sd_s: float | None = None
    copying: str | None = None
    draft_prompt_s: float = 0.0
    num_new_rows: int = 0


@dataclass(frozen=True, slots=True)
class AcceptanceRow:
    """Survival of one draft position of a pair. Replaces the row of the same pair, load band and position.

    batch_min, batch_max: the band of batch sizes; 0, 0 for the estimate shared by all. position: 1 for the first draft
    token. survival: P(positions 1..position all accepted); num_trials: rows (discounted by forgetting) behind it.
    """

    target: str
    draft: str
    batch_min: int
    batch_max: int
    position: int
    survival: float
    num_trials: float
    updated_at: float


@dataclass(frozen=True, slots=True)
class LatencyCellRow:
    """What is believed about one length in one bucket. Replaces the row of the same context, batch_min and length.

    step_s: expected whole-step time. expected_tokens: per row and step, bonus included, from the pair's acceptance at
    the same moment. ms_per_token_low, _high: 95% interval. source: "profile", "online" or "both", of the cells that the
    estimate was inferred from where num_steps is 0; "prior" when all was taken over from another context.
    observed_step_s: mean of what the num_steps reports said; num_reports_since: reports of the context since the newest of
    them. None without any. bare_step_s: step_s without the shares of prompts that it holds.
    """

    context_id: int
    batch_min: int
    batch_max: int
    speculation_length: int
    step_s: float
    expected_tokens: float
    ms_per_token_low: float
    ms_per_token_high: float
    num_steps: int
    source: str
    is_best: bool
    updated_at: float
    observed_step_s: float | None = None
    num_reports_since: int | None = None
    bare_step_s: float | None = None


@dataclass(frozen=True, slots=True)
class PlanEstimateRow:
    """What is believed about one plan that copies in one bucket. Replaces the row of the same context, batch_min and place.

    place: 0 for the plan in use, if one is, then the best others. plan: in words. is_best: in use.
    """

    context_id: int
    batch_min: int
    batch_max: int
    place: int
    plan: str
    speculation_length: int
    step_s: float
    expected_tokens: float
    ms_per_token_low: float
    ms_per_token_high: float
    is_best: bool
    updated_at: float


@dataclass(frozen=True, slots=True)
class StateRow:
    """The estimator's own state as JSON text, from which it goes on. Replaces the row of the same scope and key.

    scope "context", key str(context_id); scope "pair", key json.dumps([target, draft]).
    """

    scope: str
    key: str
    state: str
    updated_at: float


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """A bucket's choice changed. after_group_id: last group of reports that was learned from before.

    previous_plan, plan: in words where rows copy; the lengths are the draft model's.
    """

    context_id: int
    batch_min: int
    batch_max: int
    decision_version: int
    previous_length: int | None
    speculation_length: int
    previous_ms_per_token: float | None
    ms_per_token: float | None
    reason: str
    after_group_id: int
    decided_at: float
    previous_plan: str | None = None
    plan: str | None = None


@dataclass(frozen=True, slots=True)
class DriftEventRow:
    """Something was forgotten. factor: "latency" or "acceptance" (a detector fired), "reset" (a context started
    anew), or "worker" (one was found unlike the others)."""

    context_id: int
    factor: str
    statistic: float
    detail: str
    after_group_id: int
    detected_at: float


@dataclass(frozen=True, slots=True)
class ContextLimitsRow:
    """A context was made or widened. after_group_id: last group of reports that was learned from before."""

    context_id: int
    max_batch_size: int
    max_speculation_length: int
    after_group_id: int
    added_at: float
    max_copied_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StoreEventRow:
    """Something was given up. kind: see the schema; content: what was set aside, as it was found."""

    kind: str
    num_rows: int
    detail: str
    happened_at: float
    content: str | None = None


@dataclass(frozen=True, slots=True)
class ProfileCellRow:
    """One measured cell of an offline profile. step_s: mean whole-step time."""

    batch_size: int
    speculation_length: int
    step_s: float
    step_s_stderr: float
    num_steps: int
    mean_context_length: float


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """An offline profile as it was imported. survival, num_survival_rows: by draft position, non-increasing survival.

    after_group_id: last group of reports that was learned from before it seeded the context.
    """

    profile_id: int
    context_id: int
    source: str
    as_prior: bool
    survival: tuple[float, ...]
    num_survival_rows: tuple[int, ...]
    after_group_id: int
    imported_at: float
    cells: tuple[ProfileCellRow, ...]


@dataclass(slots=True)
class Commit:
    """What belongs together: reports, the estimates that contain them and the high-water marks that say so.

    All of one moment, stored in one transaction or not at all. Later commits supersede earlier ones row by row.
    scope: commits of other scopes are stored with it, but what the database refuses of them is no reason to refuse this.
    replaced_contexts: contexts whose stored latency cells vanish, for when buckets changed; those of this commit stay.
    """

    contexts: Sequence[ContextRow] = ()
    workers: Sequence[WorkerRow] = ()
    reports: Sequence[ReportRow | tuple[object, ...]] = ()
    acceptance: Sequence[AcceptanceRow] = ()
    latency_cells: Sequence[LatencyCellRow] = ()
    plan_estimates: Sequence[PlanEstimateRow] = ()
    states: Sequence[StateRow] = ()
    decisions: Sequence[DecisionRow] = ()
    drift_events: Sequence[DriftEventRow] = ()
    profiles: Sequence[ProfileRow] = ()
    replaced_contexts: Sequence[int] = ()
    context_limits: Sequence[ContextLimitsRow] = ()
    store_events: Sequence[StoreEventRow] = ()
    scope: str = ""


@dataclass(frozen=True, slots=True)
class StoredState:
    """What a controller needs to go on where the last one stopped. Raw reports are not read.

    states: JSON text by (scope, key), the newest last, see StateRow. last_group_id, last_profile_id: 0 when there is none.
    """

    contexts: tuple[ContextRow, ...] = ()
    workers: tuple[WorkerRow, ...] = ()
    states: dict[tuple[str, str], str] = field(default_factory=dict)
    last_group_id: int = 0
    last_profile_id: int = 0


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """How the writer is doing. ok is False while commits fail; detail then says why and what happens to them.

    alive: False once the writer has ended for good, with the reason in detail: then the controller has to end, too.
    num_reports_dropped: raw rows given up since the start because commits failed for longer than memory allows.
    num_rows_refused: rows that broke a rule of the schema, left out of their commits; both are noted in store_events.
    """

    ok: bool
    detail: str
    num_pending_commits: int
    num_pending_reports: int
    num_commits: int
    num_failures: int
    num_reports_dropped: int
    num_rows_refused: int
    last_commit_at: float
    last_commit_s: float
    database_bytes: int
    alive: bool = True
