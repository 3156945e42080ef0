"""Plays a learner in a world: reports arrive in groups, probes are offered after each, every step is scored."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from speclen.bench.simulation.learner import Learner, ProbeRun
from speclen.records import Arm, Limits, StepRecord

GROUP_S = 0.2  # between two deliveries, as recorded: 7 reports each in recording a, 12 in b
PROBE_VALID_S = 2.0


class Step(NamedTuple):
    """A step as it happened. reports: those that left with it, its own or earlier ones.

    spent_s: its expected time; work_s: the oracle's for the same tokens of the same requests.
    """

    reports: tuple[StepRecord, ...]
    spent_s: float
    work_s: float


class World(Protocol):
    """A simulated worker. batch_size, with_prompts: of the next step; now_s: when it starts."""

    now_s: float
    duration_s: float
    arms: tuple[Arm, ...]
    limits: Limits

    @property
    def batch_size(self) -> int: ...

    @property
    def with_prompts(self) -> bool: ...

    def expected(self, batch_size: int, arm: Arm) -> tuple[float, float]:
        """True mean seconds of a step, and tokens per row, where no time is slow."""

    def step(self, arm: Arm, probe_id: int = 0) -> Step:
        """Take a step."""


class Score:
    """Record of a learner's steps, and its goodput."""

    def __init__(self) -> None:
        self.start_s: list[float] = []
        self.spent_s: list[float] = []
        self.work_s: list[float] = []

    def percent(self, from_s: float = 0.0, to_s: float = float("inf")) -> float:
        """Goodput in percent of the oracle's over steps that start in [from_s, to_s)."""
        start = np.array(self.start_s)
        here = (start >= from_s) & (start < to_s)
        return 100.0 * float(np.array(self.work_s)[here].sum() / np.array(self.spent_s)[here].sum())


def best_arm(world: World, batch_size: int) -> Arm:
    """The oracle's arm: the most true tokens per second."""

    def goodput(arm: Arm) -> float:
        seconds, tokens = world.expected(batch_size, arm)
        return tokens / seconds

    return max(world.arms, key=goodput)


class _Pending:
    """A probe on its way to the worker: begins at a step without prefill within PROBE_VALID_S."""

    def __init__(self, run: ProbeRun, until_s: float) -> None:
        self.run, self.until_s = run, until_s

    def begun(self) -> bool:
        return self.run.steps_left < self.run.probe.num_steps

    def fits(self, world: World) -> bool:
        return self.run.fits(world.batch_size) and (self.begun() or not world.with_prompts)

    def is_over(self, world: World) -> bool:
        return self.run.is_over(world.batch_size) if self.begun() else world.now_s > self.until_s


def play(world: World, learner: Learner) -> Score:
    """Let a learner select every arm until the world's time is over."""
    score, waiting, due_s = Score(), list[StepRecord](), GROUP_S
    pending: _Pending | None = None
    while world.now_s < world.duration_s:
        if world.now_s >= due_s and waiting:
            learner.observe(waiting)
            if pending is None and (probe := learner.probe_for(waiting[-1].batch_size)) is not None:
                pending = _Pending(ProbeRun(probe), world.now_s + PROBE_VALID_S)
            waiting, due_s = [], world.now_s + GROUP_S
        if pending is not None and pending.is_over(world):
            pending = None
        arm, probe_id = learner.arm_for(world.batch_size), 0
        if pending is not None and pending.fits(world):
            pending.run.steps_left -= 1
            arm, probe_id = pending.run.probe.arm, pending.run.probe.probe_id
        waiting += _scored(world, score, arm, probe_id)
    return score


def _scored(world: World, score: Score, arm: Arm, probe_id: int) -> tuple[StepRecord, ...]:
    score.start_s.append(world.now_s)
    step = world.step(arm, probe_id)
    score.spent_s.append(step.spent_s)
    score.work_s.append(step.work_s)
    return step.reports
