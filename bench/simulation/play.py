"""Plays a learner in worlds: reports arrive in groups, probes are offered after each, every step is scored."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from speclen.bench.simulation.learner import Learner
from speclen.records import Arm, Probe, StepRecord

if TYPE_CHECKING:  # they import this module
    from speclen.bench.simulation.own_h200 import Truth
    from speclen.bench.simulation.scenarios import World

GROUP_S = 0.2  # between two deliveries, as recorded: 7 reports each in recording a, 12 in b
PROBE_VALID_S = 2.0
FAULTY_RATE = 16  # reports of a faulty worker for each of its steps


class Step(NamedTuple):
    """A step as it happened. reports: those that left with it, its own or earlier ones.

    spent_s: its expected time; work_s: the oracle's for the same tokens of the same requests.
    """

    reports: tuple[StepRecord, ...]
    spent_s: float
    work_s: float


class Score:
    """Record of a learner's steps, and its goodput."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, float]] = []  # start, time spent, the oracle's time for its tokens

    def percent(self, from_s: float = 0.0, to_s: float = float("inf")) -> float:
        """Goodput in percent of the oracle's over steps that start in [from_s, to_s)."""
        start, spent_s, work_s = np.array(self.steps).T
        here = (start >= from_s) & (start < to_s)
        return 100.0 * float(work_s[here].sum() / spent_s[here].sum())


def best_arm(world: World | Truth, batch_size: int) -> Arm:
    """The oracle's arm: the most true tokens per second."""

    def goodput(arm: Arm) -> float:
        seconds, tokens = world.expected(batch_size, arm)
        return tokens / seconds

    return max(world.arms, key=goodput)


def play(learner: Learner, *worlds: World, last_is_faulty: bool = False) -> Score:
    """Let a learner select every arm of some workers until the time of one is over.

    last_is_faulty: the last worker reports that all was accepted, 16 times as often, and is not scored.
    """
    score, ignored = Score(), Score()
    workers = [Worker(world, learner, f"worker-{at}", score) for at, world in enumerate(worlds)]
    if last_is_faulty:
        workers[-1].is_faulty, workers[-1].score = True, ignored
    while (worker := min(workers, key=lambda each: each.world.now_s)).world.now_s < worker.world.duration_s:
        worker.step()
    return score


class Worker:
    """A worker of a learner: a probe begins at a step without prefill within PROBE_VALID_S."""

    def __init__(self, world: World, learner: Learner, name: str, score: Score) -> None:
        self.world, self.learner, self.name, self.score = world, learner, name, score
        self.is_faulty = False
        self._waiting: list[StepRecord] = []
        self._due_s = GROUP_S
        self._probe: Probe | None = None
        self._steps_left, self._valid_until_s = 0, 0.0

    def step(self) -> None:
        """Take a step, after the delivery of the reports before it if that is due."""
        world = self.world
        if world.now_s >= self._due_s and self._waiting:
            self._deliver()
        arm, probe_id = self._arm()
        start_s, step = world.now_s, world.step(arm, probe_id)
        self.score.steps.append((start_s, step.spent_s, step.work_s))
        self._waiting += [boast(one) for one in step.reports] * FAULTY_RATE if self.is_faulty else step.reports

    def _deliver(self) -> None:
        self.learner.observe(self._waiting, self.name)
        if self._probe is None:
            self._probe = self.learner.probe_for(self._waiting[-1].batch_size, self.name)
            self._steps_left = self._probe.num_steps if self._probe else 0
            self._valid_until_s = self.world.now_s + PROBE_VALID_S
        self._waiting, self._due_s = [], self.world.now_s + GROUP_S

    def _arm(self) -> tuple[Arm, int]:
        """Arm of the next step, and the number of the probe that selects it or 0."""
        world, probe = self.world, self._probe
        if probe is not None:
            fits, begun = probe.batch_min <= world.batch_size <= probe.batch_max, self._steps_left < probe.num_steps
            if (begun and not (fits and self._steps_left)) or (not begun and world.now_s > self._valid_until_s):
                self._probe = None
            elif fits and (begun or not world.with_prompts):
                self._steps_left -= 1
                return probe.arm, probe.probe_id
        return self.learner.arm_for(world.batch_size, self.name), 0


def boast(record: StepRecord) -> StepRecord:
    """The false report of a step: all that was drafted was accepted."""
    runs = (*(0 for _ in record.accepted_histogram[1:]), record.batch_size)
    return record._replace(accepted_histogram=runs, class_histograms=(), evaluations=())
