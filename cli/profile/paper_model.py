"""The quantitative model of Su, Giannoula and Pekhimenko (arXiv 2310.18813), fitted to a profile.

    accepted tokens of a row and step   l(s) = c * s**gamma
    target pass                         t_L(b, s) = alpha_b * s + beta
    draft pass                          t_S
    time per token                      (t_L(b, s) + s * t_S) / (l(s) + 1)

A profile of whole steps shows the slope A_b = alpha_b + t_S and beta. The optimum depends on A_b, beta, c and gamma
alone: with the derivative set to zero,

    A * c * (1 - gamma) * s**gamma - beta * c * gamma * s**(gamma - 1) + A = 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speclen.records import ProfileCell

# The optimum may lie beyond the profiled lengths; further out than this the power law says nothing.
LONGEST = 64


@dataclass(frozen=True, slots=True)
class PaperModel:
    """Fitted constants. Times in seconds; slope_s[b] is A_b, the time that one more draft token costs at batch size b.

    step_error: root mean square of the relative error over the cells.
    accepted_error: the same for l(s) over the profiled lengths.
    """

    c: float
    gamma: float
    beta_s: float
    slope_s: dict[int, float]
    step_error: float
    accepted_error: float

    def accepted(self, length: float) -> float:
        """Draft tokens accepted per row and step, the bonus token not included."""
        return self.c * length**self.gamma if length > 0 else 0.0

    def step_s(self, batch_size: int, length: float) -> float:
        return self.beta_s + self.slope_s[batch_size] * length

    def s_per_token(self, batch_size: int, length: float) -> float:
        return self.step_s(batch_size, length) / (1.0 + self.accepted(length))

    def best_length(self, batch_size: int, longest: int) -> int:
        """Whole length in 0..longest with the least time per token."""
        return min(range(longest + 1), key=lambda length: self.s_per_token(batch_size, length))

    def ceiling(self, batch_size: int) -> float:
        """No length over beta * gamma / (A_b * (1 - gamma)) can be best, whatever c is: a bound without solving.

        Dividing the optimum's equation by c * s**(gamma - 1) leaves A * (1 - gamma) * s = beta * gamma - a positive
        term. Infinite where the step costs nothing more, or acceptance does not wear off.
        """
        if self.gamma >= 1 or self.slope_s[batch_size] == 0:
            return math.inf
        return max(0.0, self.beta_s * self.gamma / (self.slope_s[batch_size] * (1 - self.gamma)))

    def optimum(self, batch_size: int) -> float:
        """Real length at which the time per token stops falling, in 0..64; 0 where it never falls below length 0's.

        The derivative changes its sign once from negative to positive when gamma < 1, so bisection finds the root.
        """
        low, high = 1e-6, float(LONGEST)
        if self._derivative_sign(batch_size, high) < 0:
            return high
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (middle, high) if self._derivative_sign(batch_size, middle) < 0 else (low, middle)
        return high if self.s_per_token(batch_size, high) < self.s_per_token(batch_size, 0) else 0.0

    def _derivative_sign(self, batch_size: int, length: float) -> float:
        slope, c, gamma = self.slope_s[batch_size], self.c, self.gamma
        return slope * c * (1 - gamma) * length**gamma - self.beta_s * c * gamma * length ** (gamma - 1) + slope


def fit(cells: Sequence[ProfileCell], survival: Sequence[float]) -> PaperModel:
    """Fit the model to step times and survival by least squares of relative errors.

    Raises ValueError when the profile has fewer than two lengths over 0, or nothing was ever accepted.
    """
    accepted = np.cumsum(np.asarray(survival, dtype=float))
    if len(accepted) < 2 or accepted[0] <= 0:
        raise ValueError("the paper's model needs survival at two lengths at least, and some accepted tokens")
    if len({cell.speculation_length for cell in cells}) < 2:
        raise ValueError("the paper's model needs step times at two lengths at least")
    c, gamma = _fit_power_law(accepted)
    beta_s, slope_s = _fit_step_times(cells)
    lengths = np.arange(1, len(accepted) + 1)
    steps = [(beta_s + slope_s[cell.batch_size] * cell.speculation_length) / cell.step_s - 1 for cell in cells]
    return PaperModel(
        c=c,
        gamma=gamma,
        beta_s=beta_s,
        slope_s=slope_s,
        step_error=_root_mean_square(np.array(steps)),
        accepted_error=_root_mean_square(c * lengths**gamma / accepted - 1),
    )


def _fit_power_law(accepted: np.ndarray) -> tuple[float, float]:
    """c and gamma of c * s**gamma through accepted[s - 1], by a straight line in logarithms."""
    logs = np.log(np.arange(1, len(accepted) + 1))
    gamma, log_c = np.polyfit(logs, np.log(accepted), 1)
    return math.exp(log_c), float(gamma)


def _fit_step_times(cells: Sequence[ProfileCell]) -> tuple[float, dict[int, float]]:
    """beta and one slope per batch size, none negative: one linear system, every cell weighted by 1 / its time."""
    batch_sizes = sorted({cell.batch_size for cell in cells})
    rows = np.zeros((len(cells), 1 + len(batch_sizes)))
    for row, cell in zip(rows, cells, strict=True):
        row[0] = 1 / cell.step_s
        row[1 + batch_sizes.index(cell.batch_size)] = cell.speculation_length / cell.step_s
    solution, *_ = np.linalg.lstsq(rows, np.ones(len(cells)), rcond=None)
    beta, slopes = solution[0], np.maximum(solution[1:], 0.0)
    return float(beta), dict(zip(batch_sizes, map(float, slopes), strict=True))


def _root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
