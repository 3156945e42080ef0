"""How many draft tokens the target accepts: a property of the pair of models and of the requests, not of the device.

A step at length s tells about positions 1..s only, and only about rows whose earlier positions were accepted. So rows that
reached a position and rows that passed it are counted (Kaplan and Meier's estimator: cutting runs off at s does no
harm), three times: for everybody, by class of request (greedy, cool, hot), and by class and band of load. Each level is
drawn towards the one above it, the first towards a profile. No law of decay is assumed: a position that was never drafted
follows the one before it.
"""

from __future__ import annotations

import math
from itertools import compress
from typing import Any

import numpy as np

from controller.arrays import FloatArray
from controller.estimator.change import MOST_WITNESSES, Change

# Before anything is known: acceptance of the first position, a common value for a useful draft, and of each further one
# relative to the one before.
COLD_ACCEPTANCE, COLD_RATIO = 0.7, 0.98
# Rows that the level above counts for: profile or previous position in the shared counts, those in a class, that in a band.
PRIOR_ROWS, CLASS_PRIOR_ROWS, BAND_PRIOR_ROWS = 10.0, 40.0, 40.0
# Reports after which counts have faded to 1/e. Of a class and of a band only reports with such rows that drafted count, so
# one that is idle forgets nothing meanwhile. Any memory from 300 to 1500 is as good: jumps are the detector's business.
MEMORY_REPORTS, CLASS_MEMORY_REPORTS, BAND_MEMORY_REPORTS = 600.0, 400.0, 150.0
# A change is a sum of (|z| - slack) above the threshold; then this share of the counts is kept, and most this many rows.
SLACK, THRESHOLD, LARGEST_Z = 0.5, 9.0, 4.0
KEPT_SHARE, KEPT_ROWS = 0.05, 20.0
# Requests are easy or hard and stay in the batch for many steps, so neighbouring surprises agree. Their long-run variance
# relative to independent rows' is tracked (start: recorded traffic shows 3 to 10) and taken out; memory in reports.
DISPERSION_START, DISPERSION_MOST, DISPERSION_MEMORY = 3.0, 12.0, 400.0
# Surprises are summed over about 1 / (1 - this) reports to see their long-run variance.
AGREEMENT = 0.9


def band_of(batch_size: int) -> int:
    """Band of load: 1 -> 0, 2 -> 1, 3-4 -> 2, 5-8 -> 3, ..."""
    return (batch_size - 1).bit_length()


class Acceptance:
    """Acceptance by class, band and position of one pair. Position 0 is the first draft token."""

    STATE = ("ratios", "reached", "passed", "class_reached", "class_passed", "band_reached", "band_passed")

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
        self._estimate()

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
        """Whether all numbers can be represented."""
        return bool(np.isfinite(self.tokens).all() and np.isfinite(self.dispersion).all())

    def extend(self, num_positions: int, num_bands: int) -> None:
        """Make room for longer lengths and larger batches; never shrinks."""
        _, bands, positions = self.shape
        more, higher = max(0, num_positions - positions), max(0, num_bands - bands)
        if not more and not higher:
            return
        self.ratios = np.append(self.ratios, np.full(more, COLD_RATIO))
        for name in self.STATE[1:]:
            values = getattr(self, name)
            pads = [(0, 0)] * (values.ndim - 1) + [(0, more)]
            if name.startswith("band"):
                pads[1] = (0, higher)
            setattr(self, name, np.pad(values, pads))
        self._estimate()

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
        self._estimate()

    def learn(
        self,
        passed: FloatArray,
        reached: FloatArray,
        kinds: np.ndarray,
        bands: np.ndarray,
        weights: FloatArray,
        senders: list[str],
    ) -> float:
        """Learn from a group; returns the detector's statistic if one fired, else 0. Its sign: rose or fell.

        passed[n, i], reached[n, i]: rows of part n whose position i was accepted, was judged; a part is the rows of one
        class in one report. kinds[n], bands[n]: its class, the band of the whole batch, what
        it counts for, and who sent it.
        """
        judged = reached[:, 0] > 0.0 if reached.shape[1] else np.zeros(len(reached), dtype=bool)
        fade = math.exp(-len(passed) / MEMORY_REPORTS)
        if not judged.any():
            self.reached *= fade
            self.passed *= fade
            self._estimate()
            return 0.0
        passed, reached, kinds, bands = passed[judged], reached[judged], kinds[judged], bands[judged]
        fired = self._detect(passed, reached, kinds, bands, list(compress(senders, judged.tolist())))
        weighted = weights[judged, None]
        passed, reached = passed * weighted, reached * weighted
        self.reached = self.reached * fade + reached.sum(axis=0)
        self.passed = self.passed * fade + passed.sum(axis=0)
        classes, num_bands, positions = self.shape
        place = kinds * num_bands + bands
        member = (place == np.arange(classes * num_bands)[:, None]).astype(float)
        visits = member.sum(axis=1)
        new_reached, new_passed = member @ reached, member @ passed
        for rows, news, own in (
            (self.band_reached, new_reached, self.class_reached),
            (self.band_passed, new_passed, self.class_passed),
        ):
            flat = rows.reshape(-1, positions)
            flat *= np.exp(-visits / BAND_MEMORY_REPORTS)[:, None]
            flat += news
            own *= np.exp(-visits.reshape(classes, num_bands).sum(axis=1) / CLASS_MEMORY_REPORTS)[:, None]
            own += news.reshape(classes, num_bands, positions).sum(axis=1)
        self._estimate()
        return fired

    def _detect(
        self, passed: FloatArray, reached: FloatArray, kinds: np.ndarray, bands: np.ndarray, senders: list[str]
    ) -> float:
        """Two-sided sums, by class, of how far accepted tokens lie from what was expected."""
        accepted, expected, variance = self.judge(passed, reached, kinds, bands)
        surprise = (accepted - expected) / np.sqrt(np.maximum(variance, 1e-6))
        fired = 0.0
        for kind, z, sender in zip(kinds.tolist(), surprise.tolist(), senders, strict=True):
            clipped = min(max(z / math.sqrt(self.dispersion[kind]), -LARGEST_Z), LARGEST_Z)
            found = self.detectors[kind].add(sender, (clipped,))
            if found:
                fired = found
                self._forget(kind)
            key = f"{kind} {sender}"
            agreeing = AGREEMENT * self.agreeing.get(key, 0.0) + min(max(z, -LARGEST_Z), LARGEST_Z)
            if key in self.agreeing or len(self.agreeing) < MOST_WITNESSES:
                self.agreeing[key] = agreeing
            ratio = agreeing * agreeing * (1.0 - AGREEMENT**2) - self.dispersion[kind]
            self.dispersion[kind] = min(max(self.dispersion[kind] + ratio / DISPERSION_MEMORY, 1.0), DISPERSION_MOST)
        return fired

    def judge(
        self, passed: FloatArray, reached: FloatArray, kinds: np.ndarray, bands: np.ndarray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Accepted tokens of each part, how many were expected, and their variance if rows were independent."""
        acceptance = self.acceptance[kinds, bands]
        expected = reached * acceptance
        return passed.sum(axis=1), expected.sum(axis=1), (expected * (1.0 - acceptance)).sum(axis=1)

    def forget_all(self) -> None:
        """Keep a few rows of every class: some of what was counted was not true."""
        for kind in range(self.shape[0]):
            self._forget(kind)
        self._estimate()

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

    def _estimate(self) -> None:
        """Bring acceptance[class, band, position] and tokens[class, band, length] up to date with the counts."""
        prior, shared = self.first, []
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

    def log_tokens_variance(self, kind: int, band: int) -> FloatArray:
        """Variance of log tokens at every length, by the delta method."""
        acceptance, positions = self.acceptance[kind, band], self.shape[2]
        shared = PRIOR_ROWS + self.reached
        rows = self.band_reached[kind, band] + BAND_PRIOR_ROWS * shared / (shared + BAND_PRIOR_ROWS)
        variance = self.dispersion[kind] * acceptance * (1.0 - acceptance) / rows
        lower = np.tril(np.broadcast_to(acceptance.cumprod()[:, None], (positions, positions)))
        gain = lower.cumsum(axis=0) / acceptance / self.tokens[kind, band, 1:, None]
        return np.append(0.0, (gain**2 * variance).sum(axis=1))

    def export_state(self) -> dict[str, Any]:
        """Everything needed to go on exactly from here, as JSON-able values."""
        return {name: getattr(self, name).tolist() for name in self.STATE} | {
            "first": self.first,
            "shape": self.shape,
            "detectors": [detector.export_state() for detector in self.detectors],
            "agreeing": dict(self.agreeing),
            "dispersion": self.dispersion.tolist(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from an exported state of as many classes."""
        classes, bands, positions = (int(value) for value in state["shape"])
        if classes != self.shape[0]:
            raise ValueError(f"state has {classes} classes of requests, this version has {self.shape[0]}")
        for name in self.STATE:
            room = (bands, positions) if name.startswith("band") else (positions,)
            lead = () if name in ("ratios", "reached", "passed") else (classes,)
            setattr(self, name, np.array(state[name], dtype=float).reshape(*lead, *room))
        self.first = float(state["first"])
        for detector, values in zip(self.detectors, state["detectors"], strict=True):
            detector.restore(values)
        self.agreeing = {key: float(value) for key, value in state["agreeing"].items()}
        self.dispersion = np.array(state["dispersion"], dtype=float)
        self._estimate()
