"""What the engine and whoever chooses its speculation lengths say to each other. Plain values."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol


class StepFlag(enum.Enum):
    """Why a step must not teach; the same names as in control.proto."""

    FIRST_USE = "first_use"
    COMPILATION = "compilation"
    PREFILL = "prefill"
    CATCH_UP = "catch_up"
    MIXED_LENGTHS = "mixed_lengths"
    CHANGED_LENGTH = "changed_length"


@dataclass(frozen=True, slots=True)
class LengthChoice:
    """The length to use for one step, and where it came from.

    decision_version: of the table; 0 for none. probe_id: set when the length is exploratory.
    """

    speculation_length: int
    decision_version: int = 0
    probe_id: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """One decoding step, as it is reported.

    batch_size: rows that decoded. speculation_length: length used, which is less than the one chosen when no row could
    have used more. latency_s: wall time of the whole step. accepted_histogram[j]: rows whose accepted run, less what the
    request's end cut off, was exactly j, j = 0..speculation_length. mean_context_length: tokens held per row before.
    """

    batch_size: int
    speculation_length: int
    latency_s: float
    accepted_histogram: tuple[int, ...]
    mean_context_length: float
    flags: frozenset[StepFlag] = frozenset()


class LengthChooser(Protocol):
    """Chooses lengths and learns from steps. Both methods are called from the engine's thread and never block."""

    def choice_for(self, batch_size: int, with_prompts: bool = False) -> LengthChoice:
        """Called once for every decoding step; a probe is thereby used up. with_prompts: whether it feeds prompts along."""

    def report(self, choice: LengthChoice, result: StepResult) -> None:
        """Take note of the step that `choice` led to."""


@dataclass(slots=True)
class FixedLength:
    """Always the same length, and nothing is learned: for a worker on its own and for measurements."""

    speculation_length: int

    def choice_for(self, batch_size: int, with_prompts: bool = False) -> LengthChoice:
        return LengthChoice(self.speculation_length)

    def report(self, choice: LengthChoice, result: StepResult) -> None:
        """Forget it."""
