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
from collections.abc import Callable

import numpy as np

from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.core import Bucket
from speclen.controller.estimator.times.change import Watch, left_behind
from speclen.controller.estimator.times.steps import Steps
from speclen.controller.estimator.times.surface import CONTEXT_UNIT, HELD, HELD_DRAFT, Surface, prior
from speclen.controller.estimator.times.surprise import clipped, weight

# Log-sd of what the surface leaves over in a cell: kernels jump by a few percent between shapes. Of what it has left over a
# new surface keeps at most the second value: more may be the time of before a change.
CELL_SD, LEAST_CELL_SD, MOST_CELL_SD, CELLS_BEFORE, FAR_SDS, KEPT_LEFT_OVER = 0.04, 0.03, 0.5, 10.0, 3.0, 2.5
# Most reports that a cell may count for; log-sd by which its times may drift per report.
MOST_EVIDENCE, WALK = 100.0, 0.0004
# Log-sd of the noise of one step: start and range, and its relative change per report outside its quartiles.
NOISE, NOISE_LEAST, NOISE_MOST, NOISE_RATE = 0.08, 0.02, 0.3, 0.02
# After a change: log-sd by which each weight may have moved, and all together.
CHANGED_SD, CHANGED_COMMON_SD = 0.7, 0.5
# Where contexts have changed evidence becomes the next prior: by how much weights may have moved (log-sd).
LEFT_SD = 0.05
# Reports before a time scale is believed (the quickest counts: the first steps of an engine are slow).
COLD_REPORTS = 3
# Of what the surface leaves over, the standard deviations that a cell never seen may be off by, when asked about the speed.
# And log-sd by which it may be off when it is asked about a jump of the speed.
UNSEEN_SDS, UNSEEN_SD = 2.0, 0.5
# The surface is renewed after this part of the reports that its evidence counts for, and at the latest after so many.
RENEWED_SHARE, RENEWED_REPORTS = 0.05, 200
# Reports, of any batch size, over which the usual context length of a bucket is averaged, for each worker that tells it.
CONTEXT_REPORTS = 16.0
# Evidence below which a cell is not fitted.
LEAST_EVIDENCE = 0.01
SHORTEST_S, LONGEST_S = 1e-7, 1e5
# A log time or a variance beyond this comes of numbers that are none.
MOST_LOG = 100.0


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
        # What steps in which rows copied say: features, log times without what cells leave over, variances (plans/times.py).
        # One of each group of workers that has these step times.
        self.beside: list[Callable[[], tuple[FloatArray, FloatArray, FloatArray]]] = []
        self.learned_before = False  # from reports, when there were fewer cells
        self.moved = 0.0  # by how much, in log time, the last change moved everything
        self.quickest: list[float] = []  # of the first reports: log time over the prior's
        self.origin = np.zeros((1 + len(self.surface.phi), len(self.surface.phi)))  # first prior, mean above covariance
        self.noise, self.cell_sd = NOISE, CELL_SD  # log-sd of one report, and of what the surface leaves over
        self.clock, self.fitted_at = 0, 0  # clock: reports so far
        # Of the newest group: cells, log times in the usual context, and over what was believed.
        self.newest: tuple[np.ndarray, FloatArray, FloatArray] = (np.zeros(0, dtype=int), *np.zeros((2, 0)))
        self.heard_at = [0.0] * len(buckets)  # newest of seen_at, by bucket
        self.start(*prior(len(self.surface.knots)))

    def start(self, phi: FloatArray, covariance: FloatArray) -> None:
        """Begin with a new prior; what is kept of the evidence so far is in it and in rho."""
        self.surface.restart(phi, covariance)
        self.evidence[:] = 0.0
        self._draw()

    def begin(self, phi: FloatArray, covariance: FloatArray) -> None:
        """Begin with what is known before any report, to which what was spoiled goes back."""
        self.known, self.origin = True, np.vstack([phi, covariance])
        self.start(phi, covariance)

    @property
    def has_learned(self) -> bool:
        """Whether any of this is from reports: then no profile replaces it."""
        return self.learned_before or bool(self.num_seen.any())

    def grid(self, cells: FloatArray) -> FloatArray:
        """A view [buckets, lengths] of values by cell."""
        return cells.reshape(len(self.buckets), self.num_lengths)

    def cell_of(self, batch: np.ndarray, length: np.ndarray) -> np.ndarray:
        """The cells of steps."""
        cells: np.ndarray = self.bucket_of[batch] * self.num_lengths + length
        return cells

    def update(self, steps: Steps) -> float:
        """Learn from a group; returns the statistic of a change, if one was found, else 0."""
        cell, count = self.cell_of(steps.batch, steps.length), steps.num_steps
        seconds = np.minimum(np.maximum(steps.seconds, SHORTEST_S), LONGEST_S)
        log_s = np.log(seconds) - steps.offset
        np.add.at(self.num_seen, cell, count)
        np.add.at(self.total_s, cell, seconds * count)
        if steps.context.any():
            least, most = self.watch.follow_contexts(steps.spans, steps.context, count)
            steps = steps._replace(context=np.minimum(steps.context, most))
            self._follow_context(self.bucket_of[steps.batch], np.maximum(steps.context, least) * count, count)
            self._leave_contexts()
        if not self.known and not self._warm_up(steps, log_s):
            return 0.0
        return self._learn(steps, cell, log_s)

    def _follow_context(self, bucket: np.ndarray, tokens: FloatArray, count: FloatArray) -> None:
        """How many tokens the rows of a bucket usually hold. tokens: of each report, summed over its steps."""
        summed, steps = np.bincount(bucket, tokens).tolist(), np.bincount(bucket, count).tolist()
        clock, memory = self.clock + sum(steps), CONTEXT_REPORTS * max(len(self.watch.contexts), 1)
        for at in set(bucket.tolist()):
            usual = float(self.usual_context[at])
            rate = -math.expm1((self.heard_at[at] - clock) / memory) if usual > 0.0 else 1.0
            self.usual_context[at] = usual + rate * (summed[at] / steps[at] - usual)

    def _leave_contexts(self) -> None:
        """Where contexts are half as long again as when this evidence began, it becomes the prior of what follows.

        Means over both would not show what contexts cost. Those of most workers must be: one alone ends no evidence.
        """
        usual = float(np.maximum.reduce(self.usual_context))
        before, self.began_at = self.began_at, usual if self.began_at < 0.0 else self.began_at
        if self.known and before >= 0.0 and left_behind(usual, before) and self.watch.contexts_left():
            self.watch.contexts_begin()
            self.began_at, self.rho = usual, self.left_over.copy()
            self.start(self.surface.phi, self.surface.loosened(LEFT_SD, 0.0))

    def _warm_up(self, steps: Steps, log_s: FloatArray) -> bool:
        """Gather the first reports until a time scale is known."""
        surface = self.surface
        rows = surface.of_length(steps.batch, steps.length, steps.context)
        self.quickest += (log_s - np.log(rows @ np.exp(surface.phi))).tolist()
        self.known = len(self.quickest) >= COLD_REPORTS
        if self.known:
            mean, covariance = prior(len(surface.knots))
            self.start(mean + min(self.quickest), covariance)
        return self.known

    def _start_anew(self) -> None:
        """After a change: the present speed becomes the usual one, weights may move, cells keep what the surface leaves."""
        self.rho, self.moved = self.kept(), self.watch.settle()
        self.start(self.surface.phi + self.moved, self.surface.loosened(CHANGED_SD, CHANGED_COMMON_SD))

    def settle_if_away(self) -> float:
        """After steps that only told of the speed: begin anew where it stays away; returns the statistic, or 0."""
        found = self.watch.away() if self.known else 0.0
        if found:
            self._start_anew()
        return found

    def kept(self) -> FloatArray:
        """What the surface leaves over, as far as a new one may start with it."""
        most = KEPT_LEFT_OVER * self.cell_sd
        return np.clip(self.left_over, -most, most)

    def _learn(self, steps: Steps, cell: np.ndarray, log_s: FloatArray) -> float:
        """Add a group to the evidence of its cells; returns the statistic of a change, if one was found, else 0."""
        noise, unsure, spans, count = self.noise**2, self.variance[cell], steps.spans, steps.num_steps
        own, believed = self.evidence[cell], self.log_seconds[cell]
        alike = np.bincount(cell, count)[cell]  # steps that share what is wrong of a cell
        # At the usual speed, in the context that each step had.
        predicted = believed + np.log1p((steps.context - self.drawn_context[cell]) * self.per_context[cell])
        raw = log_s - predicted
        self.newest = cell, raw + believed, raw
        now, doubt = self.watch.now(spans)
        raw = raw - now
        single = noise / count
        kept, left, outside = clipped(raw, np.sqrt(unsure + single + doubt), np.sqrt(single), cell, own)
        self.noise = min(max(self.noise * math.exp(NOISE_RATE * outside), NOISE_LEAST), NOISE_MOST)
        surprise, shared, unseen = kept + now, alike * unsure, alike / np.square(1.0 + own)
        misfit = shared + (UNSEEN_SDS * self.cell_sd) ** 2 * unseen
        now, share = self.watch.follow(spans, kept, misfit, UNSEEN_SD**2 * unseen, noise, count)
        self.clock += int(count.sum())
        counts = steps.weight * count * share * weight(left, own, alike)
        self._add(cell, counts, predicted + surprise - now, steps.context)
        if self.clock - self.fitted_at >= min(RENEWED_SHARE * float(np.add.reduce(self.evidence)), RENEWED_REPORTS):
            self.fitted_at = self.clock
            self.fit()
        else:
            self._combine()
        surprising = (surprise - now) / np.sqrt(unsure + single)
        found = self.watch.changed(spans, steps.length, surprising, (noise + count * unsure) / (noise + shared))
        if found:
            self._start_anew()
        return found

    def _add(self, cell: np.ndarray, weight: FloatArray, log_s: FloatArray, context: FloatArray) -> None:
        """Means of the cells' evidence with the news."""
        total = np.bincount(cell, weight, self.num_cells)
        seen = total.nonzero()[0]
        total, known = total[seen], self._aged(seen)
        sum_now = known + total
        for mean, values in ((self.mean_log, log_s), (self.context, context)):
            news = np.bincount(cell, weight * values, self.num_cells)[seen]
            mean[seen] = (known * mean[seen] + news) / sum_now
        self.evidence[seen] = np.minimum(sum_now, MOST_EVIDENCE)
        self.seen_at[seen] = self.clock
        for bucket in set((seen // self.num_lengths).tolist()):
            self.heard_at[bucket] = self.clock
        self.over[seen] = self.mean_log[seen] - self.log_taught[seen] - self.rho[seen]

    def _aged(self, cell: np.ndarray) -> FloatArray:
        """Reports that the evidence of cells counts for, now that times may have drifted since."""
        evidence = self.evidence[cell]
        strength: FloatArray = evidence / (
            1.0 + evidence * ((WALK / self.noise) ** 2 * (self.clock - self.seen_at[cell]))
        )
        return strength

    def fit(self) -> None:
        """The surface anew, from its prior and the cells seen since."""
        seen = self.evidence.nonzero()[0]
        strength = self._aged(seen)
        enough = strength > LEAST_EVIDENCE
        seen, strength = seen[enough], strength[enough]
        if len(seen):
            rows, held = self.usual[seen], self.rows[seen] * self.context[seen] / CONTEXT_UNIT
            rows[:, HELD], rows[:, HELD_DRAFT] = held, held * self.lengths[seen]
            known, noise = self.mean_log[seen] - self.rho[seen], self.noise**2 / strength
            news = [rows, known, CELL_SD**2 + noise]
            if self.beside:
                news = [np.concatenate(each) for each in zip(news, *(told() for told in self.beside), strict=True)]
            self.surface.fit(*news)
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
        moved = (self.taught_context - self.drawn_context) * self.per_context
        self.log_taught = self.log_surface + np.log1p(moved)
        # What was seen in other contexts than are usual now is carried over by a weight that is in doubt.
        self.carried_variance = moved * moved * self.surface.covariance[HELD, HELD]
        self.shares = self.usual * (weights / smooth[:, None])
        self.surface_variance = self.surface.variance(self.shares)
        self.before, self.over = self.log_surface + self.rho, self.mean_log - self.log_taught - self.rho
        self._combine()

    def _combine(self) -> None:
        """Surface and cells together: log_seconds, and variance of it, of every cell at the usual speed.

        trust: g of aged evidence, v n / (v n + noise) with n = evidence / (1 + evidence walk^2 age / noise).
        """
        self.version += 1
        own = self.cell_sd**2
        aged = self.evidence * (own + WALK**2 * (self.clock - self.seen_at))
        self.trust = trust = self.evidence * own / (aged + self.noise**2)
        self.log_seconds = self.before + trust * self.over
        doubt = 1.0 - trust
        self.variance = doubt * (doubt * self.surface_variance + own) + trust * trust * self.carried_variance

    @property
    def left_over(self) -> FloatArray:
        """What the surface leaves over in each cell."""
        more: FloatArray = self.rho + self.trust * self.over
        return more

    def relative_variance(self, bucket: int, against: int) -> FloatArray:
        """Variance of log T_s - log T_against for every length of a bucket: what is unsure about both alike cancels."""
        cells = slice(bucket * self.num_lengths, (bucket + 1) * self.num_lengths)
        trust = self.trust[cells]
        gain = self.shares[cells] * (1.0 - trust)[:, None]
        own = self.cell_sd**2 * (1.0 - trust) + trust * trust * self.carried_variance[cells]
        own += own[against]
        own[against] = 0.0
        return self.surface.variance(gain - gain[against]) + own

    def seconds(self) -> FloatArray:
        """Mean step time of every cell at the usual speed, [buckets, lengths]."""
        return self.grid(mean_seconds(self.log_seconds, self.noise))

    @property
    def sound(self) -> bool:
        """Whether all numbers are of a believable size; NaN is of none."""
        largest = np.maximum.reduce
        return bool(largest(np.abs(self.log_seconds)) < MOST_LOG and largest(self.variance) < MOST_LOG)

    def renew(self) -> None:
        """Derive everything else after a state was restored."""
        self.watch.renew()
        self.heard_at = self.grid(self.seen_at).max(axis=1).tolist()
        self.judge()


def mean_seconds(log_s: FloatArray, noise: float) -> FloatArray:
    """Means of lognormal times within what a step can take."""
    return np.minimum(np.maximum(np.exp(log_s + 0.5 * noise**2), SHORTEST_S), LONGEST_S)
