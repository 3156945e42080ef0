"""Sampling of reports: workers report fewer steps while the event loop spends too much of its time on them.

A worker reports 64 consecutive steps out of each 64 x sample_every, so that sampled steps still have their neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Share of the time above which sample_every doubles, and below which it halves: learning takes half a core at most (it
# pauses for as long as it takes), the rest is for messages. Halving doubles the share, which must not double it again.
BUSY_SHARE, IDLE_SHARE = 0.4, 0.15
# Seconds over which the share is measured: workers learn of a change within one, and what they have sent drains.
PERIOD_S = 3.0
MAX_SAMPLE_EVERY = 1024


class Sampling:
    """Measures time spent on reports. sample_every: 1, 2, 4, ...: told to every worker."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.sample_every = 1
        self._clock = clock
        self._since = clock()
        self._spent_s = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the time of the block."""
        started = self._clock()
        try:
            yield
        finally:
            self._spent_s += self._clock() - started

    def judge(self) -> None:
        """Choose sample_every anew, once a period. To be called about once a second."""
        elapsed = self._clock() - self._since
        if elapsed < PERIOD_S:
            return
        share, self._spent_s, self._since = self._spent_s / elapsed, 0.0, self._clock()
        if share > BUSY_SHARE:
            self.sample_every = min(2 * self.sample_every, MAX_SAMPLE_EVERY)
        elif share < IDLE_SHARE:
            self.sample_every = max(self.sample_every // 2, 1)
