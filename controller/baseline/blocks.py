"""Trials in the reports of one worker: a block of steps on another arm, and the blocks beside it.

Times are the sums of whole blocks by the wall clock, so a clock that is late by a step changes nothing. The arm before and
after a trial is the one in use there; drift of the machine cancels, since the trial stands in the middle. Batch sizes may
differ a little from step to step: each time is divided by a curve of the batch size alone, a power whose exponent is that
of the worker's own steps.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from speclen.records import Arm, StepFlag, StepRecord

BLOCK_STEPS = 16  # of a trial, and of each block beside it
LEAST_STEPS = 6  # that must count on each side
LONGEST_PAUSE = 64  # steps after which a trial ends with what it has: steps with prefill do not count
# Steps of another kind than decoding, or with another arm; all others count, since a block's sum is of its wall time.
NOT_COUNTED = frozenset(
    {StepFlag.PREFILL, StepFlag.COMPILATION, StepFlag.FIRST_USE, StepFlag.MIXED_LENGTHS, StepFlag.UNKNOWN}
)
CURVE_MEMORY = 500.0  # steps


@dataclass(slots=True)
class Block:
    """Sums over the counted steps of one arm or of the arms in use. sequences: those that show what they accepted."""

    num_steps: int = 0
    seconds: float = 0.0
    scaled_s: float = 0.0  # seconds at a batch size of 1 by the curve
    tokens: float = 0.0
    sequences: float = 0.0
    batch_sizes: float = 0.0
    arms: Counter[Arm] = field(default_factory=Counter)

    def add(self, step: StepRecord, exponent: float) -> None:
        """Count a step."""
        self.num_steps += 1
        self.seconds += step.wall_s
        self.scaled_s += step.wall_s / step.batch_size**exponent
        self.tokens += step.num_tokens
        self.sequences += sum(step.accepted_histogram)
        self.batch_sizes += step.batch_size
        self.arms[step.arm] += 1

    @classmethod
    def of(cls, steps: Sequence[StepRecord], exponent: float) -> Block:
        """The block of these steps."""
        block = cls()
        for step in steps:
            block.add(step, exponent)
        return block

    @property
    def mean_s(self) -> float:
        """Mean step time at a batch size of 1 by the curve."""
        return self.scaled_s / self.num_steps

    @property
    def arm(self) -> Arm:
        """The most frequent arm."""
        return self.arms.most_common(1)[0][0]


@dataclass(frozen=True, slots=True)
class Compared:
    """A finished trial: its block, and the blocks beside it as one. log_time: of the trial's step time over theirs."""

    trial: Block
    beside: Block
    log_time: float


class Curve:
    """Exponent of step time over batch size, by regression on the worker's steps at arms in use."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, step: StepRecord) -> None:
        """Learn from a counted step."""
        keep = 1.0 - 1.0 / CURVE_MEMORY
        x, y = math.log(step.batch_size), math.log(step.wall_s)
        self._weight = keep * self._weight + 1.0
        self._x, self._y = keep * self._x + x, keep * self._y + y
        self._xx, self._xy = keep * self._xx + x * x, keep * self._xy + x * y

    @property
    def exponent(self) -> float:
        """Between 0 and 1; 0 where batch sizes hardly differ."""
        variance = self._xx * self._weight - self._x**2
        if variance < 0.01 * self._weight**2:
            return 0.0
        return min(max((self._xy * self._weight - self._x * self._y) / variance, 0.0), 1.0)


class Blocks:
    """The newest steps of one worker. transition: steps after a change of arm that do not count."""

    def __init__(self, transition: int) -> None:
        self.transition = transition
        self.curve = Curve()
        self.trial_id = 0  # of the trial under way, 0 for none
        self._before: deque[StepRecord] = deque(maxlen=BLOCK_STEPS)
        self._trial: list[StepRecord] = []
        self._after: list[StepRecord] = []
        self._last_seq = self._last_probe = self._since = 0
        self._counts_from = 0  # seq after the transition

    def begin(self, trial_id: int) -> None:
        """A trial was handed out."""
        self.trial_id, self._since = trial_id, self._last_seq
        self._trial, self._after = [], []

    @property
    def is_busy(self) -> bool:
        """True while a trial is under way."""
        return self.trial_id != 0

    def add(self, step: StepRecord) -> Compared | None:
        """Take the next step; returns the trial that it completes. Lost reports leave gaps, which a trial survives."""
        if (
            not 0 < step.seq - self._last_seq <= LONGEST_PAUSE
        ):  # another incarnation, or nothing is known of a long time
            self.trial_id, self._trial, self._after = 0, [], []
            self._before.clear()
        if step.probe_id != self._last_probe:
            self._counts_from = step.seq + self.transition
        self._last_seq, self._last_probe = step.seq, step.probe_id
        is_trial = self.trial_id != 0 and step.probe_id == self.trial_id
        if is_trial:
            self._since = step.seq
        if not NOT_COUNTED & step.flags and step.seq >= self._counts_from:
            if is_trial:
                self._trial.append(step)
            elif not step.probe_id:
                self.curve.add(step)
                (self._after if self._trial else self._before).append(step)
        if not self.trial_id or (len(self._after) < BLOCK_STEPS and step.seq - self._since < LONGEST_PAUSE):
            return None
        return self._finish()

    def _finish(self) -> Compared | None:
        before, trial, after = list(self._before), self._trial, self._after
        self.trial_id, self._trial, self._after = 0, [], []
        self._before.extend(after)
        if min(len(before), len(trial), len(after)) < LEAST_STEPS:
            return None
        exponent = self.curve.exponent
        sides = [Block.of(steps, exponent) for steps in (before, trial, after)]
        beside_s = math.sqrt(sides[0].mean_s * sides[2].mean_s)
        return Compared(sides[1], Block.of(before + after, exponent), math.log(sides[1].mean_s / beside_s))
