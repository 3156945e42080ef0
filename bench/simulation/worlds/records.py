"""Values that simulated workers and learners exchange."""

from __future__ import annotations

from typing import NamedTuple, Protocol

CHANGED_LENGTH, FIRST_USE, PREFILL, CATCH_UP = "changed_length", "first_use", "prefill", "catch_up"


class Arm(NamedTuple):
    """Draft tokens of the draft model, and True if sequences with an n-gram match propose that instead."""

    draft_length: int
    ngram: bool = False


class EvaluatedOutput(NamedTuple):
    """A finished output, one byte per token position, as if that token were the next.

    matches: length of the n-gram match; proposed, copied: n-gram tokens proposed and right; drafted: 1 if the draft
    model is right about this token.
    """

    request_class: int
    matches: bytes
    proposed: bytes
    copied: bytes
    drafted: bytes


class Record(NamedTuple):
    """One decoding step as a worker reports it.

    accepted_histogram[j]: sequences that accepted exactly j tokens of the draft model. flags: reasons why latency_s is
    not a usable sample; the histogram always is. probe_id: 0 unless exploratory, the same in all steps of a probe.
    class_histograms: (request class, histogram), empty where classes are not told. ngram_runs: (match length, proposed,
    accepted, number of sequences). outputs: finished in this step and evaluated.
    """

    batch_size: int
    arm: Arm
    latency_s: float
    accepted_histogram: tuple[int, ...]
    mean_context_length: float
    flags: tuple[str, ...]
    probe_id: int
    num_drafting_rows: int
    num_verified_tokens: int
    class_histograms: tuple[tuple[int, tuple[int, ...]], ...] = ()
    ngram_runs: tuple[tuple[int, int, int, int], ...] = ()
    outputs: tuple[EvaluatedOutput, ...] = ()


class Learner(Protocol):
    """An estimator under test. Its answers may change only in `observe`."""

    def observe(self, records: list[Record]) -> None:
        """Learn from a group of steps, oldest first."""

    def arm_for(self, batch_size: int) -> Arm:
        """Select the arm for steps of this batch size."""

    def probe_for(self, batch_size: int) -> tuple[Arm, int] | None:
        """Return an arm to explore and for how many steps, or None. Asked after every group of reports."""


class Constant:
    """A learner that always selects one arm."""

    def __init__(self, arm: Arm) -> None:
        self.arm = arm

    def observe(self, records: list[Record]) -> None:
        """Learn nothing."""

    def arm_for(self, batch_size: int) -> Arm:
        """Select the arm."""
        return self.arm

    def probe_for(self, batch_size: int) -> None:
        """Explore nothing."""
