"""What the engine and whoever chooses its speculation lengths say to each other. Plain values."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from speclen.worker.drafting.plan import Plan
from speclen.worker.reviewing.output import OutputReview


class StepFlag(enum.Enum):
    """Why a step must not teach; the same names as in control.proto."""

    FIRST_USE = "first_use"
    COMPILATION = "compilation"
    PREFILL = "prefill"
    CATCH_UP = "catch_up"
    MIXED_LENGTHS = "mixed_lengths"
    COPIED = "copied"
    CHANGED_LENGTH = "changed_length"


@dataclass(frozen=True, slots=True)
class LengthChoice:
    """The length to use for one step, and where it came from.

    decision_version: of the table; 0 for none. probe_id: set when the length is exploratory. plan: None where the length
    says it all, that is, where nothing is copied.
    """

    speculation_length: int
    decision_version: int = 0
    probe_id: int = 0
    plan: Plan | None = None

    @classmethod
    def of(cls, plan: Plan, decision_version: int = 0, probe_id: int = 0) -> LengthChoice:
        return cls(plan.draft_length, decision_version, probe_id, plan if plan.copies else None)


@dataclass(frozen=True, slots=True)
class CopiedRun:
    """Rows of a step that copied alike: num_proposed tokens after a match of match_length, num_accepted of them kept."""

    match_length: int
    num_proposed: int
    num_accepted: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What copying did in one step.

    num_searched_rows: whose text was looked at; those in no run had no match. num_drafting_rows: that the draft model
    drafted for. num_verified_tokens: that the rows were fed to the target, the pending ones included.
    """

    plan: Plan
    num_searched_rows: int
    num_drafting_rows: int
    num_verified_tokens: int
    runs: tuple[CopiedRun, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """One decoding step, as it is reported.

    batch_size: rows that decoded. speculation_length: length used, which is less than the one chosen when no row could
    have used more. latency_s: wall time of the whole step. accepted_histogram[j]: rows whose accepted run, less what the
    request's end cut off, was exactly j, j = 0..speculation_length. mean_context_length: tokens held per row before.
    class_histograms: the same by class of request, where a row is not greedy; they add up to accepted_histogram.
    copying: where the plan copies; the histogram is of the draft model's tokens alone then, 0 in rows that drafted none.
    read: (match, tokens, right ones) of output that was read since it was last told: how many tokens stood behind a match of
    so many, and of how many a copy would have been right. Empty in most steps, and where the chooser does not ask for it
    and nothing copies.
    draft_prompt_s: that the draft model was fed prompts for since the step before was told. reviews: of outputs that ended
    in the step, some of them, where the chooser asks for it; what reviewing took is no part of latency_s.
    num_new_rows: that sequences got as it began, which wait for it with their first tokens. num_idle_rows: for which nothing
    was drafted although others drafted.
    """

    batch_size: int
    speculation_length: int
    latency_s: float
    accepted_histogram: tuple[int, ...]
    mean_context_length: float
    flags: frozenset[StepFlag] = frozenset()
    copying: CopyReport | None = None
    class_histograms: tuple[tuple[int, tuple[int, ...]], ...] = ()
    read: tuple[tuple[int, int, int], ...] = ()
    draft_prompt_s: float = 0.0
    reviews: tuple[OutputReview, ...] = ()
    num_new_rows: int = 0
    num_idle_rows: int = 0


class LengthChooser(Protocol):
    """Chooses lengths and learns from steps. Both methods are called from the engine's thread and never block.

    One whose `reads_texts` is True is told what copies would have been right also of steps that copy nothing, which takes
    some microseconds a token; and of some outputs what every plan would have done with them (`worker/reviewing`).
    """

    def choice_for(
        self, batch_size: int, with_prompts: bool = False, rows_by_class: tuple[int, ...] = ()
    ) -> LengthChoice:
        """Called once for every decoding step; a probe is thereby used up.

        with_prompts: whether it feeds prompts along. rows_by_class: how many rows are greedy, cool and hot.
        """

    def report(self, choice: LengthChoice, result: StepResult) -> None:
        """Take note of the step that `choice` led to."""


@dataclass(slots=True)
class FixedPlan:
    """Always the same plan, and nothing is learned."""

    plan: Plan

    def choice_for(
        self, batch_size: int, with_prompts: bool = False, rows_by_class: tuple[int, ...] = ()
    ) -> LengthChoice:
        return LengthChoice.of(self.plan)

    def report(self, choice: LengthChoice, result: StepResult) -> None:
        """Forget it."""


@dataclass(slots=True)
class FixedLength:
    """Always the same length, and nothing is learned: for a worker on its own and for measurements."""

    speculation_length: int

    def choice_for(
        self, batch_size: int, with_prompts: bool = False, rows_by_class: tuple[int, ...] = ()
    ) -> LengthChoice:
        return LengthChoice(self.speculation_length)

    def report(self, choice: LengthChoice, result: StepResult) -> None:
        """Forget it."""
