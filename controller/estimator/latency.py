"""How long a step takes: a property of the context (device, engine, dtype), by batch size, length and context length.

    T(b, s) = max(theta . f(b, s), floor) * exp(rho[bucket, s] + speed)

theta . f is a smooth surface that carries what is measured in one cell to all others; rho holds what no smooth formula
sees (tile sizes, graph padding, cliffs). speed is how much slower than usual the device is at the moment, because of
clocks, heat or a neighbour: it changes all lengths alike, so it has no say in the choice, but without it a slow second in
which only long lengths were played would make short ones look better. All three follow a Kalman-like update of log T, with
every report's surprise clipped so that a step of twenty times its usual length counts as a slightly slow one. Whatever
drifts slowly is followed by growing variances; what jumps further than speed wanders is caught by a detector that lets
theta move again and leaves everything else alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from speclen.controller.estimator.arrays import FloatArray, distinct
from speclen.controller.estimator.core import Bucket, Profile
from speclen.controller.estimator.drift import DriftDetector
from speclen.controller.estimator.features import NUM_NON_NEGATIVE, FeatureMap, features, fit_relative
from speclen.controller.estimator.tails import SlowSteps
from speclen.controller.estimator.wandering import MEMORY_REPORTS, Wandering


@dataclass(frozen=True, slots=True)
class LatencyConfig:
    """Every knob of the latency model, with unit and reason."""

    # Log-sd of a cell's residual before it was seen: kernels jump by a few percent between shapes. The start of an
    # estimate from the residuals found (empirical Bayes), where it counts as so many cells; and that estimate's range.
    residual_sd: float = 0.03
    residual_prior_cells: float = 5.0
    residual_sd_max: float = 0.15
    # Reports after which a cell's certainty has relaxed back.
    residual_memory: float = 4000.0
    # Random walk of a weight per report, relative to the weight (at least a tenth of its prior sd).
    walk: float = 0.002
    # Random step of a weight, relative to it, by which residuals may be explained; and the part of it made at a time.
    refit_step: float = 0.3
    refit_share: float = 0.3
    # Log-sd of the noise of one step: start, and the range it is tracked in.
    noise_start: float = 0.08
    noise_min: float = 0.02
    noise_max: float = 0.3
    # Relative change of the noise estimate per report that lies outside, inside its quartiles.
    noise_rate: float = 0.02
    # Largest surprise of one report, in standard deviations.
    largest_z: float = 2.5
    # Random step when the detector fires: of every weight, relative to it (at least 0.3 prior sd), and of all together.
    drift_step: float = 0.3
    common_drift_step: float = 0.5
    # Log-sd that a profiled cell counts with, measured here and measured elsewhere.
    profile_sd: float = 0.2
    foreign_profile_sd: float = 0.5
    # What all cells of a profile may have wrong: as a random step of every weight, and of all together.
    profile_step: float = 0.2
    common_profile_step: float = 0.2
    # Steps of a visited bucket after which its mean features (batch size, context length) have been renewed to 1/e.
    feature_memory: float = 64.0
    # Reports that a cold start waits for before it believes a time scale; the smallest of them counts.
    cold_reports: int = 3


# Steps that take at least 1.5 times as long as usual (and are beyond the clip) count as slow; less is noise.
SLOW_LOG_FACTOR = 0.4
FLOAT_STATE = (
    *("mean", "prior_sd", "covariance", "rho", "variance"),
    *("visits", "mean_batch", "mean_context", "last_seen"),
)
# Reports between two looks at how far cells lie from the surface.
SETTLE_REPORTS = 128


class CellNews:
    """What a group tells about one cell: posterior of how far its log time lies from the prediction."""

    __slots__ = ("before", "count", "mean", "place", "variance")

    def __init__(self, place: int, uncertainty: float) -> None:
        self.place = place  # of the cell among those of the group
        self.before = uncertainty
        self.mean = 0.0
        self.variance = uncertainty
        self.count = 0


class LatencyModel:
    """Step times of one context. Cells are [bucket, length]."""

    def __init__(self, buckets: tuple[Bucket, ...], max_length: int, config: LatencyConfig | None = None) -> None:
        self.config = config or LatencyConfig()
        self.sigma = self.config.noise_start
        self.slow = SlowSteps()
        self.scale: float | None = None  # time of a single plain step, in seconds; None until something was seen
        self.cold_times: list[float] = []
        self.detector = DriftDetector()
        self.num_reports = 0
        self.num_seen = 0
        self.residual_variance = self.config.residual_sd**2
        self.reports_until_settled = SETTLE_REPORTS
        self.recent_buckets: list[int] = []  # of the newest group
        self.wandering = Wandering()
        self.foreign = False  # whether the profile was measured elsewhere
        self._lay_out(buckets, max_length)
        self._start_from(1.0)

    def _start_from(self, scale: float) -> None:
        """The prior, if a single plain step takes `scale` seconds. mean, covariance: of theta and, last, of speed."""
        weights, self.prior_sd = (values * scale for values in self.map.prior())
        self.mean = np.append(weights, 0.0)
        self.covariance = np.diag(np.append(self.prior_sd**2, self.wandering.sd**2))

    @property
    def theta(self) -> FloatArray:
        """Weights of the surface, a view."""
        return self.mean[:-1]

    @property
    def speed(self) -> float:
        """How much longer than usual steps take at the moment, in log time."""
        return float(self.mean[-1])

    def _lay_out(self, buckets: tuple[Bucket, ...], max_length: int) -> None:
        """Allocate cells for these buckets and lengths."""
        self.buckets = buckets
        self.map = FeatureMap(buckets[-1].batch_max, max_length)
        self.knots = self.map.knots
        shape = (len(buckets), max_length + 1)
        self.rho = np.zeros(shape)
        self.variance = np.full(shape, self.residual_variance)
        self.num_steps = np.zeros(shape, dtype=np.int64)
        self.profiled = np.zeros(shape, dtype=bool)
        self.visits = np.zeros(len(buckets))
        self.lengths = np.arange(max_length + 1, dtype=float)
        self.mean_batch = np.array([(bucket.batch_min + bucket.batch_max) / 2.0 for bucket in buckets])
        self.mean_context = np.zeros(len(buckets))
        self.last_seen = np.zeros(len(buckets))  # value of num_seen at the newest visit
        self.mean_features = self._for_all_lengths(self.mean_batch, self.mean_context)
        # bucket_of[b] is the index of b's bucket.
        self.bucket_of = np.zeros(buckets[-1].batch_max + 1, dtype=np.int64)
        for bucket in buckets:
            self.bucket_of[bucket.batch_min : bucket.batch_max + 1] = bucket.index

    def _for_all_lengths(self, batch: FloatArray, context: FloatArray) -> FloatArray:
        """Features [n, lengths, d] of n batch sizes at every length."""
        count = len(self.lengths)
        rows = features(
            np.repeat(batch, count), np.tile(self.lengths, len(batch)), np.repeat(context, count), self.knots
        )
        return rows.reshape(len(batch), count, -1)

    def extend(self, buckets: tuple[Bucket, ...], max_length: int) -> None:
        """Make room for larger batches and longer lengths. Buckets that stay keep their index and what was learned."""
        old = (self.rho, self.variance, self.num_steps, self.profiled)
        mean, prior_sd, covariance = self.mean, self.prior_sd, self.covariance
        seen = (self.visits, self.mean_batch, self.mean_context, self.last_seen)
        self._lay_out(buckets, max_length)
        rows, columns = old[0].shape
        for name, cells in zip(("rho", "variance", "num_steps", "profiled"), old, strict=True):
            getattr(self, name)[:rows, :columns] = cells
        for name, means in zip(("visits", "mean_batch", "mean_context", "last_seen"), seen, strict=True):
            getattr(self, name)[:rows] = np.where(seen[0] > 0.0, means, getattr(self, name)[:rows])
        self.mean_features = self._for_all_lengths(self.mean_batch, self.mean_context)
        self._start_from(self.scale or 1.0)
        # New ramps start flat: the last known slope goes on until something else is measured.
        self.theta[len(prior_sd) :] = 0.0
        self.prior_sd[: len(prior_sd)] = prior_sd
        places = np.append(np.arange(len(prior_sd)), -1)
        self.mean[places], self.covariance[np.ix_(places, places)] = mean, covariance

    @property
    def known(self) -> bool:
        """Whether a time scale is known, so that predictions mean something."""
        return self.scale is not None

    @property
    def profiled_here(self) -> np.ndarray:
        """Which cells a profile of this very context measured, [buckets, lengths]."""
        return self.profiled & (not self.foreign)

    def _set_scale(self, scale: float) -> None:
        self.scale = scale
        self._start_from(scale)

    def seed(self, profile: Profile) -> None:
        """Start from an offline profile. Each cell counts as one observation of limited weight."""
        rows = features(
            np.array([cell.batch_size for cell in profile.cells], dtype=float),
            np.array([cell.speculation_length for cell in profile.cells], dtype=float),
            np.array([cell.mean_context_length for cell in profile.cells], dtype=float),
            self.knots,
        )
        seconds = np.array([cell.step_s for cell in profile.cells])
        mean, _ = self.map.prior()
        self._set_scale(float(np.min(seconds / (rows @ mean))))
        self.theta[:] = fit_relative(rows, seconds, self.theta, self.prior_sd)
        smooth = self._smooth(rows)
        self.foreign = profile.as_prior
        believed = self.config.foreign_profile_sd if profile.as_prior else self.config.profile_sd
        gain = rows / smooth[:, None]
        self.covariance[:-1, :-1] = np.linalg.inv(np.diag(self.prior_sd**-2.0) + gain.T @ gain / believed**2)
        self._loosen(self.config.profile_step, self.config.common_profile_step)
        for cell, predicted in zip(profile.cells, smooth.tolist(), strict=True):
            index = int(self.bucket_of[cell.batch_size]), cell.speculation_length
            self.profiled[index] = True
            if not profile.as_prior:
                self.rho[index] = min(max(0.5 * float(np.log(cell.step_s / predicted)), -0.1), 0.1)
        context = float(np.mean([cell.mean_context_length for cell in profile.cells]))
        self.mean_context[self.visits == 0.0] = context
        self.mean_features = self._for_all_lengths(self.mean_batch, self.mean_context)

    def seed_from(self, other: LatencyModel) -> None:
        """Start from another context on the same device, with the same models: its surface, half of its residuals."""
        if other.scale is None or self.known:
            return
        self.wandering.restore(other.wandering.export_state())
        self._set_scale(other.scale)
        size = min(len(self.theta), len(other.theta))
        self.theta[:size] = other.theta[:size]
        self.covariance[:size, :size] = other.covariance[:size, :size]
        rows, columns = min(len(self.rho), len(other.rho)), min(self.rho.shape[1], other.rho.shape[1])
        self.rho[:rows, :columns] = 0.5 * other.rho[:rows, :columns]
        self._loosen(0.3, 0.3)

    def _smooth(self, rows: FloatArray) -> FloatArray:
        """theta . f, kept above a twentieth of a plain step."""
        return np.maximum(rows @ self.theta, 0.05 * (self.scale or 1.0))

    def _relative_step(self, size: float, least: float) -> FloatArray:
        """A step of every weight: this part of it, or of `least` prior standard deviations where those are more."""
        step: FloatArray = size * np.maximum(np.abs(self.theta), least * self.prior_sd)
        return step

    def _loosen(self, each: float, common: float) -> None:
        """Let every weight move by a random step of this relative size, and all of them together by another."""
        step = self._relative_step(each, 0.3)
        self.covariance[:-1, :-1] += common**2 * np.outer(self.theta, self.theta) + np.diag(step**2)

    def update(
        self,
        batch: FloatArray,
        length: np.ndarray,
        context: FloatArray,
        seconds: FloatArray,
        offset: FloatArray | float = 0.0,
        senders: list[str] | None = None,
    ) -> tuple[float, FloatArray]:
        """Learn from a group of steps; returns the detector's statistic (0: quiet) and log residuals.

        All arrays are [n]. offset: how much longer each worker's steps are known to take than the fleet's, in log time;
        residuals are what remains after it. senders: who reported each, for the drift detector.
        """
        senders = senders or [""] * len(seconds)
        rows = features(batch, length, context, self.knots)
        bucket = self.bucket_of[batch.astype(np.int64)]
        self._follow_features(bucket, batch, context)
        if not self.known and not self._warm_up(rows, seconds):
            return 0.0, np.zeros(len(seconds))
        self.num_reports += len(seconds)
        self._walk(len(seconds))
        cell = bucket * self.rho.shape[1] + length
        smooth = self._smooth(rows)
        gain = np.ones((len(rows), len(self.mean)))
        gain[:, :-1] = rows / smooth[:, None]
        residual = np.log(seconds / smooth) - self.rho.reshape(-1)[cell] - self.speed - offset
        cells, values, usual = cell.tolist(), residual.tolist(), smooth.tolist()
        fired, news = self._filter(cells, values, self._uncertainty(gain, cell), usual, senders, detect=True)
        if fired:
            gain[:, :-1] *= self._accept_speed()
            self._loosen(self.config.drift_step, self.config.common_drift_step)
            _, news = self._filter(cells, values, self._uncertainty(gain, cell), usual, senders, detect=False)
        self._assimilate(gain, cells, news)
        return fired, residual

    def doubt(self, batch: FloatArray) -> None:
        """A worker turned out to be no witness: forget the residuals of the buckets where it was heard last."""
        buckets = np.unique(self.bucket_of[batch.astype(np.int64)])
        self.rho[buckets] = 0.0
        self.variance[buckets] = self.residual_variance

    def residuals(self, batch: FloatArray, length: np.ndarray, context: FloatArray, seconds: FloatArray) -> FloatArray:
        """Log of measured over predicted time, learning nothing. Zeros while nothing is known."""
        if not self.known:
            return np.zeros(len(seconds))
        smooth = self._smooth(features(batch, length, context, self.knots))
        return np.log(seconds / smooth) - self.rho[self.bucket_of[batch.astype(np.int64)], length] - self.speed

    def _follow_features(self, bucket: np.ndarray, batch: FloatArray, context: FloatArray) -> None:
        """Move the mean features of visited buckets towards what is decoded now."""
        if len(bucket) == 1:
            seen, here, means = bucket, np.ones(1), (batch, context)
        else:
            found, position = distinct(bucket.tolist())
            seen = np.array(found)
            here = np.bincount(position).astype(float)
            means = (np.bincount(position, batch) / here, np.bincount(position, context) / here)
        memory = np.minimum(self.config.feature_memory, self.visits[seen] + 1e-9)
        self.num_seen += len(bucket)
        # Contexts grow everywhere at once, so what a bucket remembers of them ages with all steps, not with its own.
        aged = self.num_seen - self.last_seen[seen]
        for mean, now, passed in zip((self.mean_batch, self.mean_context), means, (here, aged), strict=True):
            mean[seen] += (1.0 - np.exp(-passed / memory)) * (now - mean[seen])
        self.visits[seen] += here
        self.last_seen[seen] = self.num_seen
        self.mean_features[seen] = self._for_all_lengths(self.mean_batch[seen], self.mean_context[seen])
        self.recent_buckets = seen.tolist()

    def _warm_up(self, rows: FloatArray, seconds: FloatArray) -> bool:
        """Collect the first reports of a cold start; True once they gave a time scale."""
        mean, _ = self.map.prior()
        self.cold_times += (seconds / (rows @ mean)).tolist()
        if len(self.cold_times) < self.config.cold_reports:
            return False
        self._set_scale(min(self.cold_times))
        self.cold_times.clear()
        return True

    def _walk(self, num_reports: int) -> None:
        """Let variances grow with time: what is not measured becomes less certain, up to twice the prior's spread."""
        diagonal = self.covariance.diagonal()[:-1]
        step = self._relative_step(self.config.walk, 0.1)
        growth = np.where(diagonal < (2.0 * self.prior_sd) ** 2, num_reports * step**2, 0.0)
        self.covariance.flat[: -1 : len(self.mean) + 1] += growth
        self._fade_speed(math.exp(-num_reports / MEMORY_REPORTS))
        share = min(1.0, num_reports / self.config.residual_memory)
        self.variance += share * (self.residual_variance - self.variance)
        self.reports_until_settled -= num_reports
        if self.reports_until_settled < 0:
            self.reports_until_settled = SETTLE_REPORTS
            self._settle_residuals()

    def _fade_speed(self, kept: float) -> None:
        """Let the speed return to the usual one, so far that this part is kept, and become uncertain in turn."""
        self.mean[-1] *= kept
        self.covariance[-1] *= kept
        self.covariance[:, -1] *= kept
        self.covariance[-1, -1] += (1.0 - kept * kept) * self.wandering.sd**2

    def _accept_speed(self) -> float:
        """What was taken for the speed of a moment is the new usual; returns by what factor gains change."""
        factor = math.exp(self.speed)
        self.theta[:] *= factor
        self.covariance[:-1] *= factor
        self.covariance[:, :-1] *= factor
        self._fade_speed(0.0)
        return 1.0 / factor

    def _settle_residuals(self) -> None:
        """Move to the surface what cells have in common, then see how far they lie from it; unseen ones as far."""
        seen = self.num_steps > 0
        if np.count_nonzero(seen) > 3:
            self._refit_surface(seen)
        found = float((self.rho[seen] ** 2 + self.variance[seen]).sum())
        weight, start = self.config.residual_prior_cells, self.config.residual_sd**2
        self.residual_variance = (found + weight * start) / (np.count_nonzero(seen) + weight)
        self.residual_variance = min(self.residual_variance, self.config.residual_sd_max**2)
        self.variance[~seen] = self.residual_variance

    def _refit_surface(self, seen: np.ndarray) -> None:
        """Explain residuals of the cells seen by the surface, as far as it can, and leave predictions as they are.

        The filter keeps no covariance between weights and cells. So a surface that is wrong everywhere, as that of
        another device's profile, would be taken for one with large residuals, and cells never seen would stay wrong.
        """
        rows = self.mean_features[seen]
        before = self._smooth(rows)
        gain = rows / before[:, None]
        weight = 1.0 / (self.config.residual_sd**2 + self.variance[seen])
        step = self._relative_step(self.config.refit_step, 0.3)
        precision = (gain.T * weight) @ gain + np.diag(step**-2.0)
        self.theta[:] += self.config.refit_share * np.linalg.solve(precision, gain.T @ (weight * self.rho[seen]))
        np.maximum(self.theta[:NUM_NON_NEGATIVE], 0.0, out=self.theta[:NUM_NON_NEGATIVE])
        self.rho[seen] -= np.log(self._smooth(rows) / before)

    def _uncertainty(self, gain: FloatArray, cell: np.ndarray) -> list[float]:
        """Variance of each report's predicted log time, without the noise of the step itself."""
        known = np.maximum(((gain @ self.covariance) * gain).sum(axis=1), 0.0) + self.variance.reshape(-1)[cell]
        uncertainty: list[float] = known.tolist()
        return uncertainty

    def _filter(
        self,
        cells: list[int],
        residuals: list[float],
        uncertainty: list[float],
        smooth: list[float],
        senders: list[str],
        detect: bool,
    ) -> tuple[float, dict[int, CellNews]]:
        """Go through a group in order; returns the detector's statistic (0: quiet) and what each cell learned.

        Within its cell a report is compared with the reports before it, so that fifty steps of a cell whose prediction
        was off surprise once, not fifty times. With detect, drift, noise and slow steps are tracked on the way.
        """
        config, noise = self.config, self.sigma**2
        limit, outside = config.largest_z, 0
        surprises: list[float] = []
        speed, wander = self.speed, self.wandering.sd**2
        news: dict[int, CellNews] = {}
        slow: list[tuple[float, float]] = []
        for cell, residual, unsure, usual in zip(cells, residuals, uncertainty, smooth, strict=True):
            mine = news.get(cell)
            if mine is None:
                mine = news[cell] = CellNews(len(news), unsure)
            mean, variance = mine.mean, mine.variance
            deviation = math.sqrt(variance + noise)
            z = (residual - mean) / deviation
            outside += z > 0.674 or z < -0.674
            if z > limit:
                if residual - mean > SLOW_LOG_FACTOR:
                    slow.append((usual, usual * (math.exp(residual) - math.exp(mean + limit * deviation))))
                z = limit
            elif z < -limit:
                z = -limit
            weight = variance / deviation
            mine.mean = mean + weight * z
            mine.variance = variance - weight * weight
            mine.count += 1
            # For the detector against the usual speed: what wandering explains is no drift, what stays away is.
            z = (residual - mean + speed) / math.sqrt(variance + noise + wander)
            surprises.append(-limit if z < -limit else limit if z > limit else z)
        fired = self._track(senders, surprises, outside, slow, noise) if detect else 0.0
        return fired, news

    def _track(
        self,
        senders: list[str],
        surprises: list[float],
        outside: int,
        slow: list[tuple[float, float]],
        noise: float,
    ) -> float:
        """Follow drift, noise and slow steps through a group; returns the detector's statistic (0: quiet).

        outside: surprises beyond the middle half. slow: usual seconds and seconds lost of each step that was far too slow.
        """
        config, count = self.config, len(senders)
        slack, lasting = self.wandering.excuse(count, noise)
        fired = self.detector.add(senders, surprises, slack, lasting)
        self.sigma *= math.exp(config.noise_rate * (outside - 0.5 * count))
        self.sigma = min(max(self.sigma, config.noise_min), config.noise_max)
        self.slow.add(
            count, slow, settled=self.detector.resting(senders[-1], 2.0 * config.largest_z), drifted=fired != 0.0
        )
        return fired

    def _assimilate(self, gain: FloatArray, order: list[int], news: dict[int, CellNews]) -> None:
        """Joint update of the surface and of the cells seen: each cell's news count as one observation of its mean."""
        noise = self.sigma**2
        cells = np.array(list(news))
        count = np.array([mine.count for mine in news.values()])
        if len(order) > 1:
            merge = np.zeros((len(cells), len(order)))
            merge[[news[cell].place for cell in order], np.arange(len(order))] = 1.0
            gain = (merge @ gain) / count[:, None]
        # The mean that would have led to the filtered one: news are posterior means under the cell's own uncertainty.
        surprise = np.array([mine.mean * (1.0 + noise / (mine.count * mine.before)) for mine in news.values()])
        variance = self.variance.reshape(-1)
        before = variance[cells]
        spread = self.covariance @ gain.T
        total = gain @ spread
        total.flat[:: len(cells) + 1] += before + noise / count
        inverse = np.linalg.inv(total) if len(cells) > 1 else 1.0 / total
        weighted = inverse @ surprise
        self.wandering.learn(float(weighted.sum() / math.sqrt(inverse.sum())))
        self.mean += spread @ weighted
        covariance = self.covariance - spread @ inverse @ spread.T
        self.covariance = 0.5 * (covariance + covariance.T)
        self._respect_signs()
        self.rho.reshape(-1)[cells] += before * weighted
        variance[cells] = np.maximum(before - before**2 * inverse.diagonal(), 0.0)
        self.num_steps.reshape(-1)[cells] += count

    def _respect_signs(self) -> None:
        """Bring weights that a machine cannot make negative back to 0, and let the others make up for it.

        Each is conditioned on: cutting it off alone would change every prediction that it had a part in.
        """
        for _ in range(NUM_NON_NEGATIVE):
            lowest = int(self.theta[:NUM_NON_NEGATIVE].argmin())
            if self.theta[lowest] >= 0.0:
                return
            column = self.covariance[:, lowest]
            self.mean -= column * (self.theta[lowest] / column[lowest])
            self.theta[lowest] = 0.0
        np.maximum(self.theta[:NUM_NON_NEGATIVE], 0.0, out=self.theta[:NUM_NON_NEGATIVE])

    def predict(self) -> FloatArray:
        """Mean step time of every cell at the usual speed, [buckets, lengths], in seconds, slow steps included."""
        usual = self._smooth(self.mean_features) * np.exp(self.rho)
        usual *= float(np.exp(0.5 * (self.sigma**2 + self.wandering.sd**2)))
        return usual + self.slow.mean_excess(usual)

    def log_variance(self, bucket: int, against: int | None = None) -> FloatArray:
        """Variance of log T for every length of a bucket; of log T_s - log T_against where that is given.

        What is uncertain about both lengths alike cancels in the difference.
        """
        rows = self.mean_features[bucket]
        gain = rows / self._smooth(rows)[:, None]
        own = self.variance[bucket].copy()
        if against is not None:
            gain = gain - gain[against]
            own += self.variance[bucket, against]
            own[against] = 0.0
        return np.maximum(((gain @ self.covariance[:-1, :-1]) * gain).sum(axis=1), 0.0) + own

    def export_state(self) -> dict[str, Any]:
        """Everything needed to go on exactly from here, as JSON-able values."""
        arrays = (*FLOAT_STATE, "num_steps", "profiled")
        return {name: getattr(self, name).tolist() for name in arrays} | {
            "sigma": self.sigma,
            "wandering": self.wandering.export_state(),
            "scale": self.scale,
            "foreign": self.foreign,
            "cold_times": self.cold_times,
            "detector": self.detector.export_state(),
            "num_reports": self.num_reports,
            "num_seen": self.num_seen,
            "residual_variance": self.residual_variance,
            "reports_until_settled": self.reports_until_settled,
            "recent_buckets": list(self.recent_buckets),
            "slow": self.slow.export_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from an exported state of the same buckets and lengths. Raises KeyError or ValueError otherwise."""
        if np.shape(state["rho"]) != self.rho.shape:
            raise ValueError(f"state has cells {np.shape(state['rho'])}, this context has {self.rho.shape}")
        if len(state["mean"]) != len(self.mean):
            raise ValueError(f"state has {len(state['mean'])} weights, this version has {len(self.mean)}")
        for name in FLOAT_STATE:
            setattr(self, name, np.array(state[name], dtype=float))
        self.mean_features = self._for_all_lengths(self.mean_batch, self.mean_context)
        self.num_steps = np.array(state["num_steps"], dtype=np.int64)
        self.profiled = np.array(state["profiled"], dtype=bool)
        self.sigma, self.scale = float(state["sigma"]), state["scale"]
        self.foreign = bool(state.get("foreign", False))
        self.wandering.restore(state["wandering"])
        self.cold_times = [float(value) for value in state["cold_times"]]
        self.detector.restore(state["detector"])
        self.num_reports = int(state["num_reports"])
        self.num_seen = int(state["num_seen"])
        self.residual_variance = float(state["residual_variance"])
        self.reports_until_settled = int(state["reports_until_settled"])
        self.recent_buckets = [int(bucket) for bucket in state["recent_buckets"]]
        self.slow.restore(state["slow"])
