"""Samples of an offline profile, and their arithmetic: from single steps to cells and survival."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from speclen.records import Profile, ProfileCell, StepRecord

Key = tuple[int, int]  # batch size, speculation length
Step = tuple[float, float, int]  # latency_s, mean context length, number of its visit

ASSUMED_DEVIATION = 0.1  # relative standard deviation of a visit, for cells with few of them
LEAST_DEVIATION = 0.01  # so that a very steady cell is not taken for certain


def measured_cell(key: Key, steps: Sequence[Step]) -> ProfileCell:
    """The cell of at least one step. Medians, since a pause of the machine makes a step several times as long.

    Steps of one visit share sequences and state of the machine, so the standard error is that between visits.
    """
    latencies, contexts, visits = np.array(steps).T
    times = np.array([np.median(latencies[visits == visit]) for visit in np.unique(visits)])
    if len(times) < 3:
        mean, deviation = float(times.min()), ASSUMED_DEVIATION * float(times.min())
    else:
        mean = float(np.median(times))
        deviation = max(1.4826 * float(np.median(np.abs(times - mean))), LEAST_DEVIATION * mean)
    # The median's standard error is 1.25 times the mean's.
    return ProfileCell(*key, mean, 1.25 * deviation / len(times) ** 0.5, len(steps), float(contexts.mean()))


def survival(histograms: Mapping[int, Sequence[int]]) -> tuple[list[float], list[int]]:
    """Survival by draft position, and the sequences that reached each position, from accepted runs at any lengths.

    histograms[s][j]: sequences that accepted exactly j of s draft tokens. A run of s is censored there. Kaplan-Meier:
    survival[i] is the product of the acceptance rates of positions 0..i. A position that no sequence reached takes the rate
    of the one before; its count is 0.
    """
    longest = max(histograms, default=0)
    reached, accepted = np.zeros(longest, dtype=int), np.zeros(longest, dtype=int)
    for length, histogram in histograms.items():
        at_least = np.cumsum(np.asarray(histogram)[::-1])[::-1]  # at_least[j]: sequences with j or more
        reached[:length] += at_least[:length]
        accepted[:length] += at_least[1 : length + 1]
    shares: list[float] = []
    for count, rows in zip(accepted, reached, strict=True):
        shares.append(count / rows if rows else shares[-1] if shares else 0.0)
    return [float(value) for value in np.cumprod(shares)], [int(value) for value in reached]


@dataclass(slots=True)
class ProfileSamples:
    """Single steps by cell, and accepted runs by length.

    histograms[length][j]: sequences that accepted exactly j. elapsed_s: measuring time. largest_batch_size: set when larger
    ones did not fit in memory.
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

    def result(self) -> Profile:
        """The profile, of measured cells only."""
        cells = tuple(measured_cell(key, steps) for key, steps in sorted(self.steps.items()))
        values, rows = survival(self.histograms)
        return Profile(cells, tuple(values), tuple(rows))
