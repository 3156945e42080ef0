"""How many draft tokens the target accepts: a property of the pair of models, shared by all buckets and all hardware.

A step at length s tells about positions 1..s only, and only about rows whose earlier positions were accepted. So the
model counts, per position, the rows that reached it and the rows that passed it (Kaplan and Meier's estimator: the
censoring of fully accepted runs does no harm), once for everybody and once per band of load, because who is in the
batch may differ with the load. No law of decay is assumed: a profile or the shallower positions only serve as priors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from speclen.controller.estimator.arrays import FloatArray


@dataclass(frozen=True, slots=True)
class AcceptanceConfig:
    """Every knob of the acceptance model, with unit and reason."""

    # Acceptance of the first position before anything is known: a common value for a useful draft.
    cold_acceptance: float = 0.7
    # Acceptance of a position relative to the one before, before anything is known: slightly falling.
    cold_ratio: float = 0.98
    # Rows that the prior of a position counts for; a batch of 10 rows outweighs it after one step.
    prior_rows: float = 10.0
    # Rows that the shared estimate counts for within a band of load.
    band_prior_rows: float = 40.0
    # Reports after which a shared count has faded to 1/e. Slow drift only: jumps are the detector's business.
    memory_reports: float = 600.0
    # Reports with draft tokens after which a band's count has faded to 1/e.
    band_memory_reports: float = 150.0
    # The detector adds |z| - slack per report ...
    drift_slack: float = 0.5
    # ... and fires above this sum; 9 with slack 0.5 is rare among independent reports.
    drift_threshold: float = 9.0
    # Rows of a batch are easy or hard and stay for many steps, so surprises of neighbouring steps agree. Their variance
    # over blocks of so many judged reports, relative to independent rows', is tracked and taken out.
    block_reports: int = 16
    # Memory of that ratio, in blocks; its start (real traffic shows 3 to 10, the more the fewer rows there are), and the
    # range it is kept in.
    block_memory: float = 30.0
    dispersion_start: float = 4.0
    dispersion_max: float = 16.0
    # The same sums over whole blocks, whose surprise counts correctly: finds moderate changes, a little later.
    block_slack: float = 0.5
    block_threshold: float = 9.0
    # Share of all counts kept when it fires, and most rows per position: a memory that one step of a full batch outweighs,
    # so that nothing jumps to the prior.
    kept_after_drift: float = 0.05
    kept_rows: float = 20.0
    # Largest |z| of one report.
    largest_z: float = 4.0


class AcceptanceModel:
    """Per-position acceptance of one target-draft pair.

    Arrays are indexed by position (0 is the first draft token) and band: band k holds batch sizes 2**(k-1)+1 .. 2**k.
    """

    def __init__(self, max_length: int, num_bands: int, config: AcceptanceConfig | None = None) -> None:
        self.config = config or AcceptanceConfig()
        self.first_prior = self.config.cold_acceptance
        self.ratios = np.full(max_length, self.config.cold_ratio)
        self.reached = np.zeros(max_length)
        self.accepted = np.zeros(max_length)
        self.band_reached = np.zeros((num_bands, max_length))
        self.band_accepted = np.zeros((num_bands, max_length))
        self.cusum_up = 0.0
        self.cusum_down = 0.0
        self.block_up = 0.0
        self.block_down = 0.0
        self.dispersion = self.config.dispersion_start
        self.block_sum, self.block_reports = 0.0, 0  # z of independent rows, of the block that is being filled
        self.version = 0  # grows with every change; contexts of the pair refresh their tables when it moved
        self.num_reports = 0
        self._estimate()

    @property
    def max_length(self) -> int:
        """Number of positions known."""
        return len(self.reached)

    def extend(self, max_length: int, num_bands: int) -> None:
        """Make room for longer lengths and larger batches; never shrinks."""
        more = max(0, max_length - self.max_length)
        bands = max(0, num_bands - len(self.band_reached))
        if more == 0 and bands == 0:
            return
        self.ratios = np.append(self.ratios, np.full(more, self.config.cold_ratio))
        self.reached, self.accepted = np.pad(self.reached, (0, more)), np.pad(self.accepted, (0, more))
        self.band_reached = np.pad(self.band_reached, ((0, bands), (0, more)))
        self.band_accepted = np.pad(self.band_accepted, ((0, bands), (0, more)))
        self._estimate()

    def seed(self, survival: tuple[float, ...], num_rows: tuple[int, ...]) -> None:
        """Take a profile's survival as the prior: its first acceptance and the ratios between positions.

        Positions that fewer than 20 rows reached keep the last ratio: a few rows say nothing.
        """
        previous, before = 1.0, None
        for position in range(min(len(survival), self.max_length)):
            rows_here = num_rows[position] if position < len(num_rows) else 0
            rows_that_reached = rows_here * previous
            if rows_that_reached < 20 or previous <= 0.0:
                break
            acceptance = min(max(survival[position] / previous, 0.02), 0.98)
            if before is None:
                self.first_prior = acceptance
            else:
                self.ratios[position] = acceptance / before
            previous, before = survival[position], acceptance
            self.ratios[position + 1 :] = 1.0 if position == 0 else self.ratios[position]
        np.clip(self.ratios, 0.5, 1.25, out=self.ratios)
        self._estimate()

    def update(self, passed: FloatArray, reached: FloatArray, bands: np.ndarray) -> float:
        """Learn from a group of steps; returns the detector's statistic if it fired, else 0.

        passed[n, i], reached[n, i]: rows of step n whose position i was accepted, was judged. Zeros past the length.
        bands[n]: band of the step's batch size.
        """
        fired = self._detect(passed, reached, bands)
        if fired:
            self._forget()
        fade = math.exp(-len(passed) / self.config.memory_reports)
        self.reached *= fade
        self.accepted *= fade
        self.reached += reached.sum(axis=0)
        self.accepted += passed.sum(axis=0)
        if self.max_length:
            member = bands == np.arange(len(self.band_reached))[:, None]
            visits = member @ (reached[:, 0] > 0.0).astype(float)
            band_fade = np.exp(-visits / self.config.band_memory_reports)[:, None]
            self.band_reached *= band_fade
            self.band_accepted *= band_fade
            self.band_reached += member @ reached
            self.band_accepted += member @ passed
        self.num_reports += len(passed)
        self._estimate()
        return fired

    def _forget(self) -> None:
        """Keep a few rows of what was counted before the change."""
        share, rows = self.config.kept_after_drift, self.config.kept_rows
        for reached, accepted in ((self.reached, self.accepted), (self.band_reached, self.band_accepted)):
            keep = np.minimum(share, rows / np.maximum(reached[..., :1], 1.0))
            reached *= keep
            accepted *= keep

    def _detect(self, passed: FloatArray, reached: FloatArray, bands: np.ndarray) -> float:
        """Two-sided CUSUM on how far each step's accepted tokens lie from what was expected at its load."""
        config, spread = self.config, math.sqrt(self.dispersion)
        largest, slack, threshold = config.largest_z, config.drift_slack, config.drift_threshold
        acceptance = self.band_acceptance[bands]
        expected = reached * acceptance
        variances = (expected * (1.0 - acceptance)).sum(axis=1)
        judged = variances > 0.0
        if not judged.any():
            return 0.0
        independent = (passed - expected).sum(axis=1)[judged] / np.sqrt(variances[judged])
        up, down, fired = self.cusum_up, self.cusum_down, 0.0
        for z in np.clip(independent / spread, -largest, largest).tolist():
            up += z - slack
            down -= z + slack
            up = up if up > 0.0 else 0.0
            down = down if down > 0.0 else 0.0
            if up > threshold or down > threshold:
                fired = up if up > down else -down
                up = down = 0.0
        self.cusum_up, self.cusum_down = up, down
        of_blocks = self._fill_blocks(independent.tolist())
        if of_blocks and not fired:
            fired = of_blocks
            self.cusum_up = self.cusum_down = 0.0
        if fired:
            self.block_up = self.block_down = 0.0
        return fired

    def _fill_blocks(self, surprises: list[float]) -> float:
        """Add independent rows' z to blocks; returns the statistic of whole blocks if it became too high, else 0."""
        size, fired, start = self.config.block_reports, 0.0, 0
        while start < len(surprises):
            part = surprises[start : start + size - self.block_reports]
            self.block_sum += sum(part)
            self.block_reports += len(part)
            start += len(part)
            if self.block_reports == size:
                fired = self._close_block() or fired
        return fired

    def _close_block(self) -> float:
        """Learn how blocks vary, and return the blocks' statistic if it is too high, else 0."""
        config = self.config
        surprise = self.block_sum / math.sqrt(config.block_reports * self.dispersion)
        surprise = min(max(surprise, -config.largest_z), config.largest_z)
        self.block_up = max(0.0, self.block_up + surprise - config.block_slack)
        self.block_down = max(0.0, self.block_down - surprise - config.block_slack)
        ratio = min(self.block_sum**2 / config.block_reports, 4.0 * self.dispersion)
        self.dispersion += (ratio - self.dispersion) / config.block_memory
        self.dispersion = min(max(self.dispersion, 1.0), config.dispersion_max)
        self.block_sum, self.block_reports = 0.0, 0
        statistic = self.block_up if self.block_up > self.block_down else -self.block_down
        if abs(statistic) <= config.block_threshold:
            return 0.0
        self.block_up = self.block_down = 0.0
        return statistic

    def _estimate(self) -> None:
        """Bring acceptance, survival and expected tokens up to date with the counts."""
        weight = self.config.prior_rows
        prior = self.first_prior
        acceptance: list[float] = []
        for accepted, reached, ratio in zip(
            self.accepted.tolist(), self.reached.tolist(), self.ratios.tolist(), strict=True
        ):
            if acceptance:
                prior = min(max(acceptance[-1] * ratio, 0.02), 0.98)
            acceptance.append((accepted + weight * prior) / (reached + weight))
        self.acceptance = np.array(acceptance)
        weight = self.config.band_prior_rows
        self.band_acceptance = (self.band_accepted + weight * self.acceptance) / (self.band_reached + weight)
        self.band_survival = self.band_acceptance.cumprod(axis=1)
        # expected_tokens[band, s]: tokens per row and step at length s, the bonus token included.
        self.expected_tokens = np.ones((len(self.band_reached), self.max_length + 1))
        np.cumsum(self.band_survival, axis=1, out=self.expected_tokens[:, 1:])
        self.expected_tokens[:, 1:] += 1.0
        self.version += 1

    def log_tokens_variance(self, band: int) -> FloatArray:
        """Variance of log expected_tokens[band, s] for every s, by the delta method."""
        return self.log_tokens_covariance(band).diagonal().copy()

    def log_tokens_covariance(self, band: int) -> FloatArray:
        """Covariance of log expected_tokens between lengths, [S + 1, S + 1]."""
        acceptance, survival = self.band_acceptance[band], self.band_survival[band]
        # What is known about a position: its band's rows and, through the shared estimate, everybody's.
        rows = self.band_reached[band] + self.config.band_prior_rows * self.reached / (
            self.reached + self.config.band_prior_rows
        )
        variance = self.dispersion * acceptance * (1.0 - acceptance) / (rows + 5.0)
        gain = np.zeros((self.max_length + 1, self.max_length))  # d log tokens_s / d acceptance_i
        lower = np.tril(np.broadcast_to(survival[:, None], (self.max_length, self.max_length)))
        gain[1:] = lower.cumsum(axis=0) / acceptance / self.expected_tokens[band, 1:, None]
        return (gain * variance) @ gain.T

    def export_state(self) -> dict[str, Any]:
        """Everything needed to go on exactly from here, as JSON-able values."""
        return {
            "first_prior": self.first_prior,
            "ratios": self.ratios.tolist(),
            "reached": self.reached.tolist(),
            "accepted": self.accepted.tolist(),
            "band_reached": self.band_reached.tolist(),
            "band_accepted": self.band_accepted.tolist(),
            "dispersion": self.dispersion,
            "block": [self.block_sum, self.block_reports],
            "cusum_up": self.cusum_up,
            "cusum_down": self.cusum_down,
            "block_up": self.block_up,
            "block_down": self.block_down,
            "num_reports": self.num_reports,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from an exported state. Raises KeyError or ValueError if it is not one."""
        self.first_prior = float(state["first_prior"])
        for name in ("ratios", "reached", "accepted", "band_reached", "band_accepted"):
            setattr(self, name, np.array(state[name], dtype=float))
        self.band_reached = self.band_reached.reshape(-1, self.max_length)
        self.band_accepted = self.band_accepted.reshape(-1, self.max_length)
        self.dispersion = float(state["dispersion"])
        self.block_sum, self.block_reports = float(state["block"][0]), int(state["block"][1])
        self.cusum_up, self.cusum_down = float(state["cusum_up"]), float(state["cusum_down"])
        self.block_up, self.block_down = float(state["block_up"]), float(state["block_down"])
        self.num_reports = int(state["num_reports"])
        self._estimate()


def band_of(batch_size: int) -> int:
    """Band of load: 1 -> 0, 2 -> 1, 3-4 -> 2, 5-8 -> 3, ..."""
    return (batch_size - 1).bit_length()
