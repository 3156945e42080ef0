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
from speclen.controller.estimator.surface import CONTEXT_UNIT, FIXED, HELD, HELD_DRAFT, Surface, prior

# Log-sd of what the surface leaves over in a cell: kernels jump by a few percent between shapes. Of what it has left over a
# new surface keeps at most the second value: more may be the time of before a change.
CELL_SD, LEAST_CELL_SD, MOST_CELL_SD, CELLS_BEFORE, FAR_SDS, KEPT_LEFT_OVER = 0.04, 0.03, 0.5, 10.0, 3.0, 2.5
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
# Of a cell never seen before, what the first report counts for less: it may have been slow for being the first.
FIRST_OFF = 0.5
# Relative change of contexts after which evidence becomes the next prior, and by how much weights may have moved (log-sd).
CONTEXT_LEFT, LEFT_SD = 0.5, 0.05
# Reports before a time scale is believed (the quickest counts: the first steps of an engine are slow).
COLD_REPORTS = 3
# Of what the surface leaves over, the standard deviations that a cell never seen may be off by, when asked about the speed.
# And log-sd by which it may be off when it is asked about a jump of the speed.
UNSEEN_SDS, UNSEEN_SD = 2.0, 0.5
# Evidence of a cell up to which a step that is quicker than believed is believed, by at most this log time.
FEW_REPORTS, LARGEST_DROP = 3.0, 3.0
# The surface is renewed after this part of the reports that its evidence counts for, and at the latest after so many.
RENEWED_SHARE, RENEWED_REPORTS = 0.05, 200
# Reports, of any batch size, over which the usual context length of a bucket is averaged.
CONTEXT_REPORTS = 16.0
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
        *("known", "quickest", "noise", "cell_sd", "clock", "fitted_at", "origin", "began_at"),
    )

    def __init__(self, buckets: tuple[Bucket, ...], max_length: int) -> None:
        self.buckets, self.num_lengths = buckets, max_length + 1
        self.num_cells = len(buckets) * self.num_lengths
        # By cell: mean log time without speed, reports it counts for, their mean context, the newest report; what earlier
        # surfaces left over; sum and number of all reports as they came; whether a profile measured it.
        self.mean_log, self.evidence, self.context, self.seen_at = np.zeros((4, self.num_cells))
        self.rho, self.total_s, self.num_seen, self.profiled = np.zeros((4, self.num_cells))
        self.usual_context, self.began_at = np.zeros(len(buckets)), -1.0  # began_at: longest when the evidence began
        self.rows = np.repeat([(b.batch_min + b.batch_max) / 2.0 for b in buckets], self.num_lengths)
        self.lengths = np.tile(np.arange(self.num_lengths), len(buckets))
        self.bucket_of = np.searchsorted([b.batch_max for b in buckets], np.arange(buckets[-1].batch_max + 1))
        self.surface, self.watch = Surface(buckets[-1].batch_max * (max_length + 1.0)), Watch()
        self.usual = self.surface.of_length(self.rows, self.lengths, self.context)
        self.known, self.version = False, 0  # version: grows with every change
        self.quickest: list[float] = []  # of the first reports: log time over the prior's
        self.origin = np.zeros((1 + len(self.surface.phi), len(self.surface.phi)))  # first prior, mean above covariance
        self.noise, self.cell_sd = NOISE, CELL_SD  # log-sd of one report, and of what the surface leaves over
        self.clock, self.fitted_at = 0, 0  # clock: reports so far
        # Of the newest group: log times in the usual context, and over what was believed.
        self.newest: tuple[FloatArray, FloatArray] = (np.zeros(0), np.zeros(0))
        self._start(*prior(len(self.surface.knots)))

    def _start(self, phi: FloatArray, covariance: FloatArray) -> None:
        """Begin with a new prior; what is kept of the evidence so far is in it and in rho."""
        self.surface.restart(phi, covariance)
        self.evidence[:] = 0.0
        self._draw()

    def _begin(self, phi: FloatArray, covariance: FloatArray) -> None:
        """Begin with what is known before any report, to which what was spoiled goes back."""
        self.known, self.origin = True, np.vstack([phi, covariance])
        self._start(phi, covariance)

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
        self.rho[:], self.profiled[cell], self.usual_context[:] = 0.0, 1.0, context.mean()
        if not profile.as_prior:
            self.rho[cell] = PROFILE_KEPT * (log_s - np.log(rows @ np.exp(surface.phi)))
            np.clip(self.rho, -KEPT_LEFT_OVER * CELL_SD, KEPT_LEFT_OVER * CELL_SD, out=self.rho)
        self._begin(surface.phi, surface.loosened(PROFILE_MOVED_SD, PROFILE_COMMON_SD))

    def begin_like(self, other: StepTimes, moved_sd: float) -> None:
        """Begin as another began, of the same cells, of which every weight may be off by so much more."""
        self.noise, self.usual_context = other.noise, other.usual_context.copy()
        if other.origin.any():
            self.surface.restart(other.origin[0], other.origin[1:])
            self._begin(other.origin[0], self.surface.loosened(moved_sd, moved_sd))

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
        self.noise = other.noise
        buckets, lengths = min(len(self.buckets), len(other.buckets)), min(self.num_lengths, other.num_lengths)
        self.grid(self.rho)[:buckets, :lengths] = other.grid(other.kept())[:buckets, :lengths]
        self._begin(phi, covariance)

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
            self._leave_contexts()
        if not self.known and not self._warm_up(steps, log_s):
            return 0.0
        return self._learn(steps, cell, log_s, self._predicted(cell, steps.context))

    def _follow_context(self, steps: Steps) -> None:
        """How many tokens the rows of a bucket usually hold."""
        bucket = self.bucket_of[steps.batch]
        count = np.bincount(bucket, steps.num_steps, len(self.buckets))
        mean = np.bincount(bucket, steps.context * steps.num_steps, len(self.buckets)) / np.maximum(count, 1)
        passed = self.clock + float(steps.num_steps.sum()) - self.grid(self.seen_at).max(axis=1)
        rate = np.where(self.usual_context > 0.0, (count > 0) * -np.expm1(-passed / CONTEXT_REPORTS), count > 0)
        self.usual_context += rate * (mean - self.usual_context)

    def _leave_contexts(self) -> None:
        """Where contexts are twice as long as when this evidence began, it becomes the prior of what follows.

        Means over both would not show what contexts cost.
        """
        usual = float(self.usual_context.max())
        before, self.began_at = self.began_at, usual if self.began_at < 0.0 else self.began_at
        if self.known and before >= 0.0 and abs(usual - before) > CONTEXT_LEFT * (before + CONTEXT_UNIT / 4.0):
            self.began_at, self.rho = usual, self.left_over.copy()
            self._start(self.surface.phi, self.surface.loosened(LEFT_SD, 0.0))

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
        most = KEPT_LEFT_OVER * self.cell_sd
        return np.clip(self.left_over, -most, most)

    def _learn(self, steps: Steps, cell: np.ndarray, log_s: FloatArray, predicted: FloatArray) -> float:
        """Add a group to the evidence of its cells; returns the statistic of a change, if one was found, else 0."""
        noise, unsure, spans, count = self.noise**2, self.variance[cell], steps.spans, steps.num_steps
        own, alike = (
            self.evidence[cell],
            np.bincount(cell, count)[cell],
        )  # alike: steps that share what is wrong of a cell
        now, doubt = self.watch.now(spans)
        self.newest = log_s - predicted + self.log_seconds[cell], log_s - predicted
        raw = log_s - predicted - now
        clipped = self._clipped(raw, np.sqrt(unsure + noise / count + doubt), self.noise / np.sqrt(count), cell)
        # What was cut off says that the mean is elsewhere, but not where: it counts for as much less (Huber's weights).
        trust = np.abs(clipped) / np.maximum(np.maximum(np.abs(raw), np.abs(clipped)), 1e-9)
        trust *= np.where(own == 0.0, 1.0 - FIRST_OFF / alike, 1.0)
        surprise, unseen = clipped + now, alike * (1.0 + own) ** -2
        misfit = alike * unsure + (UNSEEN_SDS * self.cell_sd) ** 2 * unseen
        now, share = self.watch.follow(spans, clipped, misfit, UNSEEN_SD**2 * unseen, noise, count)
        self.clock += int(count.sum())
        self._add(cell, steps.weight * count * share * trust, predicted + surprise - now, steps.context)
        if self.clock - self.fitted_at >= min(RENEWED_SHARE * float(self.evidence.sum()), RENEWED_REPORTS):
            self.fitted_at = self.clock
            self._fit()
        else:
            self._combine()
        surprising, single = (surprise - now) / np.sqrt(unsure + noise / count), noise + count * unsure
        found = self.watch.changed(spans, steps.length, surprising, single / (noise + alike * unsure))
        if found:
            self._start_anew()
        return found

    def _clipped(self, surprise: FloatArray, width: FloatArray, own: FloatArray, cell: np.ndarray) -> FloatArray:
        """Surprises without slow steps; follows the noise on the way. own: the noise of each report alone.

        Where a group shows a cell three times their median is the yardstick, else the prediction with its doubt. A step may
        take long for any reason, but none takes less than it needs: what is quicker than believed is believed where the cell
        has hardly been seen.
        """
        centre, often = np.zeros(len(surprise)), np.bincount(cell)[cell] >= 3
        lowest = np.where(self.evidence[cell] < FEW_REPORTS, -LARGEST_DROP, -change.LARGEST_Z * width)
        for many in set(cell[often].tolist()):
            here = (cell == many).nonzero()[0]
            centre[here], width[here] = sorted(surprise[here].tolist())[len(here) // 2], own[here]
        z = (surprise - centre) / width
        # Half of all surprises lie within 0.674 standard deviations.
        outside = int(np.count_nonzero(np.abs(z) > 0.674))
        self.noise *= math.exp(NOISE_RATE * (outside - 0.5 * len(z)))
        self.noise = min(max(self.noise, NOISE_LEAST), NOISE_MOST)
        lowest[often] = -change.LARGEST_Z * width[often]
        return centre + np.minimum(np.maximum(surprise - centre, lowest), change.LARGEST_Z * width)

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
            known, noise = self.mean_log[seen] - self.rho[seen], self.noise**2 / strength[seen]
            self.surface.fit(rows, known, CELL_SD**2 + noise)
            self._judge_fit(known - np.log(rows @ np.exp(self.surface.phi)), noise)
        self._draw()

    def _judge_fit(self, error: FloatArray, noise: FloatArray) -> None:
        """How far cells lie from the surface, by those that were seen."""
        weight = CELL_SD**2 / (CELL_SD**2 + noise)
        # One cell far off is a cell far off: many say how far cells are.
        squares = np.minimum(error * error, (FAR_SDS * self.cell_sd) ** 2 + noise) - noise
        mean = (CELLS_BEFORE * CELL_SD**2 + float(weight @ squares)) / (CELLS_BEFORE + float(weight.sum()))
        self.cell_sd = min(max(math.sqrt(max(mean, 0.0)), LEAST_CELL_SD), MOST_CELL_SD)

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
        strength = self._aged() * self.cell_sd**2
        self.trust = strength / (strength + self.noise**2)
        self.left_over = self.rho + self.trust * (self.mean_log - self.log_taught - self.rho)
        self.log_seconds = self.log_surface + self.left_over
        doubt = 1.0 - self.trust
        # What was seen in other contexts than are usual now is carried over by a weight that is in doubt.
        carried = self.trust * (self.drawn_context - self.taught_context) * self.per_context
        self.own_variance = self.cell_sd**2 * doubt + carried * carried * self.surface.covariance[HELD, HELD]
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
        variance = self.surface.variance(parts / smooth[:, None]) + self.cell_sd**2
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
        """Replace the evidence, and what was believed: some of it came from a worker that does not belong here."""
        seen, size = evidence > LEAST_EVIDENCE, len(self.surface.phi)
        self.context = np.repeat(self.usual_context, self.num_lengths)
        self.rho[:], self.watch, self.noise, self.quickest = 0.0, Watch(), NOISE, []
        if self.origin.any():
            self.surface.restart(self.origin[0], self.origin[1:])
            self._start(self.origin[0], self.surface.loosened(SPOILED_SD, SPOILED_SD))
        elif seen.any():
            phi, covariance = prior(size - FIXED)
            rows = self.surface.of_length(self.rows[seen], self.lengths[seen], self.context[seen])
            self._start(phi + float(np.min(mean_log[seen] - np.log(rows @ np.exp(phi)))), covariance)
        self.known = bool(seen.any()) or bool(self.origin.any())
        self.mean_log, self.evidence = mean_log, evidence
        self.seen_at[:] = self.clock
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
