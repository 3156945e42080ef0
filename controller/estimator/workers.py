"""Workers of a context. They share evidence; one that differs from most of the others is isolated.

Every worker's errors are those of its steps compared with what is expected of all workers. A worker whose mean errors differ
from those of more than half of the others has another machine, other models, or a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp

import numpy as np

from speclen.controller.estimator.grid import MAX_ARMS, Array, Cells
from speclen.controller.estimator.settings import EstimatorSettings
from speclen.controller.estimator.step_time import LARGEST, Believed, Contrasts, Recent
from speclen.controller.estimator.tokens import Histograms, Ratios
from speclen.records import NUM_CLASSES, StepRecord, num_tokens_of

COMPARED = 64  # reports of a worker between two comparisons
MOST_COMPARED = 16  # others that it is compared with: those that reported last
EXPIRED = 20_000  # reports of others after which a worker without any has expired
SIGNIFICANT = 3.0  # standard deviations


@dataclass(eq=False)
class Worker:
    """State of one worker: its newest samples, its exploration budget, and how it differs from the others.

    batch_size: of its newest step. spare: exploration budget, in steps. is_probing: in the steps of a probe and in the
    slow ones after it. waiting: reports not yet learned from. time_errors: of contrasts by arm, weighted, and their
    weight, [2, arms]; tokens: of steps that speculated, by class: generated, expected, and how many requests, [3, classes].
    """

    recent: Recent = field(default_factory=Recent)
    num_reports: int = 0
    compared_at: int = 0
    last_seen: int = 0
    batch_size: int = 0
    spare: float = 0.0
    is_probing: bool = False
    waiting: list[StepRecord] = field(default_factory=list)
    time_errors: Array = field(default_factory=lambda: np.zeros((2, MAX_ARMS)))
    tokens: Array = field(default_factory=lambda: np.zeros((3, NUM_CLASSES)))

    def add_times(self, contrasts: Contrasts, cells: Cells, believed: Believed, s: EstimatorSettings) -> None:
        """Compare contrasts with what is expected of all workers."""
        known, weights, differences = contrasts
        places = cells.places[known]
        by_arm = weights @ (places[:, None] == np.arange(MAX_ARMS))
        errors = np.clip(differences - weights @ believed.theta[known], -LARGEST, LARGEST)
        squares = by_arm**2
        self.time_errors *= exp(-float(np.minimum(squares.sum(axis=1), 1.0).sum()) / s.memory)
        self.time_errors += errors @ by_arm, squares.sum(axis=0)

    def add_tokens(self, histograms: Histograms, ratios: Ratios, num_requests: float, s: EstimatorSettings) -> None:
        """Compare generated tokens with those that are expected of all workers."""
        total = sum(sum(histogram) for _, histogram in histograms.values())
        self.tokens *= exp(-num_requests / s.long_memory)
        for (kind, length, ngram), (_, histogram) in histograms.items():
            rows = sum(histogram)
            expected = rows * float(ratios.expected[kind, length, int(ngram)])
            self.tokens[:, kind] += num_tokens_of(histogram), expected, num_requests * rows / max(total, 1)

    def errors(self, noise: float, s: EstimatorSettings) -> tuple[np.ndarray, np.ndarray]:
        """Mean log errors by arm and by class, and their variance, [arms + classes] each."""
        error, weight = self.time_errors
        tokens, expected, requests = self.tokens
        mean = np.append(error / (weight + 1e-9), np.log((tokens + 1.0) / (expected + 1.0)))
        return mean, np.append(noise / (weight + 1e-9), s.request_sd**2 / (requests + 1e-9))


def difference(worker: Worker, others: Sequence[Worker], is_isolated: bool, noise: float, s: EstimatorSettings) -> str:
    """Name the parts in which a worker differs from more than half of the others; "" if there are none.

    An isolated worker differs until there is enough evidence that it agrees.
    """
    mean, variance = worker.errors(noise, s)
    disagree = np.zeros(2, int)
    for other in others:
        its_mean, its_variance = other.errors(noise, s)
        apart, spread = np.abs(mean - its_mean), SIGNIFICANT * np.sqrt(variance + its_variance)
        beyond = apart > s.worker_difference + spread
        if is_isolated:
            sure = spread < s.worker_difference
            beyond |= (sure & (apart > s.worker_difference)) | (sure.sum() < 2)
        disagree += beyond[:MAX_ARMS].any(), beyond[MAX_ARMS:].any()
    parts = zip(("step times", "accepted tokens"), (2 * disagree > len(others)).tolist(), strict=True)
    return " and ".join(part for part, is_apart in parts if is_apart)
