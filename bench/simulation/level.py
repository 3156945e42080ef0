"""Load, and the factor on all step times, as functions of time: the same whatever the learner does.

The factor is calibrated on vllm-h200-a.db and -b.db: unflagged latencies over 5 ms, divided by the step time of their batch
size and length in the blocks at fixed lengths, smoothed by a median over nine steps. The ratio has two modes. Recording a
/ b: fast 1.00 / 1.08, slow 1.67 / 1.65; mean stay in the slow mode 0.95 / 1.08 s, in the fast one 0.8 / 1.9 s; slow at the
start of a burst in 45 / 37% of 11 / 19 bursts; slow share of time 55 / 32%. Recording b is the usual time here, recording a
the first half minute. Within a mode the factor wanders by some 5%. Noise of single steps: 4.1 / 5.2% (median of differences
between neighbours), with 5% of the differences beyond 20%.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

EARLY_S = 30.0
START_S = 0.4  # mean time of a slow start
WANDER_S = 2.0  # memory of the wandering
GRID_S = 0.05
NUM_DRAWN = 8192  # steps for which noise is drawn; it repeats after them


class Noise(NamedTuple):
    """Randomness of step times.

    slow: factor of the slow mode; slow_s, fast_s, early_fast_s: mean stays, the last one in the first half minute;
    start_slow: chance that a burst starts slow; wander: standard deviation of the log factor in a mode. Of single steps: sd
    of the log, tail_share of them with tail_sd instead; spikes, draft_spikes: (share, factor) of steps that take longer, and
    of those that draft.
    """

    slow: float = 1.65
    slow_s: float = 1.0
    fast_s: float = 2.0
    early_fast_s: float = 0.8
    start_slow: float = 0.5
    wander: float = 0.04
    sd: float = 0.045
    tail_share: float = 0.1
    tail_sd: float = 0.2
    spikes: tuple[float, float] = (0.0, 1.0)
    draft_spikes: tuple[float, float] = (0.0, 1.0)

    def level(self, rng: np.random.Generator, duration_s: float, starts: list[float]) -> list[float]:
        """Factor on step times by cell of GRID_S. starts: of bursts."""
        num_cells = int(duration_s / GRID_S) + 400
        slow, now = np.zeros(num_cells, dtype=bool), 0.0
        while self.slow != 1.0 and now < duration_s:
            now += rng.exponential(self.early_fast_s if now < EARLY_S else self.fast_s)
            stop = now + rng.exponential(self.slow_s)
            slow[int(now / GRID_S) : int(stop / GRID_S)] = True
            now = stop
        for start in starts if self.slow != 1.0 else ():
            if rng.random() < self.start_slow:
                slow[int(start / GRID_S) : int((start + rng.exponential(START_S)) / GRID_S) + 1] = True
        heights = np.log(self.slow) + 0.06 * rng.standard_normal(num_cells)
        entered = np.maximum.accumulate(np.where(slow & ~np.roll(slow, 1), np.arange(num_cells), 0))
        kept, value, path = float(np.exp(-GRID_S / WANDER_S)), 0.0, []
        for step in (self.wander * np.sqrt(1.0 - kept**2) * rng.standard_normal(num_cells)).tolist():
            path.append(value := kept * value + step)
        factor: list[float] = np.exp(np.where(slow, heights[entered], 0.0) + path).tolist()
        return factor

    def of_steps(self, rng: np.random.Generator) -> tuple[list[float], list[float]]:
        """Factors on single steps without and with drafts, by number of the step."""
        scale = np.where(rng.random(NUM_DRAWN) < self.tail_share, self.tail_sd, self.sd)
        plain = np.exp(scale * rng.standard_normal(NUM_DRAWN) - scale**2 / 2)
        uniform = rng.random(NUM_DRAWN)
        plain *= np.where(uniform < self.spikes[0], self.spikes[1], 1.0)
        drafting = plain * np.where(1.0 - uniform < self.draft_spikes[0], self.draft_spikes[1], 1.0)
        return plain.tolist(), drafting.tolist()

    @property
    def draft_factor(self) -> float:
        """Mean factor of steps that draft, relative to those that do not."""
        share, factor = self.draft_spikes
        return 1.0 + share * (factor - 1.0)


class Load(NamedTuple):
    """Requests at a time: from each of `starts` on, `sizes`. renewed: True if all requests are new at each start."""

    starts: list[float]
    sizes: list[int]
    renewed: bool = True

    def index_at(self, now_s: float) -> int:
        """Number of the stretch at a moment."""
        return bisect_right(self.starts, now_s) - 1


class Sweep(NamedTuple):
    """Bursts with each of the sizes, up and down in turn. length_s: shortest and longest burst."""

    sizes: tuple[int, ...]
    length_s: tuple[float, float]

    def draw(self, rng: np.random.Generator, duration_s: float) -> Load:
        """Draw the bursts of a run."""
        starts, sizes, upwards = list[float](), list[int](), True
        now = 0.0
        while now < duration_s:
            for size in self.sizes if upwards else self.sizes[::-1]:
                starts.append(now)
                sizes.append(size)
                now += rng.uniform(*self.length_s)
            upwards = not upwards
        return Load(starts, sizes)


class Rollout(NamedTuple):
    """Batches that start with `most` requests, of which fewer and fewer are left until the next batch starts."""

    most: int
    length_s: float

    def draw(self, rng: np.random.Generator, duration_s: float) -> Load:
        """Draw the batches of a run."""
        starts, sizes = list[float](), list[int]()
        for start in np.arange(0.0, duration_s, self.length_s):
            shares = np.sort(rng.beta(1.0, 2.5, self.most))  # long-tailed: when each ends
            starts += [float(start), *(start + self.length_s * shares[:-1]).tolist()]
            sizes += list(range(self.most, 0, -1))
        return Load(starts, sizes, renewed=False)


class Day(NamedTuple):
    """A load that follows a sine from 1 to `most` and back, with arrivals at random."""

    most: int
    length_s: float

    def draw(self, rng: np.random.Generator, duration_s: float) -> Load:
        """Draw a run."""
        starts = np.arange(0.0, duration_s, duration_s / 400)
        mean = 1.0 + (self.most - 1) * (0.5 - 0.5 * np.cos(2 * np.pi * starts / self.length_s))
        return Load(starts.tolist(), np.clip(rng.poisson(mean), 1, self.most).tolist(), renewed=False)


class AnySize(NamedTuple):
    """Another size each time, up to `most`, so that few are seen twice."""

    most: int
    length_s: float

    def draw(self, rng: np.random.Generator, duration_s: float) -> Load:
        """Draw a run."""
        starts = np.arange(0.0, duration_s, self.length_s)
        return Load(starts.tolist(), rng.integers(1, self.most + 1, len(starts)).tolist(), renewed=False)


AnyLoad = Sweep | Rollout | Day | AnySize
