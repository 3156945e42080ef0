"""How long a step takes: what was seen of every cell, on a surface that carries it to all others.

The state is evidence: per cell (batch sizes of a bucket x length) the mean log time of its reports and how many they count
for. Everything else is derived from it anew, so nothing can be confidently wrong where nothing was seen:

    log T(b, s) = (1 - g) (log m + rho) + g y      g = v / (v + noise / n)
    var log T   = (1 - g)^2 h' P h + (1 - g) v

y, n: the cell's evidence, which ages. m: the surface most probable given all cells, with covariance P of its weights and
gradient h (surface.py). v: variance of what no smooth formula sees; rho: what was known of that before the last change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from speclen.controller.estimator import change
from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.change import Spans, Watch
from speclen.controller.estimator.core import Bucket, Profile
from speclen.controller.estimator.surface import CONTEXT_UNIT, HELD, HELD_DRAFT, Surface, prior

# Log-sd of what the surface leaves over in a cell: kernels jump by a few percent between shapes. Of what it has left over a
# new surface keeps at most the second value: more may be the time of before a change.
CELL_SD, KEPT_LEFT_OVER = 0.04, 0.1
# Most reports that a cell may count for; log-sd by which its times may drift per report.
MOST_EVIDENCE, WALK = 100.0, 0.0004
# Log-sd of the noise of one step: start and range, and its relative change per report outside its quartiles.
NOISE, NOISE_LEAST, NOISE_MOST, NOISE_RATE = 0.08, 0.02, 0.3, 0.02
# After a change: log-sd by which each weight may have moved, and all together.
CHANGED_SD, CHANGED_COMMON_SD = 0.7, 0.5
# Where a worker turned out to be unlike: the same for what it starts with, and for what was believed with its reports.
UNLIKE_SD, SPOILED_SD = 1.0, 0.3
# What a profile counts for: log-sd of its cells where it was measured here and elsewhere; what all may have wrong.
PROFILE_SD, FOREIGN_SD, PROFILE_MOVED_SD, PROFILE_COMMON_SD = 0.1, 0.4, 0.2, 0.2
PROFILE_KEPT = 0.5
# Reports before a time scale is believed (the quickest counts: the first steps of an engine are slow).
COLD_REPORTS = 3
# The surface is renewed after this part of the reports that its evidence counts for, and at the latest after so many.
RENEWED_SHARE, RENEWED_REPORTS = 0.05, 200
# Reports over which the usual context length of a bucket is averaged.
CONTEXT_REPORTS = 64.0
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
    num_steps: that each entry stands for, whose noise is less by its root.
    """

    batch: np.ndarray
    length: np.ndarray
    context: FloatArray
    seconds: FloatArray
    weight: FloatArray
    offset: FloatArray
    spans: Spans
    num_steps: FloatArray


class StepTimes:
    """Step times of workers that are alike. Cells are [bucket, length], flat where an index is called cell."""

    EVIDENCE = ("mean_log", "evidence", "context", "seen_at", "rho", "total_s", "num_seen", "profiled")
    STATE = (
        *(*EVIDENCE, "usual_context", "drawn_context", "taught_context", "surface", "watch"),
        *("known", "quickest", "noise", "clock", "fitted_at"),
    )

    def __init__(self, buckets: tuple[Bucket, ...], max_length: int) -> None:
        self.buckets, self.num_lengths = buckets, max_length + 1
        self.num_cells = len(buckets) * self.num_lengths
        # By cell: mean log time without speed, reports it counts for, their mean context, the newest report; what earlier
        # surfaces left over; sum and number of all reports as they came; whether a profile measured it.
        self.mean_log, self.evidence, self.context, self.seen_at = np.zeros((4, self.num_cells))
        self.rho, self.total_s, self.num_seen, self.profiled = np.zeros((4, self.num_cells))
        self.usual_context = np.zeros(len(buckets))
        self.rows = np.repeat([(b.batch_min + b.batch_max) / 2.0 for b in buckets], self.num_lengths)
        self.lengths = np.tile(np.arange(self.num_lengths), len(buckets))
        self.bucket_of = np.searchsorted([b.batch_max for b in buckets], np.arange(buckets[-1].batch_max + 1))
        self.surface, self.watch = Surface(buckets[-1].batch_max * (max_length + 1.0)), Watch()
        self.usual = self.surface.of_length(self.rows, self.lengths, self.context)
        self.known, self.version = False, 0  # version: grows with every change
        self.quickest: list[float] = []  # of the first reports: log time over the prior's
        self.noise, self.clock, self.fitted_at = NOISE, 0, 0  # clock: reports so far
        self.surprise: FloatArray = np.zeros(0)  # of the newest group: log times over the usual ones, clipped
        self._start(*prior(len(self.surface.knots)))

    def _start(self, phi: FloatArray, covariance: FloatArray) -> None:
        """Begin with a new prior; what is kept of the evidence so far is in it and in rho."""
        self.surface.restart(phi, covariance)
        self.evidence[:] = 0.0
        self._draw()

    def seed(self, profile: Profile) -> None:
        """Start from an offline profile: a surface through its cells, which may all be off, and half of what it leaves."""
        batch, length, seconds, context = (
            np.array([getattr(cell, name) for cell in profile.cells])
            for name in ("batch_size", "speculation_length", "step_s", "mean_context_length")
        )
        log_s, cell = np.log(np.clip(seconds, SHORTEST_S, LONGEST_S)), self.cell_of(batch, length)
        surface = self.surface
        rows, (phi, covariance) = surface.of_length(batch, length, context), prior(len(surface.knots))
        surface.restart(phi + float(np.min(log_s - np.log(rows @ np.exp(phi)))), covariance)
        sd = FOREIGN_SD if profile.as_prior else PROFILE_SD
        surface.fit(rows, log_s, np.full(len(rows), sd * sd))
        self.known = True
        self.rho[:], self.profiled[cell], self.usual_context[:] = 0.0, 1.0, context.mean()
        if not profile.as_prior:
            self.rho[cell] = PROFILE_KEPT * (log_s - np.log(rows @ np.exp(surface.phi)))
            np.clip(self.rho, -KEPT_LEFT_OVER, KEPT_LEFT_OVER, out=self.rho)
        self._start(surface.phi, surface.loosened(PROFILE_MOVED_SD, PROFILE_COMMON_SD))

    def seed_from(self, other: StepTimes, moved_sd: float) -> None:
        """Start from what is believed of other workers' steps, of which every weight may be off by so much."""
        if not other.known:
            return
        theirs, (phi, covariance) = other.surface, prior(len(self.surface.knots))
        size = min(len(phi), len(theirs.phi))
        phi = phi + (theirs.phi[0] - phi[0])
        phi[:size] = theirs.phi[:size]
        covariance[:size, size:] = covariance[size:, :size] = 0.0
        covariance[:size, :size] = theirs.loosened(moved_sd, moved_sd)[:size, :size]
        self.known, self.noise = True, other.noise
        buckets, lengths = min(len(self.buckets), len(other.buckets)), min(self.num_lengths, other.num_lengths)
        self.grid(self.rho)[:buckets, :lengths] = other.grid(other.kept())[:buckets, :lengths]
        self._start(phi, covariance)

    def grid(self, cells: FloatArray) -> FloatArray:
        """A view [buckets, lengths] of values by cell."""
        return cells.reshape(len(self.buckets), self.num_lengths)

    def cell_of(self, batch: np.ndarray, length: np.ndarray) -> np.ndarray:
        """The cells of steps."""
        cells: np.ndarray = self.bucket_of[batch] * self.num_lengths + length
        return cells

    def update(self, steps: Steps) -> float:
        """Learn from a group; returns the statistic of a change, if one was found, else 0."""
        cell = self.cell_of(steps.batch, steps.length)
        seconds = np.minimum(np.maximum(steps.seconds, SHORTEST_S), LONGEST_S)
        log_s = np.log(seconds) - steps.offset
        self.num_seen += np.bincount(cell, steps.num_steps, self.num_cells)
        self.total_s += np.bincount(cell, seconds * steps.num_steps, self.num_cells)
        if steps.context.any():
            self._follow_context(steps)
        if not self.known and not self._warm_up(steps, log_s):
            return 0.0
        return self._learn(steps, cell, log_s, self._predicted(cell, steps.context))

    def _follow_context(self, steps: Steps) -> None:
        """How many tokens the rows of a bucket usually hold."""
        bucket = self.bucket_of[steps.batch]
        count = np.bincount(bucket, steps.num_steps, len(self.buckets))
        mean = np.bincount(bucket, steps.context * steps.num_steps, len(self.buckets)) / np.maximum(count, 1)
        rate = np.where(self.usual_context > 0.0, np.minimum(count / CONTEXT_REPORTS, 1.0), count > 0)
        self.usual_context += rate * (mean - self.usual_context)

    def _warm_up(self, steps: Steps, log_s: FloatArray) -> bool:
        """Gather the first reports until a time scale is known."""
        surface = self.surface
        rows = surface.of_length(steps.batch, steps.length, steps.context)
        self.quickest += (log_s - np.log(rows @ np.exp(surface.phi))).tolist()
        self.known = len(self.quickest) >= COLD_REPORTS
        if self.known:
            mean, covariance = prior(len(surface.knots))
            self._start(mean + min(self.quickest), covariance)
        return self.known

    def _predicted(self, cell: np.ndarray, context: FloatArray) -> FloatArray:
        """Log time of each step at the usual speed, in the context that it had."""
        log_s: FloatArray = self.log_seconds[cell]
        return log_s + np.log1p((context - self.drawn_context[cell]) * self.per_context[cell])

    def _start_anew(self) -> None:
        """After a change: the present speed becomes the usual one, weights may move, cells keep what the surface leaves."""
        self.rho = self.kept()
        self._start(self.surface.phi + self.watch.settle(), self.surface.loosened(CHANGED_SD, CHANGED_COMMON_SD))

    def kept(self) -> FloatArray:
        """What the surface leaves over, as far as a new one may start with it."""
        return np.clip(self.left_over, -KEPT_LEFT_OVER, KEPT_LEFT_OVER)

    def _learn(self, steps: Steps, cell: np.ndarray, log_s: FloatArray, predicted: FloatArray) -> float:
        """Add a group to the evidence of its cells; returns the statistic of a change, if one was found, else 0."""
        noise, unsure, spans, count = self.noise**2, self.variance[cell], steps.spans, steps.num_steps
        now, doubt = self.watch.now(spans)
        raw = log_s - predicted - now
        clipped = self._clipped(raw, np.sqrt(unsure + noise / count + doubt), self.noise / np.sqrt(count), cell)
        # What was cut off says that the mean is elsewhere, but not where: it counts for as much less (Huber's weights).
        trust = np.abs(clipped) / np.maximum(np.maximum(np.abs(raw), np.abs(clipped)), 1e-9)
        self.surprise = clipped + now
        now, share = self.watch.follow(spans, clipped, unsure, noise, count)
        self.clock += int(count.sum())
        self._add(cell, steps.weight * count * share * trust, predicted + self.surprise - now, steps.context)
        if self.clock - self.fitted_at >= min(RENEWED_SHARE * float(self.evidence.sum()), RENEWED_REPORTS):
            self.fitted_at = self.clock
            self._fit()
        else:
            self._combine()
        found = self.watch.changed(spans, steps.length, (self.surprise - now) / np.sqrt(unsure + noise / count))
        if found:
            self._start_anew()
        return found

    def _clipped(self, surprise: FloatArray, width: FloatArray, own: FloatArray, cell: np.ndarray) -> FloatArray:
        """Surprises without slow steps; follows the noise on the way. own: the noise of each report alone.

        Where a group shows a cell three times their median is the yardstick, else the prediction with its doubt.
        """
        centre = np.zeros(len(surprise))
        often = np.bincount(cell)[cell] >= 3
        for many in set(cell[often].tolist()):
            here = (cell == many).nonzero()[0]
            centre[here], width[here] = sorted(surprise[here].tolist())[len(here) // 2], own[here]
        z = (surprise - centre) / width
        # Half of all surprises lie within 0.674 standard deviations.
        outside = int(np.count_nonzero(np.abs(z) > 0.674))
        self.noise *= math.exp(NOISE_RATE * (outside - 0.5 * len(z)))
        self.noise = min(max(self.noise, NOISE_LEAST), NOISE_MOST)
        return centre + np.minimum(np.maximum(z, -change.LARGEST_Z), change.LARGEST_Z) * width

    def _add(self, cell: np.ndarray, weight: FloatArray, log_s: FloatArray, context: FloatArray) -> None:
        """Means of the cells' evidence with the news."""
        total = np.bincount(cell, weight, self.num_cells)
        seen = total.nonzero()[0]
        total, known = total[seen], self._aged()[seen]
        for mean, values in ((self.mean_log, log_s), (self.context, context)):
            mean[seen] = (known * mean[seen] + np.bincount(cell, weight * values, self.num_cells)[seen]) / (
                known + total
            )
        self.evidence[seen] = np.minimum(known + total, MOST_EVIDENCE)
        self.seen_at[seen] = self.clock

    def _aged(self) -> FloatArray:
        """Reports that each cell's evidence counts for, now that times may have drifted since."""
        drift = (WALK / self.noise) ** 2 * (self.clock - self.seen_at)
        strength: FloatArray = self.evidence / (1.0 + self.evidence * drift)
        return strength

    def _fit(self) -> None:
        """The surface anew, from its prior and the cells seen since."""
        strength = self._aged()
        seen = (strength > LEAST_EVIDENCE).nonzero()[0]
        if len(seen):
            rows = self.surface.of_length(self.rows[seen], self.lengths[seen], self.context[seen])
            variance = CELL_SD**2 + self.noise**2 / strength[seen]
            self.surface.fit(rows, self.mean_log[seen] - self.rho[seen], variance)
        self._draw()

    def _draw(self) -> None:
        """The surface over all cells, in the context that is usual by now."""
        self.drawn_context, self.taught_context = np.repeat(self.usual_context, self.num_lengths), self.context.copy()
        self.judge()

    def judge(self) -> None:
        """The surface over all cells, and how sure it is of them."""
        weights, held = np.exp(self.surface.phi), self.rows * self.drawn_context / CONTEXT_UNIT
        self.usual[:, HELD], self.usual[:, HELD_DRAFT] = held, held * self.lengths
        smooth = self.usual @ weights
        self.log_surface = np.log(smooth)
        # What a token more of context takes longer, relative to the step.
        self.per_context = self.rows / CONTEXT_UNIT * (weights[HELD] + weights[HELD_DRAFT] * self.lengths) / smooth
        self.log_taught = self.log_surface + np.log1p((self.taught_context - self.drawn_context) * self.per_context)
        self.shares = self.usual * (weights / smooth[:, None])
        self.surface_variance = self.surface.variance(self.shares)
        self._combine()

    def _combine(self) -> None:
        """Surface and cells together: log_seconds, and variance of it, of every cell at the usual speed."""
        self.version += 1
        strength = self._aged() * CELL_SD**2
        self.trust = strength / (strength + self.noise**2)
        self.left_over = self.rho + self.trust * (self.mean_log - self.log_taught - self.rho)
        self.log_seconds = self.log_surface + self.left_over
        doubt = 1.0 - self.trust
        self.own_variance = CELL_SD**2 * doubt
        self.variance = doubt * doubt * self.surface_variance + self.own_variance

    def predict(
        self, rows: np.ndarray, passes: np.ndarray, drafted: np.ndarray, verified: np.ndarray, context: np.ndarray
    ) -> tuple[FloatArray, FloatArray]:
        """Mean seconds of any steps at the usual speed, by the surface alone, and the variance of their log, both [n].

        rows; draft passes; rows summed over the draft passes; verified tokens; tokens held per row. Plans in which rows
        draft unlike numbers of tokens, or copy them, have such sums as well.
        """
        parts = self.surface.features(rows, passes, drafted, verified, context) * np.exp(self.surface.phi)
        smooth = parts.sum(axis=1)
        variance = self.surface.variance(parts / smooth[:, None]) + CELL_SD**2
        return smooth * math.exp(0.5 * self.noise**2), variance

    def relative_variance(self, bucket: int, against: int) -> FloatArray:
        """Variance of log T_s - log T_against for every length of a bucket: what is unsure about both alike cancels."""
        cells = slice(bucket * self.num_lengths, (bucket + 1) * self.num_lengths)
        gain = self.shares[cells] * (1.0 - self.trust[cells])[:, None]
        own = self.own_variance[cells] + self.own_variance[cells][against]
        own[against] = 0.0
        return self.surface.variance(gain - gain[against]) + own

    def seconds(self) -> FloatArray:
        """Mean step time of every cell at the usual speed, [buckets, lengths]."""
        log_s = self.log_seconds + 0.5 * self.noise**2
        return self.grid(np.minimum(np.maximum(np.exp(log_s), SHORTEST_S), LONGEST_S))

    @property
    def seen_s(self) -> FloatArray:
        """Mean of all reports of a cell as they came; 0 without any."""
        mean: FloatArray = self.total_s / np.maximum(self.num_seen, 1.0)
        return mean

    def interval(self) -> tuple[FloatArray, FloatArray]:
        """Bounds of each cell's mean step time, 95%, that hold what was seen where enough was."""
        wandering = max((speed.sd for speed in self.watch.speeds.values()), default=0.0)
        spread = np.exp(np.minimum(1.96 * np.sqrt(self.variance + wandering**2), LARGEST_SPREAD))
        seconds, seen_s = self.seconds().reshape(-1), self.seen_s
        low, high, seen = seconds / spread, seconds * spread, self.num_seen >= SHOWN_REPORTS
        return np.where(seen, np.minimum(low, seen_s), low), np.where(seen, np.maximum(high, seen_s), high)

    def source(self, cell: int) -> str:
        """What a cell rests on: its own reports, a profile, both; for one that nobody measured, what the others rest on."""
        online, profiled = bool(self.num_seen[cell]), bool(self.profiled[cell])
        if not online and not profiled:
            online, profiled = bool(self.num_seen.any()), bool(self.profiled.any())
        return "both" if profiled and online else "profile" if profiled else "online" if online else "prior"

    def rebuild(self, mean_log: FloatArray, evidence: FloatArray) -> None:
        """Replace the evidence: some of it came from a worker that does not belong here."""
        self.rho[:] = 0.0
        self.surface.covariance = self.surface.covariance0
        self._start(self.surface.phi0, self.surface.loosened(SPOILED_SD, SPOILED_SD))
        self.mean_log, self.evidence = mean_log, evidence
        self.seen_at[:] = self.clock
        self.watch = Watch()
        self._fit()

    @property
    def sound(self) -> bool:
        """Whether all numbers are of a believable size; NaN is of none."""
        return bool(np.abs(self.log_seconds).max() < MOST_LOG and self.variance.max() < MOST_LOG)

    def renew(self) -> None:
        """Derive everything else after a state was restored."""
        self.watch.renew()
        self.judge()


def spans_of(senders: Sequence[str]) -> Spans:
    """Each sender with its place in a group. One that appears twice has two places."""
    spans, start = [], 0
    for sender, members in groupby(senders):
        end = start + sum(1 for _ in members)
        spans.append((sender, slice(start, end)))
        start = end
    return spans
