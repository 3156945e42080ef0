"""How many draft tokens the target accepts: a property of the pair of models and of the requests, not of the device.

A step at length s tells about positions 1..s only, and only about rows whose earlier positions were accepted. So rows that
reached a position and rows that passed it are counted (Kaplan and Meier's estimator: cutting runs off at s does no
harm), three times: for everybody, by class of request (greedy, cool, hot), and by class and band of load. Each level is
drawn towards the one above it, the first towards a profile. No law of decay is assumed: a position that was never drafted
follows the one before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.change import MOST_WITNESSES, Change

# Before anything is known: acceptance of the first position, a common value for a useful draft, and of each further one
# relative to the one before.
COLD_ACCEPTANCE, COLD_RATIO = 0.7, 0.98
# Rows that the level above counts for: profile or previous position in the shared counts, those in a class, that in a band.
PRIOR_ROWS, CLASS_PRIOR_ROWS, BAND_PRIOR_ROWS = 40.0, 40.0, 40.0
# Reports after which counts have faded to 1/e. Of a class and of a band only reports with such rows that drafted count, so
# one that is idle forgets nothing meanwhile. Any memory from 300 to 1500 is as good: jumps are the detector's business.
MEMORY_REPORTS, CLASS_MEMORY_REPORTS, BAND_MEMORY_REPORTS = 600.0, 200.0, 60.0
# A change is a sum of (|z| - slack) above the threshold; then this share of the counts is kept, and most this many rows.
SLACK, THRESHOLD, LARGEST_Z, MOST_SURPRISE = 0.5, 9.0, 4.0, 40.0
KEPT_SHARE, KEPT_ROWS = 0.05, 20.0
# Requests are easy or hard and stay in the batch for many steps, so neighbouring surprises agree. Their long-run variance
# relative to independent rows' is tracked (start: recorded traffic shows 3 to 10) and taken out; memory in reports.
DISPERSION_START, DISPERSION_MOST, DISPERSION_MEMORY = 3.0, 4.0, 400.0
# Rows beyond this were never counted.
MOST_COUNT = 1e15
# Surprises are summed over about 1 / (1 - this) reports to see their long-run variance.
AGREEMENT = 0.9


def band_of(batch_size: int) -> int:
    """Band of load: 1 -> 0, 2 -> 1, 3-4 -> 2, 5-8 -> 3, ..."""
    return (batch_size - 1).bit_length()


class Parts(NamedTuple):
    """The rows of one class in one report, [p] of them.

    passed, reached: rows whose position was accepted, was judged, [p, positions]. kinds: class. bands: of the whole batch.
    report: which report it belongs to. share: of the batch. workers: who sent it.
    """

    passed: FloatArray
    reached: FloatArray
    kinds: np.ndarray
    bands: np.ndarray
    report: np.ndarray
    share: FloatArray
    workers: Sequence[str]


class Judged(NamedTuple):
    """Accepted tokens of each part, how many were expected, and their variance if rows were independent, all [p]."""

    accepted: FloatArray
    expected: FloatArray
    variance: FloatArray


class Acceptance:
    """Acceptance by class, band and position of one pair. Position 0 is the first draft token."""

    COUNTS = ("reached", "passed", "class_reached", "class_passed", "band_reached", "band_passed")
    STATE = (*COUNTS, "ratios", "first", "detectors", "agreeing", "dispersion")

    def __init__(self, num_positions: int, num_bands: int, num_classes: int = 1) -> None:
        self.first = COLD_ACCEPTANCE
        self.ratios = np.full(num_positions, COLD_RATIO)
        self.reached, self.passed = np.zeros((2, num_positions))
        self.class_reached, self.class_passed = np.zeros((2, num_classes, num_positions))
        self.band_reached, self.band_passed = np.zeros((2, num_classes, num_bands, num_positions))
        self.detectors = [Change(SLACK, THRESHOLD) for _ in range(num_classes)]
        self.agreeing: dict[str, float] = {}  # by class and worker, fading sum of surprises
        self.dispersion = np.full(num_classes, DISPERSION_START)
        self.version = 0  # grows with every change
        self.renew()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Classes, bands, positions."""
        classes, bands, positions = self.band_reached.shape
        return classes, bands, positions

    @property
    def rising(self) -> float:
        """How far the sums that look for a rise have come, of the class that rose most."""
        return max(detector.rising for detector in self.detectors)

    @property
    def sound(self) -> bool:
        """Whether counts are counts and shares are shares; NaN is neither."""
        counts = (getattr(self, name) for name in self.COUNTS)
        return (
            all(each.size == 0 or (each.min() >= 0.0 and each.max() < MOST_COUNT) for each in counts)
            and bool((self.tokens >= 1.0).all() and (self.tokens <= self.tokens.shape[2] + 1e-6).all())
            and bool(np.isfinite(self.dispersion).all())
        )

    def extend(self, num_positions: int, num_bands: int) -> None:
        """Make room for longer lengths and larger batches; never shrinks."""
        _, bands, positions = self.shape
        more, higher = max(0, num_positions - positions), max(0, num_bands - bands)
        if not more and not higher:
            return
        self.ratios = np.append(self.ratios, np.full(more, COLD_RATIO))
        for name in self.COUNTS:
            values = getattr(self, name)
            pads = [(0, 0)] * (values.ndim - 1) + [(0, more)]
            if name.startswith("band"):
                pads[1] = (0, higher)
            setattr(self, name, np.pad(values, pads))
        self.renew()

    def seed(self, survival: tuple[float, ...], num_rows: tuple[int, ...]) -> None:
        """Take a profile's survival as the prior: its first acceptance and the ratios between positions.

        Positions that fewer than 20 rows reached keep the last ratio: a few rows say nothing.
        """
        positions = self.shape[2]
        before, survived = 0.0, 1.0
        for at, (value, rows) in enumerate(zip(survival[:positions], num_rows, strict=False)):
            if rows * survived < 20.0 or survived <= 0.0:
                break
            acceptance = min(max(value / survived, 0.02), 0.98)
            if at == 0:
                self.first = acceptance
            else:
                self.ratios[at:] = min(max(acceptance / before, 0.5), 1.25)
            before, survived = acceptance, value
        self.renew()

    def learn(self, parts: Parts, judged: Judged, weights: FloatArray) -> float:
        """Learn from a group that was judged before; returns the detector's statistic if one fired, else 0.

        Its sign: rose or fell. weights: what each part counts for.
        """
        classes, bands, positions = self.shape
        fade = math.exp(-len(weights) / MEMORY_REPORTS)
        drafted = np.flatnonzero(judged.variance > 0.0)
        fired = self._detect(parts, judged, drafted.tolist()) if len(drafted) else 0.0
        passed, reached = parts.passed * weights[:, None], parts.reached * weights[:, None]
        self.reached = self.reached * fade + reached.sum(axis=0)
        self.passed = self.passed * fade + passed.sum(axis=0)
        if len(drafted):
            place = (parts.kinds * bands + parts.bands)[drafted]
            member = (place == np.arange(classes * bands)[:, None]).astype(float)
            visits = member.sum(axis=1)
            band_fade = np.exp(-visits / BAND_MEMORY_REPORTS)[:, None]
            class_fade = np.exp(-visits.reshape(classes, bands).sum(axis=1) / CLASS_MEMORY_REPORTS)[:, None]
            for counts, of_class, news in (
                (self.band_reached, self.class_reached, member @ reached[drafted]),
                (self.band_passed, self.class_passed, member @ passed[drafted]),
            ):
                flat = counts.reshape(-1, positions)
                flat *= band_fade
                flat += news
                of_class *= class_fade
                of_class += news.reshape(classes, bands, positions).sum(axis=1)
        self.renew()
        return fired

    def judge(self, parts: Parts) -> Judged:
        """Accepted tokens of each part, how many were expected, and their variance if rows were independent."""
        acceptance = self.acceptance[parts.kinds, parts.bands]
        expected = parts.reached * acceptance
        return Judged(parts.passed.sum(axis=1), expected.sum(axis=1), (expected * (1.0 - acceptance)).sum(axis=1))

    def _detect(self, parts: Parts, judged: Judged, drafted: list[int]) -> float:
        """Two-sided sums, by class, of how far accepted tokens lie from what was expected; returns what one found, or 0."""
        surprise = (judged.accepted - judged.expected) / np.sqrt(np.maximum(judged.variance, 1e-6))
        z, kinds, fired = np.clip(surprise, -MOST_SURPRISE, MOST_SURPRISE).tolist(), parts.kinds.tolist(), 0.0
        for (kind, worker), members in groupby(drafted, key=lambda at: (kinds[at], parts.workers[at])):
            mine = [z[at] for at in members]
            found = self.detectors[kind].add(worker, self._without_agreement(kind, worker, mine))
            if found:
                fired = found
                self._forget(kind)
        return fired

    def _without_agreement(self, kind: int, worker: str, surprises: list[float]) -> list[float]:
        """A worker's surprises in standard deviations; how much neighbouring ones agree is followed on the way."""
        key, spread, out = f"{kind} {worker}", float(self.dispersion[kind]), []
        agreeing = self.agreeing.get(key, 0.0)
        scale = 1.0 / math.sqrt(spread)
        for z in surprises:
            each = z * scale
            out.append(LARGEST_Z if each > LARGEST_Z else -LARGEST_Z if each < -LARGEST_Z else each)
            agreeing = AGREEMENT * agreeing + (LARGEST_Z if z > LARGEST_Z else -LARGEST_Z if z < -LARGEST_Z else z)
            spread += (agreeing * agreeing * (1.0 - AGREEMENT**2) - spread) / DISPERSION_MEMORY
        if key in self.agreeing or len(self.agreeing) < MOST_WITNESSES:
            self.agreeing[key] = agreeing
        self.dispersion[kind] = min(max(spread, 1.0), DISPERSION_MOST)
        return out

    def forget_all(self) -> None:
        """Keep a few rows of every class: some of what was counted was not true."""
        for kind in range(self.shape[0]):
            self._forget(kind)
        self.renew()

    def _forget(self, kind: int) -> None:
        """Keep a few rows of what was counted before a class changed."""
        for reached, passed in (
            (self.reached, self.passed),
            (self.class_reached[kind], self.class_passed[kind]),
            (self.band_reached[kind], self.band_passed[kind]),
        ):
            keep = np.minimum(KEPT_SHARE, KEPT_ROWS / np.maximum(reached[..., :1], 1.0))
            reached *= keep
            passed *= keep

    def renew(self) -> None:
        """Bring acceptance[class, band, position] and tokens[class, band, length] up to date with the counts."""
        shared: list[float] = []
        prior = self.first
        for passed, reached, ratio in zip(
            self.passed.tolist(), self.reached.tolist(), self.ratios.tolist(), strict=True
        ):
            if shared:
                prior = min(max(shared[-1] * ratio, 0.02), 0.98)
            shared.append((passed + PRIOR_ROWS * prior) / (reached + PRIOR_ROWS))
        self.shared = np.array(shared)
        self.of_class = (self.class_passed + CLASS_PRIOR_ROWS * self.shared) / (self.class_reached + CLASS_PRIOR_ROWS)
        self.acceptance = (self.band_passed + BAND_PRIOR_ROWS * self.of_class[:, None]) / (
            self.band_reached + BAND_PRIOR_ROWS
        )
        self.tokens = np.ones((*self.acceptance.shape[:2], self.acceptance.shape[2] + 1))
        np.cumsum(self.acceptance.cumprod(axis=2), axis=2, out=self.tokens[:, :, 1:])
        self.tokens[:, :, 1:] += 1.0
        self.version += 1

    def of_band(self) -> FloatArray:
        """Acceptance of all requests together, [bands, positions]."""
        passed, reached = self.band_passed.sum(axis=0), self.band_reached.sum(axis=0)
        together: FloatArray = (passed + BAND_PRIOR_ROWS * self.shared) / (reached + BAND_PRIOR_ROWS)
        return together

    def log_tokens_variance(self, kind: int, band: int) -> FloatArray:
        """Variance of log tokens at every length, by the delta method."""
        acceptance, positions = self.acceptance[kind, band], self.shape[2]
        shared = PRIOR_ROWS + self.reached
        rows = self.band_reached[kind, band] + BAND_PRIOR_ROWS * shared / (shared + BAND_PRIOR_ROWS)
        variance = self.dispersion[kind] * acceptance * (1.0 - acceptance) / rows
        lower = np.tril(np.broadcast_to(acceptance.cumprod()[:, None], (positions, positions)))
        gain = lower.cumsum(axis=0) / acceptance / self.tokens[kind, band, 1:, None]
        return np.append(0.0, (gain**2 * variance).sum(axis=1))
