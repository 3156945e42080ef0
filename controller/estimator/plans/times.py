"""What steps take in which rows copy: on the surface of step times, by rows, draft passes and verified tokens.

A step in which no row has a match is a plain one, so all that those taught is known here from the start: their surface is
the prior, the cells that were seen stay where they are, and what the surface leaves over in a bucket's cells it leaves over
here, too. On top of it comes what such steps themselves showed, kept as evidence by bucket, with or without the draft model,
and by verified tokens per row. No plan has a cell of its own. What is left over is shared by a bucket's plans that draft,
and by those that do not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.times.step_time import (
    CELL_SD,
    LONGEST_S,
    SHORTEST_S,
    UNSEEN_SD,
    UNSEEN_SDS,
    StepTimes,
)
from speclen.controller.estimator.times.steps import ByStep, Spans
from speclen.controller.estimator.times.surface import Surface

# Verified tokens per row at which kinds of evidence end.
WIDTHS = np.array([1.2, 1.6, 2.2, 3.0, 4.2, 6.0, 9.0])
NUM_WIDTHS = len(WIDTHS) + 1
MOST_VERIFIED = 17.0  # tokens per row, beyond which slopes stay as they are
# Reports that one kind of evidence may count for. Of a report, in standard deviations; log-sd of one.
MOST_REPORTS, LARGEST_Z = 60.0, 2.5
# Log-sd by which the surface of such steps may differ in each weight from that of plain ones, and altogether.
MOVED_SD, COMMON_SD = 0.1, 0.1
# Log-sd by which such steps may differ from plain ones where no row copies; trust in a cell from which on it says so.
ALIKE_SD, LEAST_TRUST = 0.05, 0.2
# Reports from which on a kind of evidence has a say in what plain steps take; more than are left of it after a change.
TOLD_REPORTS = 5.0
# The surface is renewed after this part of its evidence is new, and at the latest after so many reports.
RENEWED_SHARE, RENEWED_REPORTS = 0.1, 100
# After a change of times, the evidence of before counts for so much.
KEPT_SHARE = 0.05
COUNT, LOG_S, ROWS, PASSES, DRAFTED, VERIFIED, CONTEXT = range(7)
# Log-sd by which a bucket's plans may differ from the surface together, and each by itself; reports of one plan that count.
ALL_SD, PLAN_SD, PLAN_REPORTS = 0.04, 0.03, 200.0
# Share of the rectangle beyond what rows propose from which on a backend is thought to be fed rectangles.
PADDED, PADDED_REPORTS = 0.02, 20.0


class CopiedSteps(NamedTuple):
    """Steps that copied and whose time may teach, all [n]. passes, drafted: of the draft model, and rows summed over them.

    asked: verified tokens if each row were fed its own only. offset: log time that a worker takes longer than others.
    spans: each worker and its place. plan: of the grid, which each step followed, -1 for others.
    """

    spans: Spans
    plan: np.ndarray
    batch: np.ndarray
    passes: np.ndarray
    drafted: np.ndarray
    verified: np.ndarray
    asked: np.ndarray
    context: FloatArray
    seconds: FloatArray
    weight: FloatArray
    offset: FloatArray


class CopyTimes:
    """Evidence by kind, [buckets, drafting or not, widths, 7]: sums of weight and of what the indices above name.

    played: by bucket and plan, reports and log times beyond the surface, [2, buckets, plans].
    """

    STATE = ("evidence", "surface", "since_fit", "fitted_with", "padding", "played")

    def __init__(self, times: StepTimes) -> None:
        self.times = times
        self.evidence = np.zeros((len(times.buckets), 2, NUM_WIDTHS, 7))
        self.surface = Surface(times.buckets[-1].batch_max * max(MOST_VERIFIED, float(times.num_lengths)))
        self.since_fit, self.fitted_with, self.version = 0, -1, 0
        self.padding = np.zeros(2)  # fed tokens beyond the rows' own, and those, fading
        self.rows = np.array([(b.batch_min + b.batch_max) / 2.0 for b in times.buckets])
        self.trust = np.zeros((len(times.buckets), 2))
        self.extend(np.zeros(0, dtype=bool))

    def extend(self, drafts: np.ndarray) -> None:
        """The grid is another one, of whose plans none was played. drafts: whether each does."""
        self.kinds = drafts.astype(int)
        self.played = np.zeros((2, len(self.times.buckets), len(drafts)))
        self.left_over, self.doubt = np.zeros((2, *self.played.shape[1:]))

    @property
    def rectangular(self) -> bool:
        """Whether the backend is fed rectangles: rows times the longest proposal."""
        return bool(self.padding[0] > PADDED * (self.padding[1] + 1.0))

    @property
    def sound(self) -> bool:
        """Whether all numbers are of a believable size."""
        return bool(np.isfinite(self.evidence).all() and np.abs(self.surface.phi).max() <= 60.0)

    def learn(self, steps: CopiedSteps) -> None:
        """Learn from steps, once plain ones have given a time scale."""
        kept = 1.0 - min(1.0, len(steps.batch) / PADDED_REPORTS / 5.0)
        self.padding = kept * self.padding + np.array([(steps.verified - steps.asked).sum(), steps.asked.sum()])
        if self.fitted_with < 0:
            self.follow_surface()
        times, bucket = self.times, self.times.bucket_of[steps.batch]
        times.clock += len(steps.batch)  # what is known of plain steps grows old in these, too
        rows = self.surface.features(steps.batch, steps.passes, steps.drafted, steps.verified, steps.context)
        kind = (steps.passes > 0).astype(int)
        width = np.searchsorted(WIDTHS, steps.verified / steps.batch)
        known = steps.plan >= 0
        over = np.where(known, self.left_over[bucket, steps.plan], 0.0)
        expected = np.log(rows @ np.exp(self.surface.phi)) + self._of_plain()[bucket, kind] + over
        log_s = np.log(np.minimum(np.maximum(steps.seconds, SHORTEST_S), LONGEST_S)) - steps.offset
        unsure = self._unsure(rows, bucket, kind)
        surprise, speed, share = self._without_speed(steps.spans, log_s - expected, unsure, bucket, kind)
        count = steps.weight * share
        told = np.stack(
            [np.ones(len(count)), expected + surprise - speed, steps.batch, steps.passes, steps.drafted, steps.verified]
            + [steps.batch * steps.context],
            axis=1,
        )
        np.add.at(self.evidence, (bucket, kind, width), told * count[:, None])
        self._count_played(bucket[known], steps.plan[known], count[known], (over + surprise - speed)[known])
        touched = self.evidence[bucket, kind, width]
        self.evidence[bucket, kind, width] = touched * np.minimum(
            1.0, MOST_REPORTS / np.maximum(touched[:, :1], MOST_REPORTS)
        )
        times.watch.follow_lengths(steps.spans, steps.passes)  # beside which lengths that are tried are long or short
        self._fit_if_due(len(steps.batch))
        if times.known:
            self._combine()

    def _count_played(self, bucket: np.ndarray, plan: np.ndarray, count: FloatArray, over: FloatArray) -> None:
        """Steps of plans of the grid, and what they took beyond the surface."""
        for sums, told in zip(self.played, (count, count * over), strict=True):
            np.add.at(sums, (bucket, plan), told)
        now = self.played[:, bucket, plan]
        self.played[:, bucket, plan] = now * np.minimum(1.0, PLAN_REPORTS / np.maximum(now[0], PLAN_REPORTS))

    def _unsure(self, rows: FloatArray, bucket: np.ndarray, kind: np.ndarray) -> FloatArray:
        """Variance of what is expected of steps."""
        shares, doubt = rows * np.exp(self.surface.phi), 1.0 - self.trust[bucket, kind]
        return self.surface.variance(shares / shares.sum(axis=1)[:, None]) * doubt**2 + CELL_SD**2 * doubt

    def _without_speed(
        self, spans: Spans, error: FloatArray, unsure: FloatArray, bucket: np.ndarray, kind: np.ndarray
    ) -> tuple[FloatArray, ByStep, FloatArray]:
        """Surprises, clipped, the workers' speeds after them, and what each report counts for.

        The speed of the moment is that of all of a worker's steps, and these tell of it as plain ones do. Of what is cut off
        a report says only that the mean is elsewhere. unsure: variance of what was expected; error: log times over that.
        """
        watch, noise, each = self.times.watch, self.times.noise**2, np.ones(len(error))
        now, doubt = watch.now(spans)
        raw = error - now
        reach = LARGEST_Z * np.sqrt(unsure + noise + doubt)
        clipped = np.minimum(np.maximum(raw, -reach), reach)
        share = np.abs(clipped) / np.maximum(np.abs(raw), np.maximum(np.abs(clipped), 1e-9))
        place = bucket * 2 + kind
        alike = np.bincount(place)[place]  # reports that share what is wrong of a bucket
        unseen = alike / np.square(1.0 + self.evidence[bucket, kind, :, COUNT].sum(axis=1))
        misfit = alike * (unsure + CELL_SD**2) + (UNSEEN_SDS * CELL_SD) ** 2 * unseen
        speed, shared = watch.follow(spans, clipped, misfit, UNSEEN_SD**2 * unseen, noise, each)
        return clipped + now, speed, share * shared

    def follow_surface(self) -> None:
        """Start from what plain lengths taught by now."""
        self._fit_if_due(0)

    def _fit_if_due(self, num_new: int) -> None:
        """Renew the surface where evidence here or that of plain lengths has grown."""
        self.since_fit += num_new
        due = min(RENEWED_SHARE * float(self.evidence[..., COUNT].sum()), RENEWED_REPORTS)
        if (num_new or self.fitted_with == self.times.fitted_at) and self.since_fit <= due:
            return
        self.fitted_with, self.since_fit = self.times.fitted_at, 0
        before = self._errors()
        seen, mean, log_s, count = self._means()
        if num_new:
            self.times.fit()
        theirs, mine = self.times.surface, self.surface
        size = len(theirs.phi)
        phi = np.append(theirs.phi, np.full(len(mine.phi) - size, theirs.phi[-1]))
        mine.restart(phi, _extended(theirs.loosened(MOVED_SD, COMMON_SD), len(phi)))
        if seen.any():
            alike, log_alike = self._plain_cells()
            rows = np.vstack([mine.features(*mean), alike])
            unsure = np.append(CELL_SD**2 + self.times.noise**2 / count, np.full(len(alike), ALIKE_SD**2))
            mine.fit(rows, np.append(log_s, log_alike), unsure)
        # What the surface now says itself is beyond it no more.
        self.played[1] += self.played[0] * (self._errors() - before)[:, self.kinds]
        self._combine()

    def told(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """For the plain surface, what these steps took: where all copy nobody else does, and a change would stay unseen.

        Features, log times without what plain steps leave over, variances.
        """
        _, mean, log_s, count = self._means()
        enough = count >= TOLD_REPORTS
        unsure = CELL_SD**2 + self.times.noise**2 / count[enough] + (2.0 * ALIKE_SD) ** 2
        return self.times.surface.features(*mean[:, enough]), log_s[enough], unsure

    def _plain_cells(self) -> tuple[FloatArray, FloatArray]:
        """Features of plain steps that were seen, and their log times without what the surface leaves over.

        In each bucket those without drafts and the drafts best known, so that large fleets of sizes stay quick to fit.
        """
        times = self.times
        trust = times.grid(times.trust)
        first = np.arange(len(trust)) * times.num_lengths
        cells = first if times.num_lengths == 1 else np.concatenate([first, first + 1 + trust[:, 1:].argmax(axis=1)])
        cells = cells[times.trust[cells] >= LEAST_TRUST]
        rows, lengths = times.rows[cells], times.lengths[cells]
        return self.surface.of_length(rows, lengths, times.drawn_context[cells]), times.log_surface[cells]

    def _of_plain(self) -> FloatArray:
        """What the surface of plain lengths leaves over in a bucket without drafts, and with them, [buckets, 2].

        With drafts it is one number: a cell that is wrong could not be found out by steps that copy.
        """
        times = self.times
        cells, trust = times.grid(times.left_over), times.grid(times.trust)[:, 1:] + 1e-9
        drafting = (trust * cells[:, 1:]).sum(axis=1) / np.maximum(trust.sum(axis=1), 1e-9)
        return np.stack([cells[:, 0], drafting], axis=1)

    def _means(self) -> tuple[np.ndarray, FloatArray, FloatArray, FloatArray]:
        """Kinds with evidence, their mean sums as `features` takes them, mean log times without what plain steps leave over
        the surface, and reports.
        """
        count = self.evidence[..., COUNT]
        seen = count > 0.01
        mean = self.evidence[seen] / count[seen][:, None]
        rows = np.maximum(mean[:, ROWS], 1.0)
        return (
            seen,
            np.array([rows, *mean[:, [PASSES, DRAFTED, VERIFIED]].T, mean[:, CONTEXT] / rows]),
            mean[:, LOG_S] - self._of_plain()[seen.nonzero()[:2]],
            count[seen],
        )

    def _errors(self) -> FloatArray:
        """Mean log times beyond the surface by bucket, without drafts and with them, [buckets, 2]; 0 where none was seen."""
        seen, mean, log_s, count = self._means()
        total, errors = np.zeros((2, *self.evidence.shape[:2]))
        if seen.any():
            error = log_s - np.log(self.surface.features(*mean) @ np.exp(self.surface.phi))
            bucket, kind, _ = seen.nonzero()
            np.add.at(total, (bucket, kind), count)
            np.add.at(errors, (bucket, kind), count * error)
        return errors / np.maximum(total, 1e-9)

    def _combine(self) -> None:
        """What the surface leaves over by bucket and plan: something of all that draft, or do not, and something of its own.

        By what each plan that was played took: one that is played all the time says little of what is its own.
        """
        self.version += 1
        strength = self.evidence[..., COUNT].sum(axis=2) * CELL_SD**2
        self.trust = strength / (strength + self.times.noise**2)
        count, sums = self.played
        noise = self.times.noise**2
        over = sums / np.maximum(count, 1e-9)
        weight = count / (count * PLAN_SD**2 + noise)  # 1 / (PLAN_SD^2 + noise / count)
        common = np.zeros((len(count), 2))
        for kind in (0, 1):
            mine = weight * (self.kinds == kind)
            common[:, kind] = (mine * over).sum(axis=1) / (mine.sum(axis=1) + 1.0 / ALL_SD**2)
        own = count * PLAN_SD**2 / (count * PLAN_SD**2 + noise)
        shared = common[:, self.kinds]
        self.left_over = shared + own * (over - shared)
        self.doubt = PLAN_SD**2 * (1.0 - own)

    def predict(
        self, bucket: np.ndarray, plan: np.ndarray, passes: FloatArray, drafted: FloatArray, verified: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Mean seconds of steps of plans of the grid, the gradients of their logs, [n, weights], and their own variance."""
        rows = self.rows[bucket]
        context = np.maximum(self.times.usual_context, self._context())[bucket]
        parts = self.surface.features(rows, passes, drafted, verified, context) * np.exp(self.surface.phi)
        smooth = parts.sum(axis=1)
        kind = (passes > 0.0).astype(int)
        doubt = 1.0 - self.trust[bucket, kind]
        more = self._of_plain()[bucket, kind] + self.left_over[bucket, plan]
        seconds = smooth * np.exp(more + 0.5 * self.times.noise**2)
        return seconds, parts / smooth[:, None] * doubt[:, None], CELL_SD**2 * doubt + self.doubt[bucket, plan]

    def _context(self) -> FloatArray:
        """Tokens that rows of each bucket held in steps that copied; 0 where there were none."""
        sums = self.evidence.sum(axis=(1, 2))
        mean: FloatArray = sums[:, CONTEXT] / np.maximum(sums[:, ROWS], 1.0)
        return mean

    def forget(self) -> None:
        """Times have changed: what was seen before counts for little, and is moved as plain times were."""
        self.evidence[..., LOG_S] += self.times.moved * self.evidence[..., COUNT]
        # Beyond the surface as it was: that is renewed before this is used.
        self.played[1] += self.times.moved * self.played[0]
        self.evidence *= KEPT_SHARE
        self.played *= KEPT_SHARE
        self.fitted_with = -1

    def renew(self) -> None:
        """Derive everything else after a state was restored."""
        self._combine()


def _extended(covariance: FloatArray, size: int) -> FloatArray:
    """Further weights move with the last known one, in doubt."""
    index = np.minimum(np.arange(size), len(covariance) - 1)
    wider: FloatArray = covariance[np.ix_(index, index)]
    extra = np.arange(size) >= len(covariance)
    wider[extra, extra] += 0.5
    return wider
