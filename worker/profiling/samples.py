"""Samples of a profile, summarised at its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from speclen.records import ProfileCell, StepRecord
from speclen.worker.profiling.stats import Key, Step, measured_cell, survival


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """An offline profile.

    cells: measured ones only. survival[i]: probability that draft tokens 0..i are all accepted, from num_survival_rows[i]
    rows. elapsed_s: measuring time.
    largest_batch_size: set when larger ones did not fit in memory.
    """

    cells: tuple[ProfileCell, ...]
    survival: tuple[float, ...]
    num_survival_rows: tuple[int, ...]
    elapsed_s: float
    largest_batch_size: int | None = None


@dataclass(slots=True)
class ProfileSamples:
    """Single steps by cell, and accepted runs by length.

    histograms[length][j]: sequences that accepted exactly j.
    """

    steps: dict[Key, list[Step]] = field(default_factory=dict)
    histograms: dict[int, list[int]] = field(default_factory=dict)
    elapsed_s: float = 0.0
    num_rounds: int = 0
    largest_batch_size: int | None = None

    def add(self, step: StepRecord) -> None:
        """Add one unflagged step."""
        length = step.arm.speculation_length
        key = (step.batch_size, length)
        self.steps.setdefault(key, []).append((step.latency_s, step.mean_context_length, self.num_rounds))
        counts = self.histograms.setdefault(length, [0] * (length + 1))
        for run, rows in enumerate(step.accepted_histogram):
            counts[run] += rows

    def result(self) -> ProfileResult:
        values, rows = survival(self.histograms)
        return ProfileResult(
            cells=tuple(measured_cell(key, steps) for key, steps in sorted(self.steps.items())),
            survival=tuple(values),
            num_survival_rows=tuple(rows),
            elapsed_s=self.elapsed_s,
            largest_batch_size=self.largest_batch_size,
        )
