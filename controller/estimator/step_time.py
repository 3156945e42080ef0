"""How long a step takes: what was seen of every cell, and a surface through it that cannot turn negative.

The state is evidence: per cell (batch sizes of a bucket x length) the mean log time of its reports and for how many reports
it counts. Everything else is derived from it anew, so nothing can be confidently wrong where nothing was seen:

    log T(b, s) = (1 - g) (log m + rho0) + g y        g = v / (v + noise / n)
    m = sum_i exp(phi_i) f_i(rows, draft passes, verified tokens, context)

y, n: the cell's evidence. The surface m is monotone and positive by construction: positive weights exp(phi_i) on features
that grow. Its weights are the most probable ones given prior and cells (a few Newton steps in phi; the gradient of log m
is a set of shares that sum to 1, so it cannot blow up), and their covariance is the inverse of a sum of positive
matrices. v is the variance of what no smooth formula sees (tile sizes, graph padding, cliffs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from controller.arrays import FloatArray
from controller.core import Bucket, Profile
from controller.estimator.change import LASTS, MOST_WITNESSES, WANDERING_LASTS, WANDERING_SLACK, Change, Speed

# Weights of the features before anything is known, as multiples of a plain step's time, and their log-sds: constant, any
# draft pass, draft passes, rows in draft passes, rows, held context (1024 tokens) per target and per draft pass, and the
# slope per verified token, in segments that end where the number of verified tokens has doubled. On a GPU few verified
# tokens cost next to nothing, on a CPU each 3% to 9%, hence the wide slopes. Neighbouring slopes resemble each other.
WEIGHTS = (0.8, 0.03, 0.08, 0.0008, 0.003, 0.004, 0.0004)
WEIGHT_SDS = (0.4, 1.2, 0.8, 1.2, 1.5, 1.5, 1.5)
SLOPE, SLOPE_SD, SLOPE_RESEMBLANCE = 0.005, 1.6, 0.6
FIRST_SEGMENT = 8
CONTEXT_UNIT = 1024.0
HELD, HELD_DRAFT, FIXED = 5, 6, len(WEIGHTS)
# Log-sd of the time of a plain step before the first report, once a few were seen.
SCALE_SD = 0.3
# Log-sd of what the surface leaves over in a cell: kernels jump by a few percent between shapes.
CELL_SD = 0.04
# Most reports that a cell's evidence may count for. Log-sd by which times may drift per report: of a cell by itself, and of a
# length that was not played in any bucket, up to the last value.
MOST_EVIDENCE, WALK, LENGTH_WALK, MOST_STALE = 100.0, 0.0004, 0.0015, 0.15
# Log-sd of the noise of one step: start and range, and its relative change per report outside its quartiles.
NOISE, NOISE_LEAST, NOISE_MOST, NOISE_RATE = 0.08, 0.02, 0.3, 0.02
# A report surprises by at most so many standard deviations: a step of twenty times its time is a slightly slow one.
LARGEST_Z = 2.5
# A change of step times: slack and sum of surprises, in standard deviations.
SLACK, THRESHOLD, TILT_SLACK, TILT_THRESHOLD = 0.5, 12.0, 0.5, 10.0
# After a change: log-sd by which each weight may have moved, and all together.
CHANGED_SD, CHANGED_COMMON_SD = 0.5, 0.5
# Reports over which the usual length of a worker is averaged.
TILT_REPORTS = 50.0
# Of what a surface leaves over in a cell a new one starts with at most this: more may be the time of before the change.
KEPT_LEFT_OVER = 0.1
# What a profile counts for: log-sd of its cells where it was measured here and elsewhere; what all may have wrong.
PROFILE_SD, FOREIGN_SD, PROFILE_MOVED_SD, PROFILE_COMMON_SD = 0.1, 0.4, 0.2, 0.2
# Reports before a time scale is believed (the quickest counts: the first steps of an engine are slow).
COLD_REPORTS = 3
# The surface is renewed when its evidence has grown by this part, or after so many reports.
RENEWED_SHARE, RENEWED_REPORTS = 0.02, 64
# Reports over which the usual context length of a bucket is averaged.
CONTEXT_REPORTS = 64.0
TAIL = 4.0
# Reports of a cell from which the shown interval holds their mean.
SHOWN_REPORTS = 5
SHORTEST_S, LONGEST_S = 1e-7, 1e5
# Log weights stay within e^+-60; a fit takes at most so many steps, mostly one; cells that count for less are not fitted.
LARGEST_LOG, NEWTON_STEPS, LEAST_EVIDENCE = 60.0, 12, 0.01


def features(
    rows: FloatArray, passes: FloatArray, drafted: FloatArray, verified: FloatArray, held: FloatArray, knots: FloatArray
) -> FloatArray:
    """Features [n, 7 + knots] of n steps: rows, draft passes, rows summed over them, verified tokens, held context.

    A length s means s passes, s * rows drafted, (s + 1) * rows verified; rows with unlike plans have other sums.
    """
    out = np.empty((len(rows), FIXED + len(knots)))
    out[:, 0] = 1.0
    out[:, 1] = passes > 0.0
    out[:, 2] = passes
    out[:, 3] = drafted
    out[:, 4] = rows
    out[:, HELD] = held
    out[:, HELD_DRAFT] = held * passes
    widths = np.append(np.diff(knots), np.inf)
    np.clip(verified[:, None] - knots, 0.0, widths, out=out[:, FIXED:])
    return out


def knots_to(verified: float) -> FloatArray:
    """Where segments of verified tokens begin: 0, 8, 16, 32, ... up to half of the most there can be."""
    knots = [0.0, float(FIRST_SEGMENT)]
    while knots[-1] * 2.0 <= verified / 2.0:
        knots.append(knots[-1] * 2.0)
    return np.array(knots)


def of_length(batch: np.ndarray, length: np.ndarray, context: FloatArray, knots: FloatArray) -> FloatArray:
    """Features of steps in which every row drafts `length` tokens. context: mean tokens held per row."""
    return features(batch, length, length * batch, (length + 1.0) * batch, batch * context / CONTEXT_UNIT, knots)


def prior(num_knots: int) -> tuple[FloatArray, FloatArray]:
    """Mean [d] and covariance [d, d] of the log weights, for a plain step that takes 1."""
    mean = np.log(np.append(WEIGHTS, np.full(num_knots, SLOPE)))
    covariance = np.zeros((len(mean), len(mean)))
    covariance[range(FIXED), range(FIXED)] = np.square(WEIGHT_SDS)
    distance = np.abs(np.arange(num_knots)[:, None] - np.arange(num_knots))
    covariance[FIXED:, FIXED:] = SLOPE_SD**2 * SLOPE_RESEMBLANCE**distance
    return mean, covariance + SCALE_SD**2


def most_probable(
    mean: FloatArray, precision: FloatArray, rows: FloatArray, log_s: FloatArray, sd2: FloatArray, start: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Log weights most probable given a normal prior and log times of variances sd2, and their covariance.

    Newton's method (Gauss and Newton's), at most 1 in any log weight at a time. A time far from the surface loses weight, as
    if errors had Student's distribution with 4 degrees of freedom: cliffs are for the cells to know. How far is far is
    judged by the doubt of the prior, too.
    """
    phi, spread = start, np.linalg.inv(precision)
    for _ in range(NEWTON_STEPS):
        parts = rows * np.exp(phi)
        smooth = parts.sum(axis=1)
        shares = parts / smooth[:, None]
        error = log_s - np.log(smooth)
        share = sd2 / (sd2 + ((shares @ spread) * shares).sum(axis=1))
        weight = 1.0 / (sd2 + 0.25 * share * error * error)
        moved = mean - phi
        pull = precision * min(1.0, (TAIL + len(phi)) / (TAIL + float(moved @ precision @ moved)))
        information = pull + (shares.T * weight) @ shares
        step = np.linalg.solve(information, shares.T @ (weight * error) + pull @ moved)
        phi = np.clip(phi + np.clip(step, -1.0, 1.0), -LARGEST_LOG, LARGEST_LOG)
        if np.abs(step).max() < 0.02:
            break
    return phi, np.linalg.inv(information)


class StepTimes:
    """Step times of workers that are alike. Cells are [bucket, length], flat where an index is called cell."""

    STATE = (
        *(
            "mean_log",
            "evidence",
            "context",
            "rho0",
            "seen_at",
            "length_at",
            "seen_s",
            "num_seen",
            "profiled",
            "usual_context",
            "usual",
        ),
        *("phi0", "precision0", "phi", "covariance"),
    )

    def __init__(self, buckets: tuple[Bucket, ...], max_length: int) -> None:
        self.known = False
        self.noise = NOISE
        self.speeds: dict[str, Speed] = {}  # by worker: machines are shared and throttle each for itself
        self.surprise: FloatArray = np.zeros(0)  # of the newest group: log times over the usual ones
        self.change = Change(SLACK, THRESHOLD)  # of all times
        self.tilt = Change(TILT_SLACK, TILT_THRESHOLD)  # of longer lengths' against shorter ones'
        self.clock = 0.0  # reports so far
        self.tilted = 0
        self.quickest: list[float] = []  # of the first reports: log time over the prior's
        self.profiled_here = False
        self._lay_out(buckets, max_length)
        self._start(*prior(len(self.knots)))

    def _lay_out(self, buckets: tuple[Bucket, ...], max_length: int) -> None:
        self.buckets, self.num_lengths = buckets, max_length + 1
        self.knots = knots_to(buckets[-1].batch_max * (max_length + 1.0))
        cells = len(buckets) * self.num_lengths
        # Evidence by cell: mean log time without speed, reports it counts for, their mean context; what earlier regimes
        # left over the surface; mean and number of all reports as they came; whether a profile measured it.
        self.mean_log, self.evidence, self.context, self.rho0, self.seen_at = np.zeros((5, cells))
        self.length_at = np.zeros(self.num_lengths)  # report at which a length was last seen, as seen_at for cells
        self.seen_s, self.num_seen, self.profiled = np.zeros((3, cells))
        self.usual_context = np.zeros(len(buckets))
        self.rows = np.repeat([(b.batch_min + b.batch_max) / 2.0 for b in buckets], self.num_lengths)
        self.passes = np.tile(np.arange(self.num_lengths, dtype=float), len(buckets))
        self.usual = of_length(self.rows, self.passes, self.context, self.knots)
        self.bucket_of = np.zeros(buckets[-1].batch_max + 1, dtype=np.int64)
        for bucket in buckets:
            self.bucket_of[bucket.batch_min : bucket.batch_max + 1] = bucket.index

    def _start(self, phi: FloatArray, covariance: FloatArray) -> None:
        """Begin a regime with these log weights; what is kept of the one before is in them and in rho0."""
        most = 1.25 * np.sqrt(prior(len(self.knots))[1].diagonal())
        shrink = np.minimum(1.0, most / np.sqrt(covariance.diagonal()))
        covariance = covariance * np.outer(shrink, shrink)
        self.phi0, self.precision0 = phi, np.linalg.inv(covariance)
        self.phi, self.covariance = phi, covariance
        self.evidence[:] = 0.0
        self.evidence_fitted, self.since_fitted = 0.0, 0
        self._draw()

    def seed(self, profile: Profile) -> None:
        """Start from an offline profile: a surface through its cells, which may all be off, and half of what it leaves."""
        batch = np.array([cell.batch_size for cell in profile.cells])
        length = np.array([cell.speculation_length for cell in profile.cells])
        context = np.array([cell.mean_context_length for cell in profile.cells])
        log_s = np.log(np.clip([cell.step_s for cell in profile.cells], SHORTEST_S, LONGEST_S))
        rows = of_length(batch, length, context, self.knots)
        phi, covariance = prior(len(self.knots))
        phi = phi + float(np.min(log_s - np.log(rows @ np.exp(phi))))
        sd = FOREIGN_SD if profile.as_prior else PROFILE_SD
        fitted, left = most_probable(phi, np.linalg.inv(covariance), rows, log_s, np.full(len(rows), sd * sd), phi)
        self.known, self.profiled_here = True, not profile.as_prior
        self.rho0[:] = 0.0
        if not profile.as_prior:
            cell = self.bucket_of[batch] * self.num_lengths + length
            self.rho0[cell] = np.clip(0.5 * (log_s - np.log(rows @ np.exp(fitted))), -KEPT_LEFT_OVER, KEPT_LEFT_OVER)
        self.profiled[self.bucket_of[batch] * self.num_lengths + length] = 1.0
        self.usual_context[:] = context.mean()
        self._start(fitted, left + PROFILE_MOVED_SD**2 * np.eye(len(left)) + PROFILE_COMMON_SD**2)

    def seed_from(self, other: StepTimes, moved_sd: float) -> None:
        """Start from what other workers' steps say, of which every weight may be off by so much."""
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
        self.grid(self.rho0)[:buckets, :lengths] = np.clip(
            other.grid(other.left_over)[:buckets, :lengths], -KEPT_LEFT_OVER, KEPT_LEFT_OVER
        )
        self._start(phi, covariance)

    def grid(self, cells: FloatArray) -> FloatArray:
        """A view [buckets, lengths] of values by cell."""
        return cells.reshape(len(self.buckets), self.num_lengths)

    def update(
        self,
        batch: np.ndarray,
        length: np.ndarray,
        context: FloatArray,
        seconds: FloatArray,
        offset: FloatArray,
        weight: FloatArray,
        senders: list[str],
    ) -> float:
        """Learn from a group of steps, all [n]; returns the statistic of a change, if one was found, else 0.

        offset: log time that each sender's steps are known to take longer than the others'. weight: what each counts for.
        Reports of one sender stand side by side.
        """
        bucket = self.bucket_of[batch]
        steps = _Steps(bucket * self.num_lengths + length, np.log(np.clip(seconds, SHORTEST_S, LONGEST_S)) - offset)
        steps.context, steps.weight = context, weight
        steps.spans = [(self._speed(sender), sender, place) for sender, place in spans_of(senders)]
        np.add.at(self.num_seen, steps.cell, 1.0)
        np.add.at(self.seen_s, steps.cell, (seconds - self.seen_s[steps.cell]) / self.num_seen[steps.cell])
        rows = None
        if context.any():
            rows = of_length(batch, length, context, self.knots)
            known = self.usual_context[bucket]
            self.usual_context[bucket] = known + (context - known) / np.where(known > 0.0, CONTEXT_REPORTS, 1.0)
        if not self.known and not self._warm_up(batch, length, steps):
            return 0.0
        found = self._detect(steps, rows)
        if found:
            self._start_anew()
        self._learn(steps, rows)
        return found

    def _speed(self, sender: str) -> Speed:
        """Of a worker; in a very large fleet the last ones share theirs."""
        known = self.speeds.get(sender)
        if known is None:
            known = self.speeds.setdefault(sender if len(self.speeds) < MOST_WITNESSES else "", Speed())
        return known

    def _warm_up(self, batch: np.ndarray, length: np.ndarray, steps: _Steps) -> bool:
        """Gather the first reports until a time scale is known."""
        smooth = of_length(batch, length, steps.context, self.knots) @ np.exp(self.phi)
        self.quickest += (steps.log_s - np.log(smooth)).tolist()
        if len(self.quickest) < COLD_REPORTS:
            return False
        self.known = True
        mean, covariance = prior(len(self.knots))
        self._start(mean + min(self.quickest), covariance)
        return True

    def _predicted(self, steps: _Steps, rows: FloatArray | None) -> FloatArray:
        """Log time of each step at the usual speed, in the context that it had."""
        predicted = self.log_seconds[steps.cell]
        if rows is not None:
            predicted = predicted + np.log(rows @ np.exp(self.phi)) - self.log_surface[steps.cell]
        return predicted

    def _detect(self, steps: _Steps, rows: FloatArray | None) -> float:
        """Look for a change: what wandering speed explains is none, what stays away is."""
        surprise, found = steps.log_s - self._predicted(steps, rows), 0.0
        variance = self.variance[steps.cell] + self.noise**2
        for speed, sender, place in steps.spans:
            z = surprise[place] / np.sqrt(variance[place] + speed.sd**2)
            z = np.clip(z, -LARGEST_Z, LARGEST_Z).tolist()
            share = speed.share
            found = self.change.add(sender, z, WANDERING_SLACK * share, LASTS + WANDERING_LASTS * share) or found
        return found

    def _start_anew(self) -> None:
        """After a change: the present speed becomes the usual one, weights may move, cells keep what the surface leaves."""
        self.rho0 = np.clip(self.left_over, -KEPT_LEFT_OVER, KEPT_LEFT_OVER)
        usual = float(np.median([speed.mean for speed in self.speeds.values()]))
        for speed in self.speeds.values():
            speed.mean -= usual
        moved = CHANGED_SD**2 * np.eye(len(self.phi)) + CHANGED_COMMON_SD**2
        self._start(self.phi + usual, self.covariance + moved)

    def _learn(self, steps: _Steps, rows: FloatArray | None) -> None:
        """Add a group to the evidence of its cells."""
        n, noise = len(steps.cell), self.noise**2
        predicted = self._predicted(steps, rows)
        cells, place = np.unique(steps.cell, return_inverse=True)
        member = (place == np.arange(len(cells))[:, None]).astype(float)
        count, unsure = member.sum(axis=1), self.variance[steps.cell]
        now, doubt = np.empty((2, n))  # speed of each step's worker before, and variance of it
        for speed, _, span in steps.spans:
            now[span], doubt[span] = speed.mean, speed.variance
        surprise = steps.log_s - predicted - now
        # Where a group shows a cell three times its median is the yardstick, else the prediction with its doubt.
        centre, width = np.zeros(n), np.sqrt(unsure + noise + doubt)
        for many in np.flatnonzero(count >= 3.0).tolist():
            here = place == many
            centre[here], width[here] = np.median(surprise[here]), self.noise
        z = (surprise - centre) / width
        clipped = centre + np.clip(z, -LARGEST_Z, LARGEST_Z) * width
        self._learn_noise(z)
        self.surprise = clipped + now
        certain = np.empty(n)
        for speed, _, span in steps.spans:
            size = span.stop - span.start
            speed.learn(float(clipped[span].mean()), float(unsure[span].mean()), noise, size)
            now[span] = speed.mean
            # What the speed may have wrong all reports of the worker have wrong together.
            certain[span] = noise / (noise + size * speed.variance)
        weight = member * (steps.weight * certain)
        total = weight.sum(axis=1)
        news = weight @ (predicted + self.surprise - now) / total
        self.clock += n
        known = self.aged()[cells]
        more = total / (known + total)
        self.mean_log[cells] += more * (news - self.mean_log[cells])
        self.context[cells] += more * (weight @ steps.context / total - self.context[cells])
        self.evidence[cells] = np.minimum(known + total, MOST_EVIDENCE)
        self.seen_at[cells] = self.length_at[cells % self.num_lengths] = self.clock
        self.since_fitted += n
        seen = float(self.evidence.sum())
        if seen > (1.0 + RENEWED_SHARE) * self.evidence_fitted or self.since_fitted >= RENEWED_REPORTS:
            self.evidence_fitted, self.since_fitted = seen, 0
            self._fit()
        self._combine()
        self._watch_tilt(steps, (self.surprise - now) / np.sqrt(unsure + noise))

    def _watch_tilt(self, steps: _Steps, surprise: FloatArray) -> None:
        """Longer lengths against the usual ones: a change that the speed of the moment would hide."""
        length = steps.cell % self.num_lengths
        for speed, sender, span in steps.spans:
            signed = surprise[span] * np.sign(length[span] - round(speed.usual_length))
            speed.usual_length += (float(length[span].mean()) - speed.usual_length) * min(
                1.0, len(signed) / TILT_REPORTS
            )
            found = self.tilt.add(sender, np.clip(signed[signed != 0.0], -LARGEST_Z, LARGEST_Z).tolist())
            if found:
                self._start_anew()
                self.tilted += 1

    def aged(self) -> FloatArray:
        """Reports that each cell's evidence counts for, now that times may have drifted since."""
        drift = (WALK / self.noise) ** 2 * (self.clock - self.seen_at)
        strength: FloatArray = self.evidence / (1.0 + self.evidence * drift)
        return strength

    def _learn_noise(self, z: FloatArray) -> None:
        """Half of all surprises lie within 0.674 standard deviations."""
        outside = int(np.count_nonzero(np.abs(z) > 0.674))
        factor = math.exp(NOISE_RATE * (outside - 0.5 * len(z)))
        self.noise = min(max(self.noise * factor, NOISE_LEAST), NOISE_MOST)

    def _fit(self) -> None:
        """The surface anew, from the regime's start and the cells seen since."""
        strength = self.aged()
        seen = np.flatnonzero(strength > LEAST_EVIDENCE)
        if not len(seen):
            return
        rows = self.usual[seen]
        context = self.context[seen]
        if context.any():
            rows = of_length(self.rows[seen], self.passes[seen], context, self.knots)
        variance = CELL_SD**2 + self.noise**2 / strength[seen]
        log_s = self.mean_log[seen] - self.rho0[seen]
        self.phi, self.covariance = most_probable(self.phi0, self.precision0, rows, log_s, variance, self.phi)
        self._draw()

    def _draw(self) -> None:
        """The surface over all cells, in their usual context and in that of their evidence, and how sure it is."""
        theta = np.exp(self.phi)
        if self.usual_context.any():
            held = self.rows * np.repeat(self.usual_context, self.num_lengths) / CONTEXT_UNIT
            self.usual[:, HELD], self.usual[:, HELD_DRAFT] = held, held * self.passes
        parts = self.usual * theta
        smooth = parts.sum(axis=1)
        self.log_surface = np.log(smooth)
        self.log_taught = self.log_surface
        if self.context.any():
            held = self.rows * self.context / CONTEXT_UNIT - self.usual[:, HELD]
            self.log_taught = np.log(smooth + held * (theta[HELD] + theta[HELD_DRAFT] * self.passes))
        self.shares = parts / smooth[:, None]
        self.surface_variance = np.maximum(((self.shares @ self.covariance) * self.shares).sum(axis=1), 0.0)
        self._combine()

    def _combine(self) -> None:
        """Surface and cells together: log_seconds, and variance of it, of every cell at the usual speed."""
        noise, cell = self.noise**2, CELL_SD**2
        strength = self.aged()
        self.trust = strength * cell / (strength * cell + noise)
        self.left_over = self.rho0 + self.trust * (self.mean_log - self.log_taught - self.rho0)
        self.log_seconds = self.log_surface + self.left_over
        doubt = 1.0 - self.trust
        stale = np.minimum(LENGTH_WALK**2 * (self.clock - self.length_at), MOST_STALE**2)
        self.own_variance = cell * doubt + np.tile(stale, len(self.buckets))
        self.variance = doubt * doubt * self.surface_variance + self.own_variance

    def relative_variance(self, bucket: int, against: int) -> FloatArray:
        """Variance of log T_s - log T_against for every length of a bucket: what is unsure about both alike cancels."""
        cells = slice(bucket * self.num_lengths, (bucket + 1) * self.num_lengths)
        gain = self.shares[cells] * (1.0 - self.trust[cells])[:, None]
        gain = gain - gain[against]
        own = self.own_variance[cells] + self.own_variance[cells][against]
        own[against] = 0.0
        return np.maximum(((gain @ self.covariance) * gain).sum(axis=1), 0.0) + own

    def seconds(self) -> FloatArray:
        """Mean step time of every cell at the usual speed, [buckets, lengths]."""
        return self.grid(np.exp(self.log_seconds + 0.5 * self.noise**2))

    @property
    def wandering_sd(self) -> float:
        """How far machines' speeds wander, in log time."""
        return max((speed.sd for speed in self.speeds.values()), default=0.0)

    def interval(self) -> tuple[FloatArray, FloatArray]:
        """Bounds of each cell's mean step time, 95%, that hold what was seen where enough was."""
        seconds, spread = self.seconds().reshape(-1), np.exp(1.96 * np.sqrt(self.variance + self.wandering_sd**2))
        low, high = seconds / spread, seconds * spread
        seen = self.num_seen >= SHOWN_REPORTS
        return (
            np.where(seen, np.minimum(low, self.seen_s), low),
            np.where(seen, np.maximum(high, self.seen_s), high),
        )

    def source(self, cell: int) -> str:
        """What a cell rests on: its own reports, a profile, both; for one that nobody measured, what the others rest on."""
        online, profiled = bool(self.num_seen[cell]), bool(self.profiled[cell])
        if not online and not profiled:
            online, profiled = bool(self.num_seen.any()), bool(self.profiled.any())
        return "both" if profiled and online else "profile" if profiled else "online" if online else "prior"

    def rebuild(self, mean_log: FloatArray, evidence: FloatArray) -> None:
        """Replace the evidence: some of it came from a worker that does not belong here."""
        self.mean_log, self.evidence = mean_log.copy(), evidence.copy()
        self.rho0 = 0.5 * self.rho0
        self.speeds.clear()
        self.change.forget()
        self.tilt.forget()
        self.seen_at[:] = self.clock
        self._fit()
        self._combine()

    @property
    def sound(self) -> bool:
        """Whether all numbers can be represented."""
        return bool(np.isfinite(self.log_seconds).all() and np.isfinite(self.variance).all())

    def export_state(self) -> dict[str, Any]:
        """Everything needed to go on exactly from here, as JSON-able values."""
        return {name: getattr(self, name).tolist() for name in self.STATE} | {
            "known": self.known,
            "noise": self.noise,
            "profiled_here": self.profiled_here,
            "quickest": self.quickest,
            "fitted": [self.evidence_fitted, self.since_fitted],
            "speeds": {sender: speed.export_state() for sender, speed in self.speeds.items()},
            "change": self.change.export_state(),
            "tilt": self.tilt.export_state(),
            "clock": self.clock,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from an exported state of the same cells. Raises KeyError or ValueError otherwise."""
        for name in self.STATE:
            values = np.array(state[name], dtype=float)
            if values.shape != getattr(self, name).shape:
                raise ValueError(f"state has {name} of {values.shape}, expected {getattr(self, name).shape}")
            setattr(self, name, values)
        self.known, self.noise = bool(state["known"]), float(state["noise"])
        self.profiled_here, self.quickest = bool(state["profiled_here"]), [float(v) for v in state["quickest"]]
        self.evidence_fitted, self.since_fitted = float(state["fitted"][0]), int(state["fitted"][1])
        self.speeds = {}
        for sender, values in state["speeds"].items():
            self._speed(sender).restore(values)
        self.change.restore(state["change"])
        self.tilt.restore(state["tilt"])
        self.clock = float(state["clock"])
        self._draw()


class _Steps:
    """A group of steps: cells, log seconds, context, weights, all [n]; spans: each worker's speed, name and place."""

    __slots__ = ("cell", "context", "log_s", "spans", "weight")

    def __init__(self, cell: np.ndarray, log_s: FloatArray) -> None:
        self.cell, self.log_s = cell, log_s


def spans_of(senders: Sequence[str]) -> list[tuple[str, slice]]:
    """Each sender with its place in a group. One that appears twice has two places."""
    spans, start = [], 0
    for sender, members in groupby(senders):
        end = start + sum(1 for _ in members)
        spans.append((sender, slice(start, end)))
        start = end
    return spans
