"""Slow component of step times: a factor on all arms alike, as a function of time.

Calibrated on vllm-h200-a.db and -b.db: unflagged latencies over 5 ms, divided by the step time of their batch size and
length in the blocks at fixed lengths, smoothed by a median over nine steps. The ratio has two modes. Recording a / b:
fast 1.00 / 1.08, slow 1.67 / 1.65; mean stay in the slow mode 0.95 / 1.08 s, in the fast one 0.8 / 1.9 s (stays cut off
by an end of a burst count half); slow at the start of a burst in 45 / 37% of 11 / 19 bursts; slow share of time 55 / 32%.
Recording b is the usual time here, recording a the first half minute. Half of the bursts start slow, for 0.4 s (25 steps).
Within a mode the level wanders by some 5%. Noise of single steps: 4.1 / 5.2% (median of differences between neighbours),
with 5% of the differences beyond 20%.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

SLOW, SLOW_SD = 1.65, 0.06
SLOW_S, FAST_S, EARLY_FAST_S = 1.0, 2.0, 0.8  # mean stays in a mode; the last one in the first EARLY_S
EARLY_S = 30.0
START_SLOW, START_S = 0.5, 0.4  # chance that a burst starts slow, and mean time until it is not
WANDER_SD, WANDER_S = 0.04, 2.0  # of the logarithm in either mode, and its memory
GRID_S = 0.05
NOISE, TAIL_SHARE, TAIL_NOISE = 0.045, 0.1, 0.2


def noisy(mean_s: float, rng: np.random.Generator) -> float:
    """Time of one step, given its mean at the moment."""
    scale = TAIL_NOISE if rng.random() < TAIL_SHARE else NOISE
    return float(mean_s * np.exp(scale * rng.standard_normal()))


class Level:
    """Factor on step times at any moment, drawn beforehand."""

    def __init__(self, rng: np.random.Generator, duration_s: float, starts: list[float]) -> None:
        """starts: moments at which bursts start."""
        num_cells = int(duration_s / GRID_S) + 200
        slow = np.zeros(num_cells, dtype=bool)
        self._draw_slow_seconds(rng, slow)
        for start in starts:
            if rng.random() < START_SLOW:
                slow[int(start / GRID_S) : int((start + rng.exponential(START_S)) / GRID_S) + 1] = True
        heights = np.log(SLOW) + SLOW_SD * rng.standard_normal(num_cells)
        entered = np.maximum.accumulate(np.where(slow & ~np.roll(slow, 1), np.arange(num_cells), 0))
        self._factor = np.exp(np.where(slow, heights[entered], 0.0) + _wander(rng, num_cells)).tolist()

    @staticmethod
    def _draw_slow_seconds(rng: np.random.Generator, slow: np.ndarray) -> None:
        now, end = 0.0, len(slow) * GRID_S
        while now < end:
            now += rng.exponential(EARLY_FAST_S if now < EARLY_S else FAST_S)
            stop = now + rng.exponential(SLOW_S)
            slow[int(now / GRID_S) : int(stop / GRID_S)] = True
            now = stop

    def at(self, now_s: float) -> float:
        """The factor at a moment."""
        return self._factor[min(int(now_s / GRID_S), len(self._factor) - 1)]


def _wander(rng: np.random.Generator, num_cells: int) -> np.ndarray:
    """A first-order autoregressive path."""
    kept = float(np.exp(-GRID_S / WANDER_S))
    steps = WANDER_SD * np.sqrt(1.0 - kept**2) * rng.standard_normal(num_cells)
    path, value = np.empty(num_cells), 0.0
    for at, step in enumerate(steps.tolist()):
        value = kept * value + step
        path[at] = value
    return path


class Bursts:
    """Loads one after the other: (start in seconds, number of requests at a time)."""

    def __init__(
        self, rng: np.random.Generator, duration_s: float, sweep: tuple[int, ...], length_s: tuple[float, float]
    ) -> None:
        """sweep: loads, played up and down in turn. length_s: shortest and longest burst."""
        self.starts: list[float] = []
        self.loads: list[int] = []
        now, upwards = 0.0, True
        while now < duration_s:
            for load in sweep if upwards else sweep[::-1]:
                self.starts.append(now)
                self.loads.append(load)
                now += rng.uniform(*length_s)
            upwards = not upwards

    def index_at(self, now_s: float) -> int:
        """Number of the burst at a moment."""
        return bisect_right(self.starts, now_s) - 1
