"""How many draft tokens the target accepts: a property of the pair of models and of the requests, not of the device.

A step at length s tells about positions 1..s only, and only about rows whose earlier positions were accepted. So rows that
reached a position and rows that passed it are counted (Kaplan and Meier's estimator: cutting runs off at s does no
harm), three times: for everybody, by class of request (greedy, cool, hot), and by class and band of load. Each level is
drawn towards the one above it, the first towards a profile. No law of decay is assumed: a position that was never drafted
follows the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.heard import Heard
from speclen.controller.estimator.plans.reviews import STEPS, TAUGHT_PRIOR, Reviews
from speclen.controller.estimator.times.change import Change

# Before anything is known: acceptance of the first position, a common value for a useful draft, and of each further one
# relative to the one before.
COLD_ACCEPTANCE, COLD_RATIO = 0.7, 0.98
# Rows that the level above counts for: profile or previous position in the shared counts, those in a class, that in a band.
PRIOR_ROWS, CLASS_PRIOR_ROWS, BAND_PRIOR_ROWS = 40.0, 40.0, 10.0
# Reports of a class at a load, with draft tokens, after which their counts have faded to 1/e: one that is idle forgets
# nothing. Jumps are the detector's business.
MEMORY_REPORTS = 100.0
# A change is a sum of (|z| - slack) above the threshold; then this share of the counts is kept, and most this many rows.
SLACK, THRESHOLD, LARGEST_Z = 0.5, 9.0, 4.0
KEPT_SHARE, KEPT_ROWS = 0.05, 20.0
# Rows beyond this were never counted.
MOST_COUNT = 1e15
# Classes of requests that a report may tell apart: greedy, cool, hot. Reports that don't are all of the first.
NUM_CLASSES = 3
# Requests are easy or hard and stay in the batch for many steps: variance of accepted tokens over that of independent rows.
DISPERSION = 3.0


def band_of(batch_size: int) -> int:
    """Band of load: 1 -> 0, 2 -> 1, 3-4 -> 2, 5-8 -> 3, ..."""
    return (batch_size - 1).bit_length()


class Parts(NamedTuple):
    """The rows of one class in one report, [p] of them.

    rows: how many reached and passed each position, [p, 2, positions]. kinds: class. bands: of the whole batch.
    report: which report it belongs to. share: of the batch, over its steps. workers, sender: who sent reports, and which of
    them sent this one. steps: how many.
    """

    rows: FloatArray
    kinds: np.ndarray
    bands: np.ndarray
    report: np.ndarray
    share: FloatArray
    workers: Sequence[str]
    sender: np.ndarray
    steps: FloatArray


class Judged(NamedTuple):
    """Accepted tokens of each part, how many were expected, and their variance if rows were independent, all [p]."""

    accepted: FloatArray
    expected: FloatArray
    variance: FloatArray


class Acceptance:
    """Acceptance by class, band and position of one pair. Position 0 is the first draft token.

    rows: how many reached and passed each position, fading, [classes, bands, 2, positions]. Sums of it are counts of a class
    and of everybody, to which those of a band are drawn. reviews: of whole outputs, to which expected tokens are drawn.
    reviewed: what those say per token, as `Reviews.per_token`; None before the first.
    """

    STATE = ("rows", "ratios", "first", "detectors", "heard", "reviews")

    def __init__(self, num_positions: int, num_bands: int, num_classes: int = 1) -> None:
        self.first = COLD_ACCEPTANCE
        self.ratios = np.full(num_positions, COLD_RATIO)
        self.rows = np.zeros((num_classes, num_bands, 2, num_positions))
        self.detectors = [Change(SLACK, THRESHOLD) for _ in range(num_classes)]
        self.heard = Heard()
        self.reviews = Reviews(num_positions, num_classes)
        self.reviewed: FloatArray | None = None
        self.version = 0  # grows with every change
        self.renew()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Classes, bands, positions."""
        classes, bands, _, positions = self.rows.shape
        return classes, bands, positions

    @property
    def sound(self) -> bool:
        """Whether counts are counts and shares are shares; NaN is neither."""
        counts, tokens, most = self.rows.reshape(-1), self.tokens.reshape(-1), self.shape[2] + 1.0 + 1e-6
        least, largest = np.minimum.reduce, np.maximum.reduce
        few = counts.size == 0 or bool(least(counts) >= 0.0 and largest(counts) < MOST_COUNT)
        return few and self.reviews.sound and bool(least(tokens) >= 1.0 and largest(tokens) <= most)

    def extend(self, num_positions: int, num_bands: int) -> None:
        """Make room for longer lengths and larger batches; never shrinks."""
        _, bands, positions = self.shape
        more, higher = (0, max(0, num_positions - positions)), (0, max(0, num_bands - bands))
        self.ratios = np.append(self.ratios, np.full(more[1], COLD_RATIO))
        self.rows = np.pad(self.rows, ((0, 0), higher, (0, 0), more))
        self.reviews = self.reviews.extended(self.shape[2])
        self.renew()

    def seed(self, survival: tuple[float, ...], num_rows: tuple[int, ...]) -> None:
        """Take a profile's survival as the prior: its first acceptance and the ratios between positions.

        Positions that fewer than 20 rows reached keep the last ratio: a few rows say nothing.
        """
        before, survived = 0.0, 1.0
        for at, (value, rows) in enumerate(zip(survival[: len(self.ratios)], num_rows, strict=False)):
            if rows * survived < 20.0 or survived <= 0.0:
                break
            acceptance = min(max(value / survived, 0.02), 0.98)
            if at == 0:
                self.first = acceptance
            else:
                self.ratios[at:] = min(max(acceptance / before, 0.5), 1.25)
            before, survived = acceptance, value
        self.renew()

    def judge(self, parts: Parts) -> Judged:
        """Accepted tokens of each part, how many were expected, and their variance if rows were independent."""
        acceptance = self.acceptance[parts.kinds, parts.bands]
        expected = parts.rows[:, 0] * acceptance
        total = np.add.reduce
        return Judged(total(parts.rows[:, 1], 1), total(expected, 1), total(expected * (1.0 - acceptance), 1))

    def learn(self, parts: Parts, judged: Judged, weights: FloatArray) -> float:
        """Learn from a group that was judged before; returns the detector's statistic if one fired, else 0.

        Its sign: rose or fell. weights: what each part counts for.
        """
        gone = self.heard.note(parts.workers)
        for detector in self.detectors if gone else ():
            detector.drop(gone)
        drafted = judged.variance > 0.0
        fired = self._detect(parts, judged, drafted.nonzero()[0])
        classes, bands, _, _ = self.rows.shape
        # What each part counts for in its class and band, [classes x bands, parts].
        say = np.zeros((classes * bands, len(weights)))
        say[parts.kinds * bands + parts.bands, np.arange(len(weights))] = weights * drafted
        self.rows *= np.exp(say @ parts.steps / -MEMORY_REPORTS).reshape(classes, bands, 1, 1)
        self.rows += (say @ parts.rows.reshape(len(weights), -1)).reshape(self.rows.shape)
        if self.reviews.num_outputs:
            self.reviews.pass_by(np.bincount(parts.kinds, parts.share * weights, classes).astype(float))
        self.renew()
        return fired

    def _detect(self, parts: Parts, judged: Judged, drafted: np.ndarray) -> float:
        """Two-sided sums, by class, of how far accepted tokens lie from what was expected; returns what one found, or 0."""
        if not len(drafted):
            return 0.0
        accepted, expected, variance = np.array(judged)[:, drafted]
        surprise = (accepted - expected) / np.sqrt(DISPERSION * np.maximum(variance, 1e-6))
        z = np.minimum(np.maximum(surprise, -LARGEST_Z), LARGEST_Z).tolist()
        kinds, senders, fired = parts.kinds[drafted], parts.sender[drafted], 0.0
        same = kinds + self.rows.shape[0] * senders  # neighbours of one class and sender are judged together
        ends = [*((same[1:] != same[:-1]).nonzero()[0] + 1).tolist(), len(z)]
        start = 0
        for end in ends:
            kind = int(kinds[start])
            found = self.detectors[kind].add(parts.workers[senders[start]], z[start:end])
            if found:
                fired = found
                self._forget(kind)
            start = end
        return fired

    def forget_all(self) -> None:
        """Keep a few rows of every class: some of what was counted was not true."""
        for kind in range(self.shape[0]):
            self._forget(kind)
            self.reviews.forget(kind)
        self.renew()

    def _forget(self, kind: int) -> None:
        """Keep a few rows of what was counted before a class changed."""
        rows = self.rows[kind]
        rows *= np.minimum(KEPT_SHARE, KEPT_ROWS / np.maximum(rows[:, :1, :1], 1.0))

    def renew(self) -> None:
        """Bring acceptance[class, band, position] and tokens[class, band, length] up to date with the counts."""
        by_class = np.add.reduce(self.rows, 1)
        self.everybody, prior = np.add.reduce(by_class, 0), self.first
        shared: list[float] = []
        for reached, passed, ratio in zip(*self.everybody.tolist(), self.ratios.tolist(), strict=True):
            if shared:
                prior = min(max(shared[-1] * ratio, 0.02), 0.98)
            shared.append((passed + PRIOR_ROWS * prior) / (reached + PRIOR_ROWS))
        self.shared = np.array(shared)
        of_class = _drawn(by_class, CLASS_PRIOR_ROWS, self.shared)
        self.acceptance = _drawn(self.rows, BAND_PRIOR_ROWS, of_class[:, None])
        survival = np.ones((*self.acceptance.shape[:2], len(shared) + 1))
        np.multiply.accumulate(self.acceptance, 2, out=survival[:, :, 1:])
        self.tokens = np.add.accumulate(survival, 2)
        self.reviewed = None
        if self.reviews.num_outputs:
            passed = np.multiply.accumulate(of_class, 1)
            taught = 1.0 / np.hstack([np.ones((len(passed), 1)), 1.0 + np.add.accumulate(passed, 1)])
            self.reviewed = self.reviews.per_token(taught)
            seen = self.reviews.outputs[:, None, None]
            steps = seen * self.reviewed[:, None, : self.reviews.num_lengths, STEPS] + TAUGHT_PRIOR / self.tokens
            self.tokens = np.maximum((seen + TAUGHT_PRIOR) / steps, 1.0)
        self.version += 1

    def of_band(self) -> FloatArray:
        """Acceptance of all requests together, [bands, positions]."""
        return _drawn(self.rows.sum(axis=0), BAND_PRIOR_ROWS, self.shared)

    def log_tokens_variance(self, kind: int, band: int) -> FloatArray:
        """Variance of log tokens at every length, by the delta method."""
        acceptance = self.acceptance[kind, band]
        shared = PRIOR_ROWS + self.everybody[0]
        rows = self.rows[kind, band, 0] + BAND_PRIOR_ROWS * shared / (shared + BAND_PRIOR_ROWS)
        variance = DISPERSION * acceptance * (1.0 - acceptance) / rows
        lower = np.tril(np.repeat(acceptance.cumprod()[:, None], len(acceptance), axis=1))
        gain = lower.cumsum(axis=0) / acceptance / self.tokens[kind, band, 1:, None]
        return np.append(0.0, (gain**2 * variance).sum(axis=1))


def _drawn(rows: FloatArray, prior_rows: float, prior: FloatArray) -> FloatArray:
    """Share of the rows that reached a position that passed it, drawn towards a prior. rows: [..., 2, positions]."""
    share: FloatArray = (rows[..., 1, :] + prior_rows * prior) / (rows[..., 0, :] + prior_rows)
    return share
