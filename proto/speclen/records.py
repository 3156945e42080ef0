"""The values that worker, protocol, controller, store and benchmarks share, with one type for each concept.

Plain values without I/O: no torch, no gRPC, no SQL. Fields have the names of the messages in `control.proto` and of the
database's columns, so that conversions are mechanical.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Sequence
from itertools import count
from operator import mul
from typing import NamedTuple

NGRAM_MAX_TOKENS = 8  # of one n-gram (prompt-lookup) proposal
MAX_BATCH_SIZE, MAX_SPECULATION_LENGTH, MAX_EVALUATIONS = 4096, 64, 16  # the last: outputs in one report

_ARM = re.compile(r"\s*(?:(?P<plain>plain)|(?P<ngram>n-gram)(?:\s+else\s+draft\s+(?P<more>\d{1,2}))?"
                  r"|draft\s+(?P<drafted>\d{1,2}))\s*")  # fmt: skip


class Arm(NamedTuple):
    """Tokens that a step drafts, and from where; the controller selects an arm for each batch size.

    speculation_length: tokens that the draft model drafts per sequence, 0 to 64. ngram: sequences with an n-gram match
    propose the tokens that followed it instead, and the draft model drafts only for the others.
    """

    speculation_length: int = 0
    ngram: bool = False

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens that a sequence proposes in one step."""
        return max(self.speculation_length, NGRAM_MAX_TOKENS if self.ngram else 0)

    def within(self, limits: Limits) -> Arm:
        """The arm, or the nearest one within these limits."""
        return Arm(min(self.speculation_length, limits.max_speculation_length), self.ngram and limits.ngram)

    def __str__(self) -> str:
        """The arm in words: `plain`, `draft 3`, `n-gram`, or `n-gram else draft 3`. `parse_arm` reads them."""
        if not self.ngram:
            return f"draft {self.speculation_length}" if self.speculation_length else "plain"
        return f"n-gram else draft {self.speculation_length}" if self.speculation_length else "n-gram"


PLAIN = Arm()


def parse_arm(text: str) -> Arm:
    """Parse the words that `str` writes. Raises ValueError quoting them."""
    found = _ARM.fullmatch(text)
    length = int(found["drafted"] or found["more"] or 0) if found else 0
    if found is None or length > MAX_SPECULATION_LENGTH:
        known = "write plain, draft 3, n-gram, or n-gram else draft 3"
        raise ValueError(f"the arm {text.strip()!r} is unknown: {known}, with lengths up to {MAX_SPECULATION_LENGTH}")
    return Arm(length, bool(found["ngram"]))


class Limits(NamedTuple):
    """Largest batch size and speculation length of a worker, and whether it supports n-grams."""

    max_batch_size: int = 32
    max_speculation_length: int = 8
    ngram: bool = False

    def widened(self, other: Limits) -> Limits:
        """The smallest limits that contain both."""
        length = max(self.max_speculation_length, other.max_speculation_length)
        return Limits(max(self.max_batch_size, other.max_batch_size), length, self.ngram or other.ngram)

    def arms(self) -> list[Arm]:
        """Every arm within the limits: first without n-grams, then with."""
        kinds = (False, True) if self.ngram else (False,)
        return [Arm(length, ngram) for ngram in kinds for length in range(self.max_speculation_length + 1)]


class ContextKey(NamedTuple):
    """Everything that step times depend on. `pair`: the models alone."""

    target: str
    draft: str
    device: str
    dtype: str
    engine_fingerprint: str = ""

    @property
    def pair(self) -> tuple[str, str]:
        """Target and draft."""
        return (self.target, self.draft)

    def __str__(self) -> str:
        """The name of the context, as in the database's views."""
        engine = f" [{self.engine_fingerprint}]" if self.engine_fingerprint else ""
        return f"{self.target} + {self.draft} on {self.device}, {self.dtype}{engine}"


class RequestClass(enum.IntEnum):
    """Kinds of requests that differ most in acceptance. Values are indices of arrays; the protocol adds 1."""

    GREEDY = 0
    LOW_TEMPERATURE = 1  # up to 0.75
    HIGH_TEMPERATURE = 2


NUM_CLASSES = len(RequestClass)


class StepFlag(enum.Enum):
    """Reasons for which a step is not a usable sample, with the names of control.proto.

    The time of a flagged step is not learned from. Its accepted tokens are, except with MIXED_LENGTHS and UNKNOWN.
    """

    FIRST_USE = "first_use"  # first use of a shape: allocation, autotuning
    COMPILATION = "compilation"  # compilation or CUDA-graph capture
    PREFILL = "prefill"  # prefill in the same interval
    CATCH_UP = "catch_up"  # the draft model processed tokens of steps without it
    MIXED_LENGTHS = "mixed_lengths"  # a request set its own length
    CHANGED_ARM = "changed_arm"  # the arm changed, on an engine where steps overlap or a change takes time
    OVERLAP = "overlap"  # overlapping steps differ: the time between two results is not the time of one step
    UNKNOWN = "unknown"  # a flag of a newer worker


def num_tokens_of(accepted_histogram: Sequence[int]) -> int:
    """Tokens generated by the sequences of a histogram, bonus tokens included."""
    return sum(map(mul, accepted_histogram, count(1)))


class OutputEvaluation(NamedTuple):
    """Steps that every arm would have taken through one finished output (off-policy evaluation).

    The output does not depend on what was drafted, so one output evaluates all arms.
    num_output_tokens: tokens of the whole output except the first, which comes with the prefill. num_tokens: evaluated
    tokens, all or a contiguous part. The three lists are indexed by arm, in the order of the worker's `Limits.arms`, or are
    for plain decoding and n-grams alone. num_steps; num_drafted_steps: steps for which the draft model drafted;
    num_verified_tokens: tokens that the target verified, including the pending token of each step.
    """

    request_class: int
    num_output_tokens: int
    num_tokens: int
    num_steps: tuple[int, ...]
    num_drafted_steps: tuple[int, ...]
    num_verified_tokens: tuple[int, ...]


class StepRecord(NamedTuple):
    """One decoding step of a batch, as reported, stored and learned from.

    seq: 1, 2, 3, ... within an incarnation of a worker. batch_size: sequences that decoded. arm: the arm that ran; plain if
    no sequence could speculate. latency_s: wall time of the whole step. accepted_histogram[j]: number of sequences that
    accepted exactly j proposed tokens; the sum is batch_size without unobserved sequences. mean_context_length: mean number
    of tokens held per sequence before the step.
    decision_version: of the table that selected the arm; 0: none. flags: see StepFlag. probe_id: 0: none.
    class_histograms: pairs of a class in the batch and its histogram, adding up to accepted_histogram; empty if all
    sequences are greedy. num_drafted_sequences: sequences for which the draft model drafted. num_verified_tokens: tokens
    that the target processed. draft_prefill_s: seconds of draft-model prefill since the previous step. num_new_sequences:
    sequences admitted when the step began. evaluations: of some of the outputs that ended in the step. elapsed_s: wall time
    since the previous result, for engines whose latency_s uses another clock; 0: latency_s, or the engine was idle.
    """

    seq: int
    batch_size: int
    arm: Arm
    latency_s: float
    accepted_histogram: tuple[int, ...]
    mean_context_length: float = 0.0
    decision_version: int = 0
    flags: frozenset[StepFlag] = frozenset()
    probe_id: int = 0
    class_histograms: tuple[tuple[int, tuple[int, ...]], ...] = ()
    num_drafted_sequences: int = 0
    num_verified_tokens: int = 0
    draft_prefill_s: float = 0.0
    num_new_sequences: int = 0
    evaluations: tuple[OutputEvaluation, ...] = ()
    elapsed_s: float = 0.0

    @property
    def wall_s(self) -> float:
        """Wall time since the result of the previous step, or the step's own time if that is unknown."""
        return self.elapsed_s or self.latency_s

    @property
    def num_tokens(self) -> int:
        """Tokens generated by the sequences of the histogram."""
        return num_tokens_of(self.accepted_histogram)

    @property
    def num_unobserved_sequences(self) -> int:
        """Sequences whose accepted run is unknown; they are not in the histogram."""
        return self.batch_size - sum(self.accepted_histogram)

    @property
    def tokens_per_sequence(self) -> float:
        """Mean number of generated tokens per sequence of the histogram."""
        return self.num_tokens / sum(self.accepted_histogram)


class Choice(NamedTuple):
    """The arm in use at a batch range. ms_per_token: expected, per sequence; None while unknown."""

    batch_min: int
    batch_max: int
    arm: Arm
    ms_per_token: float | None = None


class Table(NamedTuple):
    """The arm in use at every batch size, ascending and without gaps. version: grows with every change of an arm."""

    version: int
    choices: tuple[Choice, ...]

    def arm_for(self, batch_size: int) -> Arm:
        """Arm for batch_size; larger sizes use the last batch range."""
        for choice in self.choices:
            if batch_size <= choice.batch_max:
                return choice.arm
        return self.choices[-1].arm


class Probe(NamedTuple):
    """An arm to run for num_steps consecutive steps of one worker at a batch range.

    is_trial: it belongs to a trial, and also runs in steps with prefill, which do not count.
    """

    probe_id: int
    batch_min: int
    batch_max: int
    arm: Arm
    num_steps: int = 3
    is_trial: bool = False


class Hold(NamedTuple):
    """An arm that a person holds at a batch range. arm: None: the arms of each worker's baseline."""

    batch_min: int
    batch_max: int
    arm: Arm | None

    def reason_against(self, limits: Limits) -> str:
        """The reason why a context with these limits cannot hold the arm, or ""."""
        if not 1 <= self.batch_min <= self.batch_max:
            return f"the batch range {self.batch_min}-{self.batch_max} is invalid: write the smaller size first, at least 1"
        if self.arm is not None and self.arm != self.arm.within(limits):
            return f"no worker of this context can run `{self.arm}`: its largest arm is `{limits.arms()[-1]}`"
        return ""


class Trial(NamedTuple):
    """A measured comparison of the learned arm with the baseline's at about one batch size.

    log_time: log of (step time of the learned arm / of the baseline's), by the wall clock. learned_tokens,
    learned_sequences: generated tokens, and the steps of sequences that they took. lost_s: expected cost of the trial in
    seconds; noise can make it negative. num_steps: steps at these batch sizes since the previous trial. is_baseline_used:
    True if the baseline was in use and the learned arm was tried.
    """

    batch_size: float
    learned: Arm
    baseline: Arm
    log_time: float
    learned_tokens: float
    learned_sequences: float
    baseline_tokens: float
    baseline_sequences: float
    lost_s: float = 0.0
    num_steps: int = 0
    is_baseline_used: bool = False

    @property
    def gain(self) -> float:
        """Tokens per second of the learned arm relative to the baseline, from this trial alone."""
        tokens = self.learned_tokens / self.learned_sequences * self.baseline_sequences / self.baseline_tokens
        return tokens * math.exp(-self.log_time)


class Decision(NamedTuple):
    """A change of the arm in use at a batch range, with both estimates of that moment and the reason.

    previous_arm: None for the first one. isolated: it concerns only workers that are isolated from the others.
    """

    context: ContextKey
    batch_min: int
    batch_max: int
    version: int
    previous_arm: Arm | None
    arm: Arm
    previous_ms_per_token: float | None
    ms_per_token: float | None
    reason: str
    isolated: bool = False


class DriftEvent(NamedTuple):
    """A detected change. factor: "acceptance", "worker" (isolated or rejoined) or "reset"."""

    context: ContextKey
    factor: str
    statistic: float
    detail: str


class ArmEstimate(NamedTuple):
    """One row of the learned table: the estimate of one cell.

    expected_tokens: per sequence and step, bonus token included. ms_per_token: per sequence, with a 95% interval.
    num_steps: usable samples, without forgetting. observed_step_s: mean time of the newest samples; None without any.
    source: "profile", "online", "both" or "prior". is_best: the arm is in use.
    """

    batch_min: int
    batch_max: int
    arm: Arm
    expected_tokens: float
    step_s: float
    ms_per_token: float
    ms_per_token_low: float
    ms_per_token_high: float
    num_steps: int
    observed_step_s: float | None
    source: str
    is_best: bool


class ProfileCell(NamedTuple):
    """Mean step time at one batch size and speculation length of an offline profile, without n-grams."""

    batch_size: int
    speculation_length: int
    step_s: float
    step_s_stderr: float = 0.0
    num_steps: int = 1
    mean_context_length: float = 0.0


class Profile(NamedTuple):
    """An offline profile: step times of one context and survival of its pair.

    survival[i]: probability that draft tokens 0..i are all accepted, non-increasing. num_survival_rows: samples of each.
    """

    cells: tuple[ProfileCell, ...]
    survival: tuple[float, ...] = ()
    num_survival_rows: tuple[int, ...] = ()
    source: str = ""
