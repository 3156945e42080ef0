"""A group of reports as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from speclen.controller.estimator.acceptance import Parts
from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.core import Limits, StepObservation
from speclen.controller.estimator.step_time import spans_of


class Reports:
    """batch, length, seconds, context, teaches_latency: [n]; spans: each worker and its place. See `parts` for the rest."""

    def __init__(self, steps: Sequence[StepObservation], workers: Sequence[str], limits: Limits) -> None:
        """Raises ValueError for steps beyond the limits."""
        self.workers, self.spans = workers, spans_of(workers)
        batch, length, seconds, self.histograms, context, times, accepts, self.by_class = zip(*steps, strict=True)
        for name, values, most in (
            ("batch_size", batch, limits.max_batch_size),
            ("speculation_length", length, limits.max_speculation_length),
        ):
            if max(values) > most:
                raise ValueError(f"{name} {max(values)} is beyond the context's limit of {most}")
        self.batch, self.length, self.seconds = np.array(batch), np.array(length), np.array(seconds)
        self.context, self.teaches_latency, self.accepts = np.array(context), np.array(times), np.array(accepts)

    def parts(self, positions: int) -> Parts:
        """Rows of one class in one report: how many reached and passed each position."""
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
        length, width = self.length[where], self.length[where] + 1
        last = width.cumsum()
        values = np.fromiter(chain.from_iterable(histograms), float, int(last[-1]))
        # Where each histogram goes in a table of equal rows: its own row, from the first column on.
        place = np.arange(len(values)) + np.repeat(np.arange(len(where)) * (positions + 2) - (last - width), width)
        table: FloatArray = np.zeros((len(where), positions + 2))
        table.reshape(-1)[place] = values
        # at_least[:, i]: rows with i or more accepted. Position i is judged in rows with i - 1 or more, up to the length.
        at_least = table[:, ::-1].cumsum(axis=1)[:, ::-1]
        inside = (np.arange(positions) < length[:, None]) & self.accepts[where, None]
        bands = np.ceil(np.log2(self.batch[where])).astype(np.int64)
        workers = [self.workers[at] for at in where.tolist()]
        rows = at_least[:, 0] / self.batch[where]
        return Parts(at_least[:, 1:-1] * inside, at_least[:, :-2] * inside, kinds, bands, where, rows, workers)
