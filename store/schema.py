"""The rows of the database: one plain tuple per row, with the columns of schema.sql as fields, in the same order.

Times ending in `_at` are seconds since 1970 (UTC), other times end in their unit, counts begin with `num_`. `arm` repeats
speculation length and `ngram` in words, for readers. The caller assigns ids (context_id, worker_key, profile_id), counting
up from the highest in `StoredState`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from speclen.records import Arm, ContextKey, Limits, Profile, Trial

Row = TypeVar("Row", bound=NamedTuple)


def filled(row_class: type[Row], *sources: object, **more: object) -> Row:
    """Build a row; each field is taken from `more`, or from the first source with an attribute of that name."""

    def value(name: str) -> Any:
        return more[name] if name in more else next(getattr(each, name) for each in sources if hasattr(each, name))

    return row_class(*map(value, row_class._fields))


class ContextRow(NamedTuple):
    """A context, with the largest limits of any of its workers. Key: context_id."""

    context_id: int
    target: str
    draft: str
    device: str
    dtype: str
    engine_fingerprint: str
    max_batch_size: int
    max_speculation_length: int
    ngram: bool
    decision_version: int
    created_at: float
    updated_at: float

    @property
    def key(self) -> ContextKey:
        return ContextKey(self.target, self.draft, self.device, self.dtype, self.engine_fingerprint)

    @property
    def limits(self) -> Limits:
        return Limits(self.max_batch_size, self.max_speculation_length, self.ngram)


class WorkerRow(NamedTuple):
    """The newest incarnation of a worker and its high-water mark. Key: worker_key.

    applied_seq: the estimates of the same commit contain every report of `epoch` up to this seq, except missing_ranges
    (JSON, `[[first, last], ...]`: seqs that never arrived). Once committed it is the durable_seq. num_reports: learned
    from, over all epochs; num_repeated: duplicates; num_missing: skipped by gaps; num_refused: implausible.
    """

    worker_key: int
    worker_id: str
    epoch: int
    context_id: int
    address: str
    policy: str
    max_batch_size: int
    max_speculation_length: int
    ngram: bool
    applied_seq: int
    missing_ranges: str
    num_reports: int
    num_repeated: int
    num_missing: int
    num_refused: int
    registered_at: float
    last_seen_at: float


class ReportRow(NamedTuple):
    """One step record, converted by `speclen.controller.wire.stored`. A plain tuple in this order is accepted and faster.

    group_id: ascending; reports processed in one call share it, so that a replay can make the same calls.
    accepted_histogram: JSON, such as "[3,1,0]". flags: lower-case names joined by a space; empty for a usable sample.
    class_histograms: JSON, such as '{"greedy":[1,0],"high_temperature":[2,1]}'; None if all sequences are greedy.
    evaluations: JSON, [[class, num_output_tokens, num_tokens, [steps], [drafted], [verified]], ...]; None without any.
    """

    group_id: int
    context_id: int
    worker_key: int
    epoch: int
    seq: int
    batch_size: int
    speculation_length: int
    ngram: bool
    latency_s: float
    accepted_histogram: str
    num_accepted_tokens: int
    mean_context_length: float
    decision_version: int
    flags: str
    probe_id: int
    class_histograms: str | None
    num_drafted_sequences: int
    num_verified_tokens: int
    draft_prefill_s: float
    num_new_sequences: int
    num_unobserved_sequences: int
    evaluations: str | None
    received_at: float


class AcceptanceRow(NamedTuple):
    """Survival at one draft position of a context. Key: context_id, position (1 is the first draft token).

    survival: P(positions 1..position all accepted). num_trials: effective sample size.
    """

    context_id: int
    position: int
    survival: float
    num_trials: float
    updated_at: float


class ArmEstimateRow(NamedTuple):
    """The estimate of one cell, see `speclen.records.ArmEstimate`. Key: context_id, batch_min and arm."""

    context_id: int
    batch_min: int
    batch_max: int
    speculation_length: int
    ngram: bool
    arm: str
    step_s: float
    expected_tokens: float
    ms_per_token_low: float
    ms_per_token_high: float
    num_steps: int
    observed_step_s: float | None
    source: str
    is_best: bool
    updated_at: float


class StateRow(NamedTuple):
    """The estimator's state of a context. Key: context_id."""

    context_id: int
    state: bytes
    updated_at: float


class DecisionRow(NamedTuple):
    """A change of the arm in use; the three fields of the previous arm are None for the first one.

    after_group_id: last group of reports processed before it, here and in other rows.
    """

    context_id: int
    batch_min: int
    batch_max: int
    decision_version: int
    previous_speculation_length: int | None
    previous_ngram: bool | None
    previous_arm: str | None
    speculation_length: int
    ngram: bool
    arm: str
    previous_ms_per_token: float | None
    ms_per_token: float | None
    reason: str
    after_group_id: int
    decided_at: float


class DriftEventRow(NamedTuple):
    """Something was forgotten, or a worker was isolated. factor: see `speclen.records.DriftEvent`."""

    context_id: int
    factor: str
    statistic: float
    detail: str
    after_group_id: int
    detected_at: float


class TrialRow(NamedTuple):
    """A finished trial, see `speclen.records.Trial`. after_group_id: last group of reports processed before its end."""

    context_id: int
    worker_key: int
    batch_size: float
    learned_speculation_length: int
    learned_ngram: bool
    baseline_speculation_length: int
    baseline_ngram: bool
    log_time: float
    learned_tokens: float
    learned_sequences: float
    baseline_tokens: float
    baseline_sequences: float
    gain: float
    lost_s: float
    num_steps: int
    is_baseline_used: bool
    after_group_id: int
    ended_at: float

    @property
    def trial(self) -> Trial:
        """The trial itself."""
        arms: dict[str, Any] = {
            "learned": Arm(self.learned_speculation_length, bool(self.learned_ngram)),
            "baseline": Arm(self.baseline_speculation_length, bool(self.baseline_ngram)),
        }
        same = {name: getattr(self, name) for name in Trial._fields if name not in arms}
        return Trial(**arms, **same)


class HoldsRow(NamedTuple):
    """The holds of a context. Key: context_id. holds: JSON, [[batch_min, batch_max, arm], ...]."""

    context_id: int
    holds: str
    held_at: float


class ContextLimitsRow(NamedTuple):
    """The limits of a context when it was created or widened. first_survival: JSON, see schema.sql."""

    context_id: int
    max_batch_size: int
    max_speculation_length: int
    ngram: bool
    first_survival: str
    after_group_id: int
    added_at: float


class PredictionRow(NamedTuple):
    """Predicted against observed times of the arm in use in a minute. Rows of one minute and batch range are summed.

    window_start: of the minute; num_tokens: per sequence, bonus included; predicted_s: for these tokens.
    """

    context_id: int
    window_start: int
    batch_min: int
    batch_max: int
    num_steps: int
    num_tokens: float
    observed_s: float
    predicted_s: float


class StoreEventRow(NamedTuple):
    """A loss. kind: see schema.sql. content: the state that was set aside."""

    kind: str
    num_rows: int
    detail: str
    happened_at: float
    content: bytes | None = None


PROFILE_COLUMNS = (
    "profile_id",
    "context_id",
    "source",
    "survival",
    "num_survival_rows",
    "after_group_id",
    "imported_at",
)


class ProfileRow(NamedTuple):
    """An imported offline profile."""

    profile_id: int
    context_id: int
    profile: Profile
    after_group_id: int
    imported_at: float


@dataclass(slots=True)
class Commit:
    """Rows that are stored in one transaction or not at all: reports, the estimates that contain them, high-water marks.

    Rows of later commits replace rows of earlier ones. num_reports_dropped: raw rows given up before this commit, for
    store_events. replaced_contexts: contexts whose stored arm estimates are deleted first, because batch ranges changed.
    """

    contexts: Sequence[ContextRow] = ()
    workers: Sequence[WorkerRow] = ()
    reports: Sequence[ReportRow | tuple[object, ...]] = ()
    acceptance: Sequence[AcceptanceRow] = ()
    arm_estimates: Sequence[ArmEstimateRow] = ()
    states: Sequence[StateRow] = ()
    decisions: Sequence[DecisionRow] = ()
    drift_events: Sequence[DriftEventRow] = ()
    trials: Sequence[TrialRow] = ()
    holds: Sequence[HoldsRow] = ()
    predictions: Sequence[PredictionRow] = ()
    profiles: Sequence[ProfileRow] = ()
    replaced_contexts: Sequence[int] = ()
    context_limits: Sequence[ContextLimitsRow] = ()
    store_events: Sequence[StoreEventRow] = ()
    num_reports_dropped: int = 0


@dataclass(frozen=True, slots=True)
class StoredState:
    """State that a restarted controller needs. states: by context_id. last_group_id, last_profile_id: 0 if there is none."""

    contexts: tuple[ContextRow, ...] = ()
    workers: tuple[WorkerRow, ...] = ()
    states: dict[int, bytes] = field(default_factory=dict)
    last_group_id: int = 0
    last_profile_id: int = 0


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """State of the writer. ok: False while commits fail; detail gives the reason and what happens to them.

    alive: False once the writer has ended, with the reason in detail; the controller then has to end, too.
    num_rows_refused: rows that violated the schema; they were omitted and noted in store_events.
    """

    ok: bool
    detail: str
    num_rows_refused: int
    last_commit_s: float
    database_bytes: int
    alive: bool = True
