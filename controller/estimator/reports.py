"""A group of reports as arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from speclen.controller.estimator.acceptance import Parts
from speclen.controller.estimator.core import Limits, StepObservation
from speclen.controller.estimator.step_time import spans_of


class Reports:
    """batch, length, seconds, context, teaches_latency: [n]; spans: each worker and its place. See `parts` for the rest."""

    def __init__(self, steps: Sequence[StepObservation], workers: Sequence[str], limits: Limits) -> None:
        """Raises ValueError for steps beyond the limits."""
        self.workers, self.spans = workers, spans_of(workers)
        batch, length, seconds, self.histograms, context, times, accepts, self.by_class, copying = zip(
            *steps, strict=True
        )
        for name, values, most in (
            ("batch_size", batch, limits.max_batch_size),
            ("speculation_length", length, limits.max_speculation_length),
        ):
            if max(values) > most:
                raise ValueError(f"{name} {max(values)} is beyond the context's limit of {most}")
        self.batch, self.length, self.seconds = np.array(batch), np.array(length), np.array(seconds)
        self.context, self.teaches_latency = np.array(context), np.array(times)
        self.steps = steps
        self.copied = [at for at, told in enumerate(copying) if told is not None] if any(copying) else []
        self.judged = self.length * accepts  # positions that say something of acceptance

    def parts(self, positions: int, bands: np.ndarray) -> Parts:
        """Rows of one class in one report: how many reached and passed each position. bands: by batch size."""
        histograms, where = self.histograms, np.arange(len(self.batch))
        kinds = np.zeros(len(where), dtype=np.int64)
        if any(self.by_class):
            split = [
                (at, kind, histogram)
                for at, (whole, classes) in enumerate(zip(self.histograms, self.by_class, strict=True))
                for kind, histogram in classes or ((0, whole),)
            ]
            places, of_class, histograms = zip(*split, strict=True)
            where, kinds = np.array(places), np.array(of_class)
        batch = self.batch[where]
        padding = [(0,) * (positions + 1 - size) for size in range(positions + 2)]
        table = np.array([each + padding[len(each)] for each in histograms], dtype=float)
        # at_least[:, i]: rows with i or more accepted. Position i is judged in rows with i or more, below the length.
        at_least = table[:, ::-1].cumsum(axis=1)[:, ::-1]
        rows = np.empty((len(where), 2, positions))
        rows[:, 0], rows[:, 1] = at_least[:, :-1], at_least[:, 1:]
        rows *= np.arange(positions) < self.judged[where][:, None, None]
        workers = [self.workers[at] for at in where.tolist()]
        return Parts(rows, kinds, bands[batch], where, at_least[:, 0] / batch, workers)
