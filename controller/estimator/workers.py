"""Whether a worker's step times agree with the fleet's.

Workers of one context run on the same kind of device, so at the same batch size and length their steps should take
equally long. A worker that is slower or faster by a constant factor is harmless and its factor is taken out. One whose
deviation depends on the length, whose factor is implausible, or whose times scatter far more than the others', is no
witness: it is not learned from until it agrees again. The yardsticks are medians over workers, and only a worker that
also deviates several times as much as the median worker is left out: so a minority cannot move the yardstick, and while
the estimates themselves are off, when everybody deviates, nobody is left out.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

from speclen.controller.estimator.arrays import FloatArray

# Reports after which a worker's mean residuals have faded to 1/e.
MEMORY_REPORTS = 200.0
# Reports of a worker before its deviation counts as evidence.
ENOUGH_REPORTS = 8.0
# Workers with evidence without which there is no majority.
QUORUM = 3
# Deviation beyond which a worker is no witness, in log time: spread between lengths, constant, scatter of single steps.
LIMITS = np.array([0.10, 0.25, 0.2])
# A worker that is left out deviates this many times as much as the median worker, too.
TIMES_MEDIAN = 3.0
# Single residuals are clipped here, so that pauses do not make a suspect.
CLIP = 0.7
# Workers judged per context. In a larger fleet one worker's share is below 1%, and those beyond are taken at their word.
LARGEST_FLEET = 128
# Share of the evidence kept when a drift of step times was found.
KEPT_AFTER_DRIFT = 0.1
# Groups of the whole context without one of a worker, after which a newcomer may take its place.
SILENT_GROUPS = 2048


class FleetAgreement:
    """Log residuals of each worker by length, and what follows from them."""

    def __init__(self, num_lengths: int) -> None:
        self.num_lengths = num_lengths
        # [3, lengths] per worker, least recently heard first: reports, residuals, their distances from the worker's own
        # mean; summed and fading.
        self.sums: OrderedDict[str, FloatArray] = OrderedDict()
        self.last_heard: dict[str, int] = {}
        self.num_groups = 0
        self.reference = np.zeros(num_lengths)  # median residual by length
        self.limits = LIMITS.copy()
        self.groups_until_refresh = 0
        self.num_ignored: dict[str, int] = {}
        self.excluded: set[str] = set()  # workers that are left out at present

    def record(self, workers: list[str], sender: np.ndarray, length: np.ndarray, residual: FloatArray) -> None:
        """Add log residuals (against the shared prediction, offset not removed) of a group of steps.

        sender, length, residual: [n], sender[i] is the place of step i's worker in workers, which are all different.
        """
        rows = [self._withdraw(worker_id) for worker_id in workers]
        sums = np.stack([np.zeros((3, self.num_lengths)) if row is None else row for row in rows])
        shape, cell = sums.shape[::2], sender * self.num_lengths + length

        def by_cell(values: FloatArray | None) -> FloatArray:
            return np.bincount(cell, values, sums[:, 0].size).astype(float).reshape(shape)

        clipped = np.clip(residual, -CLIP, CLIP)
        sums *= np.exp(-np.bincount(sender, minlength=len(workers)) / MEMORY_REPORTS)[:, None, None]
        sums[:, 0] += by_cell(None)
        sums[:, 1] += by_cell(clipped)
        mean = sums[:, 1] / np.maximum(sums[:, 0], 1.0)
        sums[:, 2] += by_cell(np.abs(clipped - mean[sender, length]))
        for worker_id, row, summed in zip(workers, rows, sums, strict=True):
            if row is not None:
                self.sums[worker_id] = summed

    def _withdraw(self, worker_id: str) -> FloatArray | None:
        """Take out what is known of a worker that was heard, to be put back at the end; None: there is no place."""
        self.num_groups += 1
        sums = self.sums.pop(worker_id, None)
        if sums is None:
            if not self._make_room():
                return None
            sums = np.zeros((3, self.num_lengths))
        self.last_heard[worker_id] = self.num_groups
        return sums

    def _make_room(self) -> bool:
        """Whether a newcomer can be judged; a worker that fell silent gives its place."""
        if len(self.last_heard) < LARGEST_FLEET:
            return True
        if not self.sums:
            return False
        oldest = next(iter(self.sums))
        if self.num_groups - self.last_heard[oldest] < SILENT_GROUPS:
            return False
        self.sums.pop(oldest)
        self.last_heard.pop(oldest)
        self.num_ignored.pop(oldest, None)
        self.excluded.discard(oldest)
        return True

    def judge(self, workers: list[str]) -> tuple[FloatArray, np.ndarray]:
        """Each worker's constant offset in log time, and whether it may teach, both [workers]."""
        offset, trusted = np.zeros(len(workers)), np.ones(len(workers), dtype=bool)
        known = [place for place, worker_id in enumerate(workers) if worker_id in self.sums]
        if not known or len(self.sums) < QUORUM:
            return offset, trusted
        self.groups_until_refresh -= len(known)
        if self.groups_until_refresh < 0:
            self._refresh()
        sums = np.stack([self.sums[workers[place]] for place in known])
        evident = sums[:, 0].sum(axis=1) >= ENOUGH_REPORTS
        found, deviations = self._deviations(sums)
        offset[known] = np.where(evident, np.clip(found, -LIMITS[1], LIMITS[1]), 0.0)
        trusted[known] = ~evident | (deviations <= self.limits).all(axis=1)
        return offset, trusted

    def _deviations(self, sums: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Offsets [workers], and spread between lengths, size of the offset and scatter [workers, 3]."""
        reports, total = sums[:, 0], np.maximum(sums[:, 0].sum(axis=1), 1e-9)
        deviation = sums[:, 1] / np.maximum(reports, 1e-9) - self.reference
        offset = (deviation * reports).sum(axis=1) / total
        spread = np.sqrt(((deviation - offset[:, None]) ** 2 * reports).sum(axis=1) / total)
        return offset, np.stack([spread, np.abs(offset), sums[:, 2].sum(axis=1) / total], axis=1)

    def _refresh(self) -> None:
        """Median residual by length, and from the median worker how much deviation is too much.

        Once per round of the fleet, to keep a report cheap.
        """
        stacked = np.stack(list(self.sums.values()))
        self.groups_until_refresh = len(stacked)
        stacked = stacked[stacked[:, 0].sum(axis=1) >= ENOUGH_REPORTS]
        self.reference, self.limits = np.zeros(self.num_lengths), LIMITS.copy()
        if len(stacked) < QUORUM:
            return
        evident = stacked[:, 0] >= 1.0
        enough = evident.sum(axis=0) >= QUORUM
        means = np.where(evident, stacked[:, 1] / np.maximum(stacked[:, 0], 1e-9), np.nan)
        if enough.any():
            self.reference[enough] = np.nanmedian(means[:, enough], axis=0)
        self.limits = np.maximum(LIMITS, TIMES_MEDIAN * np.median(self._deviations(stacked)[1], axis=0))

    def exclude(self, worker_id: str, num_reports: int) -> bool:
        """Note that reports of a worker are left out; True if it was believed until now."""
        self.num_ignored[worker_id] = self.num_ignored.get(worker_id, 0) + num_reports
        newly = worker_id not in self.excluded
        self.excluded.add(worker_id)
        return newly

    def readmit(self, workers: list[str]) -> None:
        """These workers are learned from again, if they were not."""
        self.excluded.difference_update(workers)

    def forget(self) -> None:
        """The estimates are about to move: what was seen against the old ones counts for little."""
        for sums in self.sums.values():
            sums *= KEPT_AFTER_DRIFT

    def extend(self, num_lengths: int) -> None:
        """Make room for longer lengths."""
        more = num_lengths - self.num_lengths
        self.num_lengths = num_lengths
        self.reference = np.pad(self.reference, (0, more))
        for worker_id, sums in self.sums.items():
            self.sums[worker_id] = np.pad(sums, ((0, 0), (0, more)))

    def export_state(self) -> dict[str, Any]:
        """JSON-able values from which to go on."""
        return {
            "sums": [[worker_id, sums.tolist()] for worker_id, sums in self.sums.items()],
            "last_heard": dict(self.last_heard),
            "num_groups": self.num_groups,
            "reference": self.reference.tolist(),
            "limits": self.limits.tolist(),
            "groups_until_refresh": self.groups_until_refresh,
            "num_ignored": dict(self.num_ignored),
            "excluded": sorted(self.excluded),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from an exported state."""
        self.sums = OrderedDict((worker_id, np.array(sums, dtype=float)) for worker_id, sums in state["sums"])
        self.last_heard = {name: int(group) for name, group in state["last_heard"].items()}
        self.num_groups = int(state["num_groups"])
        self.reference = np.array(state["reference"], dtype=float)
        self.limits = np.array(state["limits"], dtype=float)
        self.groups_until_refresh = int(state["groups_until_refresh"])
        self.num_ignored = {name: int(count) for name, count in state["num_ignored"].items()}
        self.excluded = set(state["excluded"])
