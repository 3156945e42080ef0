"""The values that estimator, policies, service and store exchange. No I/O, no clock, no gRPC."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from speclen.controller.estimator.plans.plan import Copies, Plan
from speclen.controller.estimator.plans.reviews import OutputReview


@dataclass(frozen=True, slots=True)
class ContextKey:
    """What step times depend on. Acceptance depends on `pair` alone."""

    target: str
    draft: str
    device: str
    dtype: str
    engine_fingerprint: str = ""

    @property
    def pair(self) -> tuple[str, str]:
        """The part that acceptance depends on."""
        return (self.target, self.draft)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a worker can do. Lengths 0..max_speculation_length and batch sizes 1..max_batch_size are allowed.

    max_copied_tokens: that a row can copy in one step; 0: it cannot.
    """

    max_batch_size: int = 32
    max_speculation_length: int = 8
    max_copied_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Bucket:
    """Batch sizes batch_min..batch_max, both included, that share one choice."""

    index: int
    batch_min: int
    batch_max: int


def default_buckets(max_batch_size: int) -> tuple[Bucket, ...]:
    """Buckets 1, 2, 3-4, 5-8, 9-16, ... up to max_batch_size; the last one is cut there."""
    buckets: list[Bucket] = []
    low = high = 1
    while low <= max_batch_size:
        buckets.append(Bucket(len(buckets), low, min(high, max_batch_size)))
        low, high = high + 1, high * 2
    return tuple(buckets)


class StepObservation(NamedTuple):  # a tuple: on the path of every report, and the quickest to make and to transpose
    """One decoding step that may teach, or several of one worker that were alike and close together.

    batch_size: rows; speculation_length: length used; latency_s: whole step.
    accepted_histogram[j]: rows whose accepted run was exactly j, j = 0..speculation_length, summing to batch_size.
    teaches_latency, teaches_acceptance: False where a flag of the report forbids it (a catch-up step says nothing
    about latency, for example).
    by_class: (class of request, its histogram) for the classes in the batch, adding up to accepted_histogram; empty where
    the worker does not tell them apart.
    num_steps: how many steps it stands for. latency_s is their geometric mean then, mean_context_length their mean, and
    histograms are sums: they add up to batch_size x num_steps.
    copying: what copying did, where the plan copies and other flags leave it to teach; the rest teaches neither latency nor
    acceptance then.
    read: (match, tokens, right ones) of output that was read since the worker told it last, whatever its plans: how many
    stood behind a match of so many tokens, and how many of those a copy would have been right about.
    draft_prompt_s: that the draft model was fed prompts for since the worker told it last.
    reviews: of outputs that ended in it, some of them.
    num_new_rows: that sequences got as it began, and waited for it with their first tokens; summed over its steps.
    """

    batch_size: int
    speculation_length: int
    latency_s: float
    accepted_histogram: tuple[int, ...]
    mean_context_length: float = 0.0
    teaches_latency: bool = True
    teaches_acceptance: bool = True
    by_class: tuple[tuple[int, tuple[int, ...]], ...] = ()
    num_steps: int = 1
    copying: Copies | None = None
    read: tuple[tuple[int, int, int], ...] = ()
    draft_prompt_s: float = 0.0
    reviews: tuple[OutputReview, ...] = ()
    num_new_rows: int = 0

    @property
    def num_accepted(self) -> int:
        """Draft tokens of all rows that were accepted."""
        return sum(run * rows for run, rows in enumerate(self.accepted_histogram))

    @property
    def num_tokens(self) -> int:
        """That all rows put out."""
        copied = () if self.copying is None else self.copying.runs
        return sum(self.accepted_histogram) + self.num_accepted + sum(run.num_accepted * run.num_rows for run in copied)


@dataclass(frozen=True, slots=True)
class ProfileCell:
    """One measured cell of an offline profile: mean whole-step time at a batch size and length."""

    batch_size: int
    speculation_length: int
    step_s: float
    step_s_stderr: float = 0.0
    num_steps: int = 1
    mean_context_length: float = 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """An offline profile: step times of one context and survival of its pair.

    survival[i]: probability that draft tokens 0..i are all accepted; num_survival_rows[i]: rows behind it.
    as_prior: measured elsewhere, a starting point only.
    """

    cells: tuple[ProfileCell, ...]
    survival: tuple[float, ...]
    num_survival_rows: tuple[int, ...]
    as_prior: bool = False
    source: str = ""


@dataclass(frozen=True, slots=True)
class LengthEstimate:
    """What is believed about one length in one bucket.

    expected_tokens: per row and step, bonus included. interval: 95% of ms per token. bare_step_s: step_s without the
    shares of prompts that it bears.
    """

    speculation_length: int
    expected_tokens: float
    step_s: float
    ms_per_token: float
    ms_per_token_low: float
    ms_per_token_high: float
    bare_step_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The length believed best for one bucket, with what it was chosen over.

    plan: for workers that can copy, where one that does is believed to be better. bare_ms_per_token: without the shares of
    prompts, as the times of single steps are. best_within: the best length of those up to 0, 1, ..., where that is known.
    """

    bucket: Bucket
    speculation_length: int
    ms_per_token: float | None = None
    plan: Plan | None = None
    bare_ms_per_token: float | None = None
    best_within: tuple[int, ...] = ()

    def length_within(self, most: int) -> int:
        """The length for a worker that speculates so far at most."""
        if self.speculation_length <= most:
            return self.speculation_length
        return self.best_within[most] if self.best_within else most


@dataclass(frozen=True, slots=True)
class Decision:
    """A change of a bucket's choice, with both estimates and the reason, in words.

    plan, previous_plan: where rows copy, or did; the lengths are those of the draft model then. of_all: False for one that
    concerns workers only that were set apart.
    """

    context: ContextKey
    bucket: Bucket
    version: int
    previous_length: int | None
    speculation_length: int
    previous_ms_per_token: float | None
    ms_per_token: float | None
    reason: str
    previous_plan: Plan | None = None
    plan: Plan | None = None
    of_all: bool = True


@dataclass(frozen=True, slots=True)
class DriftEvent:
    """What was forgotten, and why. factor: "latency" or "acceptance" where a detector fired, statistic says how strongly;
    "reset" where the context's numbers had left what can be represented and it started anew; "worker" where one was found
    unlike the others.
    """

    context: ContextKey
    factor: str
    statistic: float
    detail: str


@dataclass(frozen=True, slots=True)
class Table:
    """The best length known for every bucket of a context."""

    version: int
    choices: tuple[Choice, ...]

    def choice_for(self, batch_size: int) -> Choice:
        """That of the bucket that holds batch_size; of the last bucket beyond it."""
        for choice in self.choices:
            if batch_size <= choice.bucket.batch_max:
                return choice
        return self.choices[-1]

    def length_for(self, batch_size: int) -> int:
        """Of that choice, for a worker whose limit is the context's."""
        return self.choice_for(batch_size).speculation_length


@dataclass(frozen=True, slots=True)
class Mix:
    """The few numbers by which a worker finds the best length for the classes of requests in its batch.

    bucket_ends: largest batch size of each bucket. step_s[bucket, length]: whole step, longer where hardly known.
    tokens[class, bucket, length]: expected per row and step, bonus included.
    """

    bucket_ends: tuple[int, ...]
    step_s: np.ndarray
    tokens: np.ndarray

    def length_for(self, rows: Sequence[int]) -> int:
        """The length with the most expected tokens per second for so many rows of each class. Worth keeping by `rows`."""
        bucket = min(bisect_left(self.bucket_ends, sum(rows)), len(self.bucket_ends) - 1)
        tokens = np.asarray(rows, dtype=float) @ self.tokens[: len(rows), bucket]
        return int((tokens / self.step_s[bucket]).argmax())


@dataclass(frozen=True, slots=True)
class Probe:
    """An exploratory length, or a plan that copies, for as many steps of one worker as it takes to show a plan's time."""

    probe_id: int
    bucket: Bucket
    speculation_length: int
    plan: Plan | None = None


@dataclass(slots=True)
class ObserveOutcome:
    """What a group of observations changed."""

    decisions: list[Decision] = field(default_factory=list)
    drift_events: list[DriftEvent] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LearnedRow:
    """One row of the learned table: what is believed and on how much evidence.

    num_steps: reports that told about this cell's time. observed_step_s: mean of what they said; num_reports_since: how
    many came since the newest of them. None without any.
    """

    bucket: Bucket
    estimate: LengthEstimate
    num_steps: int
    source: str  # "profile", "online" or "both"
    is_best: bool
    observed_step_s: float | None = None
    num_reports_since: int | None = None
