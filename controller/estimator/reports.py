"""A group of reports as arrays; those of a fleet that is too large to tell its workers apart are added up before.

What a call of the estimator costs does not grow with the fleet then: one report per cell, however many sent any. A cell is
a batch size, a length, what may be learned from it and which classes of requests were told apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain

import numpy as np

from speclen.controller.estimator.acceptance import Parts
from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.core import Limits, StepObservation
from speclen.controller.estimator.times.steps import Spans

# Under which name merged reports are learned from: that of workers who are not known one by one.
OTHERS = ""

Cell = tuple[int, int, bool, bool, tuple[int, ...], int]


class Reports:
    """batch, length, seconds, context, teaches_latency, count: [n]; spans: each worker and its place.

    count: steps that a report stands for. See `parts` for the rest.
    """

    def __init__(self, steps: Sequence[StepObservation], workers: Sequence[str], spans: Spans, limits: Limits) -> None:
        """Raises ValueError for steps beyond the limits."""
        self.workers, self.spans = workers, spans
        batch, length, seconds, self.histograms, context, times, accepts, self.by_class, count, copying, read, *_ = zip(
            *steps, strict=True
        )
        for name, values, most in (
            ("batch_size", batch, limits.max_batch_size),
            ("speculation_length", length, limits.max_speculation_length),
        ):
            if max(values) > most:
                raise ValueError(f"{name} {max(values)} is beyond the context's limit of {most}")
        size = len(batch)
        self.batch, self.length = np.fromiter(batch, np.int64, size), np.fromiter(length, np.int64, size)
        self.seconds, self.context = np.fromiter(seconds, float, size), np.fromiter(context, float, size)
        self.teaches_latency = np.fromiter(times, bool, size)
        self.steps, self.places = steps, np.arange(len(steps))
        self.copied = [at for at, told in enumerate(copying) if told is not None] if any(copying) else []
        self.readers = [at for at, told in enumerate(read) if told] if any(read) else []
        self.count = np.fromiter(count, float, size)
        self.judged = self.length * np.fromiter(accepts, bool, size)  # positions that say something of acceptance

    def parts(self, positions: int, bands: np.ndarray) -> Parts:
        """Rows of one class in one report: how many reached and passed each position. bands: by batch size."""
        histograms, where, batch, judged, count = self.histograms, self.places, self.batch, self.judged, self.count
        kinds = np.zeros(len(where), dtype=np.int64)
        senders = np.repeat(np.arange(len(self.spans)), [span.stop - span.start for _, span in self.spans])
        if any(self.by_class):
            split = [
                (at, kind, histogram)
                for at, (whole, classes) in enumerate(zip(self.histograms, self.by_class, strict=True))
                for kind, histogram in classes or ((0, whole),)
            ]
            places, of_class, histograms = zip(*split, strict=True)
            where, kinds = np.array(places), np.array(of_class)
            batch, judged, count, senders = batch[where], judged[where], count[where], senders[where]
        sums, masks = _sums(positions)
        widths = np.fromiter(map(len, histograms), np.int64, len(where))
        table = np.zeros((len(where), positions + 1))
        table[np.arange(positions + 1) < widths[:, None]] = np.fromiter(chain.from_iterable(histograms), float)
        rows = (table @ sums).reshape(len(where), 2, positions) * masks[judged]
        share = np.add.reduce(table, 1) / batch
        return Parts(rows, kinds, bands[batch], where, share, [worker for worker, _ in self.spans], senders, count)


@cache
def _sums(positions: int) -> tuple[FloatArray, FloatArray]:
    """What turns runs into rows that reached and that passed each position.

    The matrix [runs, 2 x positions] that adds up runs of i or more and of more than i; by length of the step the positions
    that it says something of, [lengths, 1, positions].
    """
    runs, at = np.arange(positions + 1)[:, None], np.arange(positions)
    return np.hstack([runs >= at, runs > at]).astype(float), (at < runs).astype(float)[:, None]


def merged(observations: Iterable[StepObservation]) -> list[StepObservation]:
    """One observation per cell, cells in order of appearance.

    latency_s: the median over steps, so that neither a slow worker nor a lying one moves it.
    """
    cells: dict[Cell, list[StepObservation]] = {}
    for each in observations:
        kinds = tuple([kind for kind, _ in each.by_class])
        alone = len(cells) if each.copying is not None else -1  # no two steps that copied are alike
        cell = each.batch_size, each.speculation_length, each.teaches_latency, each.teaches_acceptance, kinds, alone
        cells.setdefault(cell, []).append(each)
    return [members[0] if len(members) == 1 else _sum(members) for members in cells.values()]


def _sum(members: Sequence[StepObservation]) -> StepObservation:
    num_steps = sum(each.num_steps for each in members)
    context = sum(each.mean_context_length * each.num_steps for each in members) / num_steps
    classes = zip(*(each.by_class for each in members), strict=True)
    return members[0]._replace(
        latency_s=median_s(members, num_steps),
        accepted_histogram=added([each.accepted_histogram for each in members]),
        mean_context_length=context,
        by_class=tuple((alike[0][0], added([runs for _, runs in alike])) for alike in classes),
        num_steps=num_steps,
        read=read_by(members),
        draft_prompt_s=sum(each.draft_prompt_s for each in members),
        num_new_rows=sum(each.num_new_rows for each in members),
        reviews=tuple(chain.from_iterable(each.reviews for each in members)),
    )


def read_by(members: Sequence[StepObservation]) -> tuple[tuple[int, int, int], ...]:
    """What all of them have read."""
    sums: dict[int, list[int]] = {}
    for match, tokens, right in chain.from_iterable(each.read for each in members):
        counts = sums.setdefault(match, [0, 0])
        counts[0] += tokens
        counts[1] += right
    return tuple((match, tokens, right) for match, (tokens, right) in sorted(sums.items()))


def median_s(members: Iterable[StepObservation], num_steps: int) -> float:
    """The median step time, each report counted as often as it stands for steps; between two, their geometric mean."""
    ordered = sorted((each.latency_s, each.num_steps) for each in members)
    before, below = 0, 0.0
    for latency_s, count in ordered:
        if 2 * before == num_steps:
            return math.sqrt(below * latency_s)
        before, below = before + count, latency_s
        if 2 * before > num_steps:
            break
    return below


def added(histograms: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The sum of histograms of one length."""
    return tuple(map(sum, zip(*histograms, strict=True)))


def typical(observation: StepObservation) -> StepObservation:
    """One step as it was on average among those of a report: for policies that know single steps alone.

    Its rows are shared out by largest remainders, so that the histograms sum to batch_size.
    """
    if observation.num_steps == 1:
        return observation
    rows = shared_out(observation.accepted_histogram, observation.batch_size)
    return observation._replace(accepted_histogram=rows, by_class=(), num_steps=1, read=(), reviews=())


def shared_out(runs: Sequence[int], total: int) -> tuple[int, ...]:
    """Whole numbers in proportion to runs that sum to total."""
    exact = [total * each / sum(runs) for each in runs]
    whole = [int(each) for each in exact]
    largest = sorted(range(len(runs)), key=lambda at: (whole[at] - exact[at], at))
    for at in largest[: total - sum(whole)]:
        whole[at] += 1
    return tuple(whole)
