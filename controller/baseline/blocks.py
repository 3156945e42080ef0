"""Trials in the reports of one worker: a block of steps on another arm, and the blocks before and after it.

Times are the sums of whole blocks by the wall clock, so a clock that is late by a step changes nothing. The arm before and
after a trial is the one in use there; drift of the machine cancels, since the trial stands in the middle, and short blocks
cancel more of it. Batch sizes may differ a little from step to step: each time is divided by a curve of the batch size
alone, a power whose exponent is that of the worker's own steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from speclen.records import PLAIN, Arm, StepFlag, StepRecord

BLOCK_STEPS = 8  # that count, of a trial and of each neighbouring block
LEAST_STEPS = 5  # that must count on each side
LONGEST_PAUSE = 64  # steps after which a trial ends with what it has: steps with prefill do not count
# Steps of another kind than decoding, or with another arm; all others count, since a block's sum is of its wall time.
NOT_COUNTED = frozenset(
    {StepFlag.PREFILL, StepFlag.COMPILATION, StepFlag.FIRST_USE, StepFlag.MIXED_LENGTHS, StepFlag.UNKNOWN}
)
CURVE_MEMORY = 500.0  # steps


class Plan(NamedTuple):
    """A trial that was handed out. number: as in `range_of`; num_steps: at these sizes since the last trial."""

    trial_id: int
    number: int
    learned: Arm
    baseline: Arm
    uses_baseline: bool
    num_steps: int

    @property
    def in_use(self) -> Arm:
        """The arm of the neighbouring blocks."""
        return self.baseline if self.uses_baseline else self.learned

    @property
    def tried(self) -> Arm:
        """The trial's arm."""
        return self.learned if self.uses_baseline else self.baseline


class Compared(NamedTuple):
    """A finished trial. log_time: of its step time over that of the neighbouring blocks; None if too few steps count.

    seconds: of the trial at the mean of its counted steps. extra_s: seconds lost: what the uncounted steps after each change
    of arm took beyond the mean; if too few steps count, what the trial took beyond the steps before it. steps: all of the
    trial, for their accepted tokens.
    """

    plan: Plan
    batch_size: float
    log_time: float | None
    seconds: float
    extra_s: float
    steps: Sequence[StepRecord]


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

    def mean_s(self, steps: Sequence[StepRecord]) -> float:
        """Mean step time at a batch size of 1. The exponent is in 0 to 1, and 0 where batch sizes hardly differ."""
        variance, exponent = self._xx * self._weight - self._x**2, 0.0
        if variance > 0.01 * self._weight**2:
            exponent = min(max((self._xy * self._weight - self._x * self._y) / variance, 0.0), 1.0)
        return sum(step.wall_s / step.batch_size**exponent for step in steps) / len(steps)


class Blocks:
    """The newest steps of one worker. transition: steps after a change of arm that do not count."""

    def __init__(self, transition: int) -> None:
        self.transition = transition
        self._curve = Curve()
        self._before: deque[StepRecord] = deque(maxlen=BLOCK_STEPS)
        self._start(None)
        self._last_seq = self._last_probe = self._since = 0  # _since: the newest step when the trial began
        self._counts_from = 0  # seq from which steps count again

    def is_ready(self, arm: Arm) -> bool:
        """True if the newest steps are those of the arm in use, so that a trial may begin."""
        return self.plan is None and sum(step.arm in (arm, PLAIN) for step in self._before) >= LEAST_STEPS

    def begin(self, plan: Plan) -> None:
        """A trial was handed out."""
        self._since = self._last_seq
        self._start(plan)

    def _start(self, plan: Plan | None) -> None:
        self.plan = plan  # of the trial under way
        self._trial: list[StepRecord] = []  # its steps, and those of them that count
        self._counted: list[StepRecord] = []
        self._after: list[StepRecord] = []
        self._changing: list[StepRecord] = []  # after the change to the trial's arm, and back

    def add(self, step: StepRecord) -> Compared | None:
        """Take the next step; returns the trial that it completes. Lost reports leave gaps, which a trial survives."""
        if not 0 < step.seq - self._last_seq <= LONGEST_PAUSE:  # another incarnation, or a long silence
            self._start(None)
            self._before.clear()
        if step.probe_id != self._last_probe:
            self._counts_from = step.seq + self.transition
        self._last_seq, self._last_probe = step.seq, step.probe_id
        counts, settled, plan = not NOT_COUNTED & step.flags, step.seq >= self._counts_from, self.plan
        if plan is not None and step.probe_id == plan.trial_id:
            self._since = step.seq
            self._trial.append(step)
            if counts:
                (self._counted if settled else self._changing).append(step)
        elif counts and not step.probe_id:
            if settled:
                self._curve.add(step)
                (self._after if self._trial else self._before).append(step)
            elif self._trial:
                self._changing.append(step)
        if plan is None or (len(self._after) < BLOCK_STEPS and step.seq - self._since < LONGEST_PAUSE):
            return None
        return self._finish(plan)

    def _finish(self, plan: Plan) -> Compared:
        sides = [[step for step in steps if step.arm in (plan.in_use, PLAIN)] for steps in (self._before, self._after)]
        trial, counted, changing = self._trial, self._counted, self._changing
        self._before.extend(self._after)
        self._start(None)
        if min(*map(len, sides), len(counted)) < LEAST_STEPS:
            usual_s = mean_s(sides[0]) if sides[0] else 0.0
            lost_s = sum(step.wall_s - usual_s for step in trial)
            return Compared(plan, 0.0, None, 0.0, max(lost_s, 0.0), trial)
        beside_s = math.sqrt(self._curve.mean_s(sides[0]) * self._curve.mean_s(sides[1]))
        means = {True: mean_s(counted), False: mean_s(sides[0] + sides[1])}
        return Compared(
            plan,
            batch_size=sum(step.batch_size for step in counted) / len(counted),
            log_time=math.log(self._curve.mean_s(counted) / beside_s),
            seconds=len(trial) * mean_s(counted),
            extra_s=sum(step.wall_s - means[step.probe_id > 0] for step in changing),
            steps=trial,
        )


def mean_s(steps: Sequence[StepRecord]) -> float:
    """Mean wall time."""
    return sum(step.wall_s for step in steps) / len(steps)
