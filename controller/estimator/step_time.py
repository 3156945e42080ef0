"""How long a step takes: what was seen of every cell, on a surface that carries it to all others.

The state is evidence: per cell (batch sizes of a bucket x length) the mean log time of its reports and how many they count
for. Everything else is derived from it anew, so nothing can be confidently wrong where nothing was seen:

    log T(b, s) = (1 - g) (log m + rho) + g y      g = v / (v + noise / n)
    var log T   = (1 - g)^2 h' P h + (1 - g) v + drift since the length was last played

y, n: the cell's evidence, which ages. m: the surface most probable given all cells, with covariance P of its weights and
gradient h (surface.py). v: variance of what no smooth formula sees; rho: what was known of that before the last change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.change import MOST_WITNESSES, Change, Speed
from speclen.controller.estimator.core import Bucket, Profile
from speclen.controller.estimator.state import restored
from speclen.controller.estimator.surface import (
    CONTEXT_UNIT,
    HELD,
    HELD_DRAFT,
    bounded,
    knots_to,
    most_probable,
    of_length,
    prior,
)

# Log-sd of what the surface leaves over in a cell: kernels jump by a few percent between shapes. Of what it has left over a
# new surface keeps at most the second value: more may be the time of before a change.
CELL_SD, KEPT_LEFT_OVER = 0.04, 0.1
# Most reports that a cell may count for. Log-sd by which times may drift per report: of a cell by itself, and of a length
# that was not played in any bucket, up to the last value.
MOST_EVIDENCE, WALK, LENGTH_WALK, MOST_STALE = 100.0, 0.0004, 0.0015, 0.15
# Log-sd of the noise of one step: start and range, and its relative change per report outside its quartiles.
NOISE, NOISE_LEAST, NOISE_MOST, NOISE_RATE = 0.08, 0.02, 0.3, 0.02
# A report surprises by at most so many standard deviations: a step of twenty times its time is a slightly slow one.
LARGEST_Z = 2.5
# A change of all times, and of longer lengths against shorter ones: slack and sum of surprises, in standard deviations.
SLACK, THRESHOLD, TILT_SLACK, TILT_THRESHOLD = 0.5, 12.0, 0.5, 10.0
# Reports for which the evidence of a change must last, and more, with more slack, where all variance is wandering speed:
# what is over by then was a burst.
LASTS, WANDERING_LASTS, WANDERING_SLACK = 60.0, 60.0, 1.0
# After a change: log-sd by which each weight may have moved, and all together.
CHANGED_SD, CHANGED_COMMON_SD = 0.7, 0.5
# Where workers turned out to be unlike: the same for what was believed of both.
UNLIKE_SD = 1.0
# What a profile counts for: log-sd of its cells where it was measured here and elsewhere; what all may have wrong.
PROFILE_SD, FOREIGN_SD, PROFILE_MOVED_SD, PROFILE_COMMON_SD = 0.1, 0.4, 0.2, 0.2
# Reports before a time scale is believed (the quickest counts: the first steps of an engine are slow).
COLD_REPORTS = 3
# The surface is renewed when its evidence has grown by this part, or after so many reports.
RENEWED_SHARE, RENEWED_REPORTS = 0.02, 64
# Reports over which the usual context length of a bucket and the usual length of a worker are averaged.
CONTEXT_REPORTS, LENGTH_REPORTS = 64.0, 50.0
# Reports of a cell from which the shown interval holds their mean; evidence below which a cell is not fitted.
SHOWN_REPORTS, LEAST_EVIDENCE = 5, 0.01
SHORTEST_S, LONGEST_S = 1e-7, 1e5
# Of an interval, in log time: a factor of 400 says that nothing is known.
LARGEST_SPREAD = 6.0
# A log time or a variance beyond this comes of numbers that are none.
MOST_LOG = 100.0


class Steps(NamedTuple):
    """A group of steps: batch, length, context (tokens held per row), seconds, weight, all [n].

    offset: log time that its worker's steps are known to take longer than others'. spans: each worker and its place.
    """

    batch: np.ndarray
    length: np.ndarray
    context: FloatArray
    seconds: FloatArray
    weight: FloatArray
    offset: FloatArray
    spans: Sequence[tuple[str, slice]]


class StepTimes:
    """Step times of workers that are alike. Cells are [bucket, length], flat where an index is called cell."""

    EVIDENCE = ("mean_log", "evidence", "context", "seen_at", "rho", "seen_s", "num_seen", "profiled")
    STATE = (
        *EVIDENCE,
        *(
            "length_at",
            "usual_context",
            "usual",
            "log_taught",
            "phi0",
            "covariance0",
            "phi",
            "covariance",
            "known",
            "profiled_here",
        ),
        *("quickest", "noise", "clock", "fitted_evidence", "fitted_at", "speeds", "change", "tilt"),
    )

    def __init__(self, buckets: tuple[Bucket, ...], max_length: int) -> None:
        self.buckets, self.num_lengths = buckets, max_length + 1
        self.knots = knots_to(buckets[-1].batch_max * (max_length + 1.0))
        cells = len(buckets) * self.num_lengths
        # By cell: mean log time without speed, reports it counts for, their mean context, the newest report; what earlier
        # surfaces left over; mean and number of all reports as they came; whether a profile measured it.
        self.mean_log, self.evidence, self.context, self.seen_at = np.zeros((4, cells))
        self.rho, self.seen_s, self.num_seen, self.profiled = np.zeros((4, cells))
        self.length_at, self.usual_context = np.zeros(self.num_lengths), np.zeros(len(buckets))
        self.rows = np.repeat([(b.batch_min + b.batch_max) / 2.0 for b in buckets], self.num_lengths)
        self.lengths = np.tile(np.arange(self.num_lengths), len(buckets))
        self.usual = of_length(self.rows, self.lengths, self.context, self.knots)
        self.bucket_of = np.searchsorted([b.batch_max for b in buckets], np.arange(buckets[-1].batch_max + 1))
        self.known = self.profiled_here = False
        self.quickest: list[float] = []  # of the first reports: log time over the prior's
        self.noise, self.clock, self.fitted_at = NOISE, 0, 0  # clock: reports so far
        self.speeds: dict[str, Speed] = {}  # by worker, since machines are shared and throttle each for itself
        self.change, self.tilt = Change(SLACK, THRESHOLD), Change(TILT_SLACK, TILT_THRESHOLD)
        self.surprise: FloatArray = np.zeros(0)  # of the newest group: log times over the usual ones, clipped
        self._start(*prior(len(self.knots)))

    def _start(self, phi: FloatArray, covariance: FloatArray) -> None:
        """Begin with a new prior; what is kept of the evidence so far is in it and in rho."""
        self.phi0 = self.phi = phi
        self.covariance0 = self.covariance = bounded(covariance, len(self.knots))
        self.evidence[:] = 0.0
        self.fitted_evidence = 0.0
        self._draw()

    def seed(self, profile: Profile) -> None:
        """Start from an offline profile: a surface through its cells, which may all be off, and half of what it leaves."""
        batch, length, seconds, context = (
            np.array([getattr(cell, name) for cell in profile.cells])
            for name in ("batch_size", "speculation_length", "step_s", "mean_context_length")
        )
        log_s, cell = np.log(np.clip(seconds, SHORTEST_S, LONGEST_S)), self._cell(batch, length)
        rows, (phi, covariance) = of_length(batch, length, context, self.knots), prior(len(self.knots))
        phi = phi + float(np.min(log_s - np.log(rows @ np.exp(phi))))
        sd = FOREIGN_SD if profile.as_prior else PROFILE_SD
        fitted, left = most_probable(phi, covariance, rows, log_s, np.full(len(rows), sd * sd), phi)
        self.known, self.profiled_here = True, not profile.as_prior
        self.rho[:], self.profiled[cell], self.usual_context[:] = 0.0, 1.0, context.mean()
        if self.profiled_here:
            self.rho[cell] = 0.5 * (log_s - np.log(rows @ np.exp(fitted)))
            np.clip(self.rho, -KEPT_LEFT_OVER, KEPT_LEFT_OVER, out=self.rho)
        self._start(fitted, left + PROFILE_MOVED_SD**2 * np.eye(len(left)) + PROFILE_COMMON_SD**2)

    def seed_from(self, other: StepTimes, moved_sd: float) -> None:
        """Start from what is believed of other workers' steps, of which every weight may be off by so much."""
        if not other.known:
            return
        size = min(len(self.phi), len(other.phi))
        phi, covariance = prior(len(self.knots))
        phi = phi + (other.phi[0] - phi[0])
        phi[:size] = other.phi[:size]
        covariance[:size, size:] = covariance[size:, :size] = 0.0
        covariance[:size, :size] = other.covariance[:size, :size] + moved_sd**2 * (1.0 + np.eye(size))
        self.known, self.noise = True, other.noise
        buckets, lengths = min(len(self.buckets), len(other.buckets)), min(self.num_lengths, other.num_lengths)
        kept = np.clip(other.left_over, -KEPT_LEFT_OVER, KEPT_LEFT_OVER)
        self.grid(self.rho)[:buckets, :lengths] = other.grid(kept)[:buckets, :lengths]
        self._start(phi, covariance)

    def grid(self, cells: FloatArray) -> FloatArray:
        """A view [buckets, lengths] of values by cell."""
        return cells.reshape(len(self.buckets), self.num_lengths)

    def _cell(self, batch: np.ndarray, length: np.ndarray) -> np.ndarray:
        cells: np.ndarray = self.bucket_of[batch] * self.num_lengths + length
        return cells

    def update(self, steps: Steps) -> float:
        """Learn from a group; returns the statistic of a change, if one was found, else 0."""
        cell, seconds = self._cell(steps.batch, steps.length), np.clip(steps.seconds, SHORTEST_S, LONGEST_S)
        log_s = np.log(seconds) - steps.offset
        np.add.at(self.num_seen, cell, 1.0)
        np.add.at(self.seen_s, cell, (seconds - self.seen_s[cell]) / self.num_seen[cell])
        rows = None
        if steps.context.any() or not self.known:
            rows = of_length(steps.batch, steps.length, steps.context, self.knots)
            bucket = self.bucket_of[steps.batch]
            usual = self.usual_context[bucket]
            self.usual_context[bucket] = usual + (steps.context - usual) / np.where(usual > 0.0, CONTEXT_REPORTS, 1.0)
        if rows is not None and not self.known and not self._warm_up(rows, log_s):
            return 0.0
        found = self._detect(steps, log_s - self._predicted(cell, rows), self.variance[cell] + self.noise**2)
        if found:
            self._start_anew()
        return self._learn(steps, cell, log_s, self._predicted(cell, rows)) or found

    def _warm_up(self, rows: FloatArray, log_s: FloatArray) -> bool:
        """Gather the first reports until a time scale is known."""
        self.quickest += (log_s - np.log(rows @ np.exp(self.phi))).tolist()
        self.known = len(self.quickest) >= COLD_REPORTS
        if self.known:
            mean, covariance = prior(len(self.knots))
            self._start(mean + min(self.quickest), covariance)
        return self.known

    def _predicted(self, cell: np.ndarray, rows: FloatArray | None) -> FloatArray:
        """Log time of each step at the usual speed, in the context that it had."""
        if rows is None:
            return self.log_seconds[cell]
        return self.log_seconds[cell] + np.log(rows @ np.exp(self.phi)) - self.log_surface[cell]

    def _detect(self, steps: Steps, surprise: FloatArray, variance: FloatArray) -> float:
        """Look for a change: what wandering speed explains is none, what stays away is."""
        found = 0.0
        for worker, span in steps.spans:
            speed = self.speed_of(worker)
            z = np.clip(surprise[span] / np.sqrt(variance[span] + speed.sd**2), -LARGEST_Z, LARGEST_Z)
            slack, lasting = WANDERING_SLACK * speed.share, LASTS + WANDERING_LASTS * speed.share
            found = self.change.add(worker, z.tolist(), slack, lasting) or found
            if speed.stays_away and len(self.speeds) < 3:
                found = found or math.copysign(self.change.threshold, speed.away)
        return found

    def _start_anew(self) -> None:
        """After a change: the present speed becomes the usual one, weights may move, cells keep what the surface leaves."""
        self.rho = np.clip(self.left_over, -KEPT_LEFT_OVER, KEPT_LEFT_OVER)
        usual = float(np.median([speed.mean for speed in self.speeds.values()]))
        for speed in self.speeds.values():
            speed.mean, speed.away = speed.mean - usual, 0.0
        moved = CHANGED_SD**2 * np.eye(len(self.phi)) + CHANGED_COMMON_SD**2
        self._start(self.phi + usual, self.covariance + moved)

    def _learn(self, steps: Steps, cell: np.ndarray, log_s: FloatArray, predicted: FloatArray) -> float:
        """Add a group to the evidence of its cells; returns the statistic of a tilt, if one was found, else 0."""
        n, noise, unsure = len(cell), self.noise**2, self.variance[cell]
        now, doubt = np.empty((2, n))  # speed of each step's worker before, and its variance
        for worker, span in steps.spans:
            speed = self.speed_of(worker)
            now[span], doubt[span] = speed.mean, speed.variance
        cells, place, count = np.unique(cell, return_inverse=True, return_counts=True)
        clipped = self._clipped(log_s - predicted - now, np.sqrt(unsure + noise + doubt), place, count)
        self.surprise, weight = clipped + now, np.empty(n)
        for worker, span in steps.spans:
            speed, size = self.speed_of(worker), span.stop - span.start
            speed.learn(float(clipped[span].mean()), float(unsure[span].mean()), noise, size)
            now[span] = speed.mean
            # What the speed may have wrong all reports of the worker have wrong together.
            weight[span] = steps.weight[span] * (noise / (noise + size * speed.variance))
        self.clock += n
        self._add(cells, place, weight, predicted + self.surprise - now, steps.context)
        seen = float(self.evidence.sum())
        if seen > (1.0 + RENEWED_SHARE) * self.fitted_evidence or self.clock - self.fitted_at >= RENEWED_REPORTS:
            self.fitted_evidence, self.fitted_at = seen, self.clock
            self._fit()
        else:
            self._combine()
        return self._watch_tilt(steps, (self.surprise - now) / np.sqrt(unsure + noise))

    def _clipped(self, surprise: FloatArray, width: FloatArray, place: np.ndarray, count: np.ndarray) -> FloatArray:
        """Surprises without slow steps; follows the noise on the way.

        Where a group shows a cell three times their median is the yardstick, else the prediction with its doubt.
        """
        centre = np.zeros(len(surprise))
        for many in np.flatnonzero(count >= 3).tolist():
            here = np.flatnonzero(place == many)
            centre[here], width[here] = sorted(surprise[here].tolist())[len(here) // 2], self.noise
        z = (surprise - centre) / width
        # Half of all surprises lie within 0.674 standard deviations.
        outside = int(np.count_nonzero(np.abs(z) > 0.674))
        self.noise *= math.exp(NOISE_RATE * (outside - 0.5 * len(z)))
        self.noise = min(max(self.noise, NOISE_LEAST), NOISE_MOST)
        clipped: FloatArray = centre + np.clip(z, -LARGEST_Z, LARGEST_Z) * width
        return clipped

    def _add(
        self, cells: np.ndarray, place: np.ndarray, weight: FloatArray, log_s: FloatArray, context: FloatArray
    ) -> None:
        """Means of the cells' evidence with the news."""
        total = np.bincount(place, weight)
        known = self._aged()[cells]
        for mean, values in ((self.mean_log, log_s), (self.context, context)):
            mean[cells] = (known * mean[cells] + np.bincount(place, weight * values)) / (known + total)
        self.evidence[cells] = np.minimum(known + total, MOST_EVIDENCE)
        self.seen_at[cells] = self.length_at[cells % self.num_lengths] = self.clock

    def _watch_tilt(self, steps: Steps, surprise: FloatArray) -> float:
        """Longer lengths against the usual ones: a change that the speed of the moment would hide."""
        found = 0.0
        for worker, span in steps.spans:
            speed, length = self.speed_of(worker), steps.length[span]
            signed = surprise[span] * np.sign(length - round(speed.usual_length))
            speed.usual_length += (float(length.mean()) - speed.usual_length) * min(1.0, len(length) / LENGTH_REPORTS)
            if signed.any():
                found = self.tilt.add(worker, np.clip(signed[signed != 0.0], -LARGEST_Z, LARGEST_Z).tolist()) or found
        if found:
            self._start_anew()
        return found

    def speed_of(self, worker: str) -> Speed:
        """Of a worker; in a very large fleet the last ones share theirs."""
        known = self.speeds.get(worker)
        if known is None:
            known = self.speeds.setdefault(worker if len(self.speeds) < MOST_WITNESSES else "", Speed())
        return known

    def _aged(self) -> FloatArray:
        """Reports that each cell's evidence counts for, now that times may have drifted since."""
        drift = (WALK / self.noise) ** 2 * (self.clock - self.seen_at)
        strength: FloatArray = self.evidence / (1.0 + self.evidence * drift)
        return strength

    def _fit(self) -> None:
        """The surface anew, from its prior and the cells seen since."""
        strength = self._aged()
        seen = np.flatnonzero(strength > LEAST_EVIDENCE)
        if len(seen):
            rows = self.usual[seen]
            if self.context.any():
                rows = of_length(self.rows[seen], self.lengths[seen], self.context[seen], self.knots)
            variance = CELL_SD**2 + self.noise**2 / strength[seen]
            log_s = self.mean_log[seen] - self.rho[seen]
            self.phi, self.covariance = most_probable(self.phi0, self.covariance0, rows, log_s, variance, self.phi)
        self._draw()

    def _draw(self) -> None:
        """The surface over all cells, in their usual context and in that of their evidence."""
        if self.usual_context.any():
            held = self.rows * np.repeat(self.usual_context, self.num_lengths) / CONTEXT_UNIT
            self.usual[:, HELD], self.usual[:, HELD_DRAFT] = held, held * self.lengths
        theta = np.exp(self.phi)
        smooth = self.usual @ theta
        if self.context.any():
            held = self.rows * self.context / CONTEXT_UNIT - self.usual[:, HELD]
            smooth += held * (theta[HELD] + theta[HELD_DRAFT] * self.lengths)
        self.log_taught = np.log(smooth)
        self._judge()

    def _judge(self) -> None:
        """How sure the surface is."""
        parts = self.usual * np.exp(self.phi)
        smooth = parts.sum(axis=1)
        self.log_surface = np.log(smooth)
        self.shares = parts / smooth[:, None]
        self.surface_variance = np.maximum(np.einsum("nd,nd->n", self.shares @ self.covariance, self.shares), 0.0)
        self._combine()

    def _combine(self) -> None:
        """Surface and cells together: log_seconds, and variance of it, of every cell at the usual speed."""
        strength = self._aged() * CELL_SD**2
        self.trust = strength / (strength + self.noise**2)
        self.left_over = self.rho + self.trust * (self.mean_log - self.log_taught - self.rho)
        self.log_seconds = self.log_surface + self.left_over
        doubt = 1.0 - self.trust
        stale = np.minimum(LENGTH_WALK**2 * (self.clock - self.length_at), MOST_STALE**2)
        self.own_variance = CELL_SD**2 * doubt + stale[self.lengths]
        self.variance = doubt * doubt * self.surface_variance + self.own_variance

    def relative_variance(self, bucket: int, against: int) -> FloatArray:
        """Variance of log T_s - log T_against for every length of a bucket: what is unsure about both alike cancels."""
        cells = slice(bucket * self.num_lengths, (bucket + 1) * self.num_lengths)
        gain = self.shares[cells] * (1.0 - self.trust[cells])[:, None]
        gain = gain - gain[against]
        own = self.own_variance[cells] + self.own_variance[cells][against]
        own[against] = 0.0
        return np.maximum(np.einsum("nd,nd->n", gain @ self.covariance, gain), 0.0) + own

    def seconds(self) -> FloatArray:
        """Mean step time of every cell at the usual speed, [buckets, lengths]."""
        return self.grid(np.clip(np.exp(self.log_seconds + 0.5 * self.noise**2), SHORTEST_S, LONGEST_S))

    def interval(self) -> tuple[FloatArray, FloatArray]:
        """Bounds of each cell's mean step time, 95%, that hold what was seen where enough was."""
        wandering = max((speed.sd for speed in self.speeds.values()), default=0.0)
        spread = np.exp(np.minimum(1.96 * np.sqrt(self.variance + wandering**2), LARGEST_SPREAD))
        seconds = self.seconds().reshape(-1)
        low, high, seen = seconds / spread, seconds * spread, self.num_seen >= SHOWN_REPORTS
        return np.where(seen, np.minimum(low, self.seen_s), low), np.where(seen, np.maximum(high, self.seen_s), high)

    def source(self, cell: int) -> str:
        """What a cell rests on: its own reports, a profile, both; for one that nobody measured, what the others rest on."""
        online, profiled = bool(self.num_seen[cell]), bool(self.profiled[cell])
        if not online and not profiled:
            online, profiled = bool(self.num_seen.any()), bool(self.profiled.any())
        return "both" if profiled and online else "profile" if profiled else "online" if online else "prior"

    def rebuild(self, mean_log: FloatArray, evidence: FloatArray) -> None:
        """Replace the evidence: some of it came from a worker that does not belong here."""
        self.rho[:] = 0.0
        self._start(self.phi0, self.covariance0 + UNLIKE_SD**2 * (1.0 + np.eye(len(self.phi))))
        self.mean_log, self.evidence = mean_log, evidence
        self.seen_at[:] = self.clock
        self.speeds.clear()
        self.change.forget()
        self.tilt.forget()
        self._fit()

    @property
    def sound(self) -> bool:
        """Whether all numbers are of a believable size; NaN is of none."""
        return bool(np.abs(self.log_seconds).max() < MOST_LOG and np.abs(self.variance).max() < MOST_LOG)

    def renew(self) -> None:
        """Derive everything else after a state was restored."""
        self.speeds = {worker: restored(Speed(), state) for worker, state in self.speeds.items()}
        self._judge()


def spans_of(senders: Sequence[str]) -> list[tuple[str, slice]]:
    """Each sender with its place in a group. One that appears twice has two places."""
    spans, start = [], 0
    for sender, members in groupby(senders):
        end = start + sum(1 for _ in members)
        spans.append((sender, slice(start, end)))
        start = end
    return spans
