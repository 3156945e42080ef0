"""The simulated machine and models: step times and accepted tokens after the paper's cost model.

    step time = overhead + s draft(b) + verify(b (s + 1)),  verify flat up to a knee, then linear

with a fixed bump per (b, s) that no smooth formula sees. Requests are easy or hard; a draft token of a request is
accepted with a probability that falls slowly with its position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

NUM_CLASSES = 2  # easy and hard requests


@dataclass(frozen=True)
class Machine:
    """Step times of one device. Times in seconds; bumps[b, s] multiplies."""

    overhead_s: float
    draft_s: float
    draft_row_s: float
    verify_s: float
    knee: float
    slope_s: float
    bumps: FloatArray
    cliff_at: float = np.inf  # verified tokens from which on verifying takes cliff_factor times as long
    cliff_factor: float = 1.0
    row_s: float = 0.0  # of the verifying pass per row, however few of its tokens are verified

    def seconds(self) -> FloatArray:
        """Usual step time [batch + 1, lengths]; row 0 is unused."""
        batch = np.arange(self.bumps.shape[0], dtype=float)[:, None]
        length = np.arange(self.bumps.shape[1], dtype=float)
        tokens = batch * (length + 1.0)
        verify = self.verify_s + self.slope_s * np.maximum(tokens - self.knee, 0.0)
        verify = np.where(tokens >= self.cliff_at, verify * self.cliff_factor, verify) + self.row_s * batch
        draft = length * (self.draft_s + self.draft_row_s * batch)
        total: FloatArray = (self.overhead_s + draft + verify) * self.bumps
        return total

    def slower_draft(self, factor: float) -> Machine:
        """The same device with a draft that takes longer."""
        return replace(self, draft_s=self.draft_s * factor, draft_row_s=self.draft_row_s * factor)

    def slower(self, factor: float) -> Machine:
        """Another device that takes this many times as long for everything."""
        names = ("overhead_s", "draft_s", "draft_row_s", "verify_s", "slope_s", "row_s")
        return replace(self, **{name: getattr(self, name) * factor for name in names})

    def throttled(self, factor: float) -> Machine:
        """The same device with arithmetic that many times slower: the flat part and the slope, not the overhead."""
        return replace(
            self,
            verify_s=self.verify_s * factor,
            slope_s=self.slope_s * factor,
            row_s=self.row_s * factor,
            draft_s=self.draft_s * factor,
        )


def random_machine(rng: np.random.Generator, max_batch: int, max_length: int, bump: float = 0.03) -> Machine:
    """A device with a knee between 24 and 128 tokens and a draft pass of 4% to 12% of a target pass."""
    verify = rng.uniform(0.015, 0.030)
    knee = 24.0 * (128.0 / 24.0) ** rng.uniform()
    if max_batch > 32:
        knee *= max_batch / 64.0
    largest = max_batch * (max_length + 1)
    return Machine(
        overhead_s=rng.uniform(0.001, 0.003),
        draft_s=verify * rng.uniform(0.04, 0.12),
        draft_row_s=verify * rng.uniform(0.0, 0.002) * 32.0 / max_batch,
        verify_s=verify,
        knee=knee,
        slope_s=verify * rng.uniform(1.0, 4.0) / (largest - knee),
        bumps=1.0 + bump * np.clip(rng.standard_normal((max_batch + 1, max_length + 1)), -2.5, 2.5),
    )


def random_cpu(rng: np.random.Generator, max_batch: int, max_length: int, bump: float) -> Machine:
    """A device that is busy from the first rows on: a verified token takes 3% to 9% of a plain pass, a row up to 10%."""
    verify = rng.uniform(0.008, 0.020)
    return Machine(
        overhead_s=rng.uniform(0.001, 0.003),
        draft_s=verify * rng.uniform(0.06, 0.2),
        draft_row_s=verify * rng.uniform(0.003, 0.01),
        verify_s=verify,
        knee=rng.uniform(1.0, 8.0),
        slope_s=verify * rng.uniform(0.03, 0.09),
        row_s=verify * rng.uniform(0.0, 0.1),
        bumps=1.0 + bump * np.clip(rng.standard_normal((max_batch + 1, max_length + 1)), -2.5, 2.5),
    )


@dataclass(frozen=True)
class Requests:
    """A mix of easy and hard requests. acceptance[class, position]: P(accepted | all earlier ones accepted)."""

    acceptance: FloatArray
    hard_share: float

    def scaled(self, factor: float) -> Requests:
        """Other prompts: every acceptance times a factor."""
        return replace(self, acceptance=np.clip(self.acceptance * factor, 0.01, 0.97))

    def run_probabilities(self) -> FloatArray:
        """P(accepted run is exactly j) by class at the largest length, [class, lengths]."""
        survival = np.concatenate([np.ones((NUM_CLASSES, 1)), self.acceptance.cumprod(axis=1)], axis=1)
        return survival - np.concatenate([survival[:, 1:], np.zeros((NUM_CLASSES, 1))], axis=1)

    def tokens(self, hard_share: float | FloatArray) -> FloatArray:
        """Expected tokens per row and step at every length, [lengths] or [n, lengths]."""
        survival = np.concatenate([np.ones((NUM_CLASSES, 1)), self.acceptance.cumprod(axis=1)], axis=1)
        hard = np.asarray(hard_share)[..., None]
        mixed: FloatArray = ((1.0 - hard) * survival[0] + hard * survival[1]).cumsum(axis=-1)
        return mixed


def random_requests(rng: np.random.Generator, max_length: int) -> Requests:
    """Easy requests with acceptance 0.75 to 0.92, hard ones 0.4 to 0.65, falling by 1% to 3% a position."""
    first = np.array([rng.uniform(0.75, 0.92), rng.uniform(0.40, 0.65)])
    fall = rng.uniform(0.01, 0.03)
    return Requests(first[:, None] * (1.0 - fall) ** np.arange(max_length), rng.uniform(0.3, 0.6))
