"""Simulated workers whose steps are drawn beforehand, and scores of policies by true means.

Everything random that does not depend on the policy is drawn once: batch sizes, requests in the batch, how far each sequence
would accept, noise and slow steps. So policies differ by their choices alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from speclen.bench.simulation.courses import Engine
from speclen.bench.simulation.drawing import World
from speclen.bench.simulation.learner import Learner, ProbeRun
from speclen.bench.simulation.world import FloatArray
from speclen.records import Arm, StepRecord

GROUP = 8  # steps of a worker that are reported together


@dataclass(frozen=True)
class Run:
    """Steps of all workers in the order in which they happened. work: the oracle's time for the tokens of the step."""

    seconds: FloatArray
    work: FloatArray

    @property
    def score(self) -> float:
        """Goodput in percent of the oracle's."""
        return 100.0 * float(self.work.sum() / self.seconds.sum())


def play(world: World, learner: Learner) -> Run:
    """Let a policy select the arm of every step; workers take turns.

    A worker reports GROUP of its steps at a time, and the group arrives delay_steps of the fleet later.
    """
    workers = [Worker(world, index) for index in range(len(world.courses))]
    under_way: deque[tuple[int, Worker, list[StepRecord]]] = deque()
    seconds: list[float] = []
    work: list[float] = []
    for step in range(len(world.courses[0].batch)):
        for worker in workers:
            spent_s, done_s = worker.step(step, learner)
            seconds.append(spent_s)
            work.append(done_s)
            under_way += [(len(seconds) + world.scenario.delay_steps, worker, group) for group in worker.groups()]
            while under_way and under_way[0][0] <= len(seconds):
                _, sender, group = under_way.popleft()
                sender.report(group, learner)
    return Run(np.array(seconds), np.array(work))


class Worker:
    """One worker of a world as it is played."""

    def __init__(self, world: World, index: int) -> None:
        scenario = world.scenario
        self.name, self.scenario, self.course = f"worker-{index}", scenario, world.courses[index]
        self.engine = Engine(world.machines[index])
        self.rate = self.course.best_rate()
        self.waiting: list[StepRecord] = []
        self.probe: ProbeRun | None = None
        last = index == len(world.courses) - 1
        self.is_faulty = last and scenario.faulty_rate > 0
        self.counts = float(not self.is_faulty)

    def step(self, step: int, learner: Learner) -> tuple[float, float]:
        """Take a step; expected seconds, and the oracle's for its tokens. Both 0 for a faulty worker."""
        course, joined = self.course, self.scenario.engine_flags and bool(self.course.joined[step])
        arm, probe_id = self._arm(int(course.batch[step]), joined, learner)
        record = course.record(step, arm, probe_id, self.scenario.classes_reported)
        mean_s, extra_s = float(course.seconds[step, arm.speculation_length]), 0.0
        if self.scenario.engine_flags:
            record, extra_s = self.engine.flagged(record, joined, mean_s)
        self.waiting += [_boast(record)] * self.scenario.faulty_rate if self.is_faulty else [record]
        work_s = float(course.tokens_now[step, arm.speculation_length] * self.rate[step])
        return (mean_s + extra_s) * self.counts, work_s * self.counts

    def _arm(self, batch: int, joined: bool, learner: Learner) -> tuple[Arm, int]:
        """The probe's arm where one is at hand and fits, else the table's."""
        arm, probe = learner.arm_for(batch, self.name), self.probe
        if probe is not None and probe.is_over(batch):
            probe = self.probe = None
        if probe is None or not probe.fits(batch) or (joined and arm.speculation_length):
            return arm, 0
        probe.steps_left -= 1
        return probe.probe.arm, probe.probe.probe_id

    def groups(self) -> list[list[StepRecord]]:
        """Full groups of reports, which are sent."""
        full = len(self.waiting) // GROUP * GROUP
        groups = [self.waiting[at : at + GROUP] for at in range(0, full, GROUP)]
        self.waiting = self.waiting[full:]
        return groups

    def report(self, group: list[StepRecord], learner: Learner) -> None:
        """A group arrives at the policy, which may answer with a probe."""
        learner.observe(group, self.name)
        if self.probe is None or self.probe.is_over(group[-1].batch_size):
            probe = learner.probe_for(group[-1].batch_size, self.name)
            self.probe = None if probe is None else ProbeRun(probe)


def _boast(record: StepRecord) -> StepRecord:
    """The false report of a step: all that was drafted was accepted."""
    return record._replace(accepted_histogram=(*(0 for _ in range(record.arm.speculation_length)), record.batch_size))
