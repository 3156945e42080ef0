"""Simulated workers whose steps are drawn beforehand, and scores of policies by true means.

Everything random that does not depend on the policy is drawn once: batch sizes, requests in the batch, how far each sequence
would accept, noise, slow steps and pauses. So policies differ by their choices alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from speclen.bench.simulation.faulty import distorted
from speclen.bench.simulation.learner import ProbeRun
from speclen.bench.simulation.scenarios import Scenario, hard_share_at
from speclen.bench.simulation.traffic import Traffic, traffic
from speclen.bench.simulation.world import (
    NUM_CLASSES,
    FloatArray,
    Machine,
    random_cpu,
    random_machine,
    random_requests,
)
from speclen.records import Arm, Limits, Probe, Profile, ProfileCell, StepFlag, StepRecord

MAX_LENGTH = 8
GROUP = 8  # steps of a worker that are reported together
PROFILED_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PAUSE_S = (0.1, 0.4)
SLOW_FACTOR = (5.0, 20.0)
OTHER_BUMP = 0.03  # of the device that a foreign profile was measured on
PROFILE_NOISE = 0.015  # log-sd of its cells
FIRST_USE_FACTOR = 1.25  # of a step whose shape the engine meets for the first time
# Mean lengths of a neighbour's bursts and of the quiet between them, in steps: what a shared core shows.
NEIGHBOUR_STEPS, NEIGHBOUR_AWAY_STEPS = 50.0, 100.0


class Player(Protocol):
    """A policy in the simulator."""

    def observe(self, records: list[StepRecord], worker: str) -> None:
        """Learn from a group of steps of one worker."""

    def arm_for(self, batch_size: int, worker: str) -> Arm:
        """Select the arm of a worker's next step."""

    def probe_for(self, batch_size: int, worker: str) -> Probe | None:
        """An arm to explore. Asked after every group of reports, unless the worker still has one."""


@dataclass(frozen=True)
class Course:
    """One worker's steps, drawn beforehand. [steps] or [steps, lengths].

    seconds: true mean of every length at each step. tokens: true mean over all requests, by which the oracle selects;
    tokens_now: given the requests in the batch, by which everybody is scored. runs: sequences by the run that they would
    accept at the largest length. factor, pause: noise of the step. joined: True if a request has just come.
    """

    batch: np.ndarray
    context: FloatArray
    seconds: FloatArray
    tokens: FloatArray
    tokens_now: FloatArray
    runs: np.ndarray
    factor: FloatArray
    pause: FloatArray
    joined: np.ndarray
    runs_by_class: np.ndarray  # [steps, classes, lengths]

    def best_rate(self) -> FloatArray:
        """The oracle's seconds per token and sequence at each step."""
        steps, lengths = np.arange(len(self.batch)), (self.tokens / self.seconds).argmax(axis=1)
        rate: FloatArray = self.seconds[steps, lengths] / self.tokens_now[steps, lengths]
        return rate

    def record(self, step: int, arm: Arm, probe_id: int, with_classes: bool) -> StepRecord:
        """The report of one step with an arm."""
        batch, length = int(self.batch[step]), arm.speculation_length
        taken = max(self.seconds[step, length] * self.factor[step] + self.pause[step], 1e-5)
        classes: tuple[tuple[int, tuple[int, ...]], ...] = ()
        if with_classes:
            runs = enumerate(self.runs_by_class[step])
            classes = tuple((kind, histogram_of(mine, length)) for kind, mine in runs if mine.any())
        return StepRecord(
            *(step + 1, batch, arm, float(taken), histogram_of(self.runs[step], length), float(self.context[step]), 1),
            probe_id=probe_id,
            class_histograms=classes,
            num_drafted_sequences=batch if length else 0,
            num_verified_tokens=batch * (1 + length),
        )


class Engine:
    """Flags of a worker's steps, and the time that a choice of arm adds to them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.used: set[tuple[int, int]] = set()
        self.last_length = -1

    def flagged(self, record: StepRecord, joined: bool, mean_s: float) -> tuple[StepRecord, float]:
        """The report as a worker sends it, and the seconds that the choice of its arm added to the step.

        mean_s: true mean of such a step.
        """
        batch, length = record.batch_size, record.arm.speculation_length
        found, extra_s = {StepFlag.PREFILL} if joined else set(), 0.0
        if (batch, length) not in self.used:
            self.used.add((batch, length))
            found.add(StepFlag.FIRST_USE)
            extra_s += (FIRST_USE_FACTOR - 1.0) * mean_s
        if self.last_length == 0 < length:
            found.add(StepFlag.CATCH_UP)
            extra_s += self.machine.draft_s + self.machine.draft_row_s * batch
        self.last_length = length
        return record._replace(latency_s=record.latency_s + extra_s, flags=frozenset(found)), extra_s


@dataclass(frozen=True)
class Run:
    """Steps of all workers in the order in which they happened. work: the oracle's time for the tokens of the step."""

    seconds: FloatArray
    work: FloatArray

    @property
    def score(self) -> float:
        """Goodput in percent of the oracle's."""
        return 100.0 * float(self.work.sum() / self.seconds.sum())


class World:
    """One seed of one scenario: machine, requests, profile and the courses of its workers."""

    def __init__(self, scenario: Scenario, seed: int, num_steps: int = 12_000) -> None:
        self.scenario = scenario
        self.limits = Limits(scenario.max_batch, MAX_LENGTH)
        self.rng = np.random.default_rng([seed, len(scenario.name), sum(map(ord, scenario.name))])
        self.machine = self._machine()
        self.requests = random_requests(self.rng, MAX_LENGTH)
        self.profile = self._profile()
        steps = int(num_steps * scenario.run_share) // scenario.num_workers
        changes = scenario.machines or (lambda machine: machine,) * scenario.num_workers
        self.machines = [change(self.machine) for change in changes]
        self.courses = [self._course(steps, machine) for machine in self.machines]

    def _draw_machine(self, bump: float) -> Machine:
        draw = random_cpu if self.scenario.device == "cpu" else random_machine
        return draw(self.rng, self.scenario.max_batch, MAX_LENGTH, bump)

    def _machine(self) -> Machine:
        scenario = self.scenario
        machine = self._draw_machine(scenario.bump)
        values = dict(vars(machine))
        if scenario.cliff:
            values |= {"cliff_at": self.rng.uniform(30.0, 110.0), "cliff_factor": self.rng.uniform(1.2, 1.5)}
        return Machine(**values)

    def _profile(self) -> Profile | None:
        """The profile that `speclen profile run` would have measured: a few steps per cell, 200 prompts."""
        scenario = self.scenario
        if scenario.profile == "none":
            return None
        machine = self.machine
        if scenario.profile in ("other", "foreign"):
            machine = self._draw_machine(OTHER_BUMP)
            scale = self.rng.uniform(0.3, 3.0)
            machine = Machine(**(vars(machine) | {"draft_s": machine.draft_s * self.rng.choice([0.3, 3.0])}))
            seconds = machine.seconds() * scale
        else:
            seconds = machine.seconds()
            if scenario.profile == "never":
                seconds = seconds.copy()
                seconds[:, 1:] *= 3.0
        cells = tuple(
            ProfileCell(
                batch,
                length,
                float(seconds[batch, length] * np.exp(PROFILE_NOISE * self.rng.standard_normal())),
                0.0,
                20,
            )
            for batch in PROFILED_BATCHES
            if batch <= scenario.max_batch
            for length in range(MAX_LENGTH + 1)
        )
        survival = np.diff(self.requests.tokens(self.requests.hard_share))
        counts = self.rng.binomial(4000, survival) / 4000.0
        return Profile(
            *(cells, tuple(np.minimum.accumulate(counts).tolist()), (4000,) * MAX_LENGTH),
            as_prior=scenario.profile == "foreign",
            source="simulated",
        )

    def _course(self, num_steps: int, machine: Machine) -> Course:
        scenario, rng = self.scenario, self.rng
        visits = traffic(scenario, self.requests, num_steps, rng)
        starts = [int(phase.start * num_steps) for phase in scenario.phases] + [num_steps]
        batch = visits.batch
        shares = self._hard_shares(visits)
        seconds = np.empty((num_steps, MAX_LENGTH + 1))
        tokens, tokens_now = np.empty_like(seconds), np.empty_like(seconds)
        by_class = np.empty((num_steps, NUM_CLASSES, MAX_LENGTH + 1), dtype=np.int64)
        for index, phase in enumerate(scenario.phases):
            here = slice(starts[index], starts[index + 1])
            requests = phase.requests(self.requests)
            seconds[here] = phase.machine(machine).seconds()[batch[here]]
            tokens[here] = requests.tokens(shares[here])
            tokens_now[here] = requests.tokens(visits.rows[here, 1] / batch[here])
            chances = requests.run_probabilities()
            for kind in range(NUM_CLASSES):
                by_class[here, kind] = rng.multinomial(visits.rows[here, kind], chances[kind])
        if scenario.wander:
            walk = np.cumsum(rng.standard_normal((num_steps, 2)) * scenario.wander / np.sqrt(1000.0), axis=0)
            drafting = np.exp(walk[:, 1:] * (np.arange(MAX_LENGTH + 1) > 0) + walk[:, :1])
            seconds *= drafting
        if scenario.neighbour > 1.0:
            seconds *= np.where(neighbour_at_work(rng, num_steps), scenario.neighbour, 1.0)[:, None]
        seconds, factor, pause = self._noise(seconds)
        runs = by_class.sum(axis=1)
        return Course(
            *(batch, visits.context, seconds, tokens, tokens_now, runs, factor, pause, visits.joined), by_class
        )

    def _hard_shares(self, visits: Traffic) -> FloatArray:
        """Expected share of hard rows: by band of load where it depends on the load, of all steps otherwise."""
        batch = visits.batch
        hard = visits.rows[:, 1]
        if not self.scenario.hard_with_load:
            return np.full(len(batch), hard.sum() / batch.sum())
        bands = np.array([max(size - 1, 0).bit_length() for size in range(self.scenario.max_batch + 1)])[batch]
        total = np.bincount(bands, batch)
        smooth = np.array(
            [hard_share_at(2.0**band / self.scenario.max_batch, self.requests) for band in range(len(total))]
        )
        shares = (np.bincount(bands, hard) + 200.0 * smooth) / (total + 200.0)
        return np.asarray(shares[bands])

    def _noise(self, seconds: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Mean times with noise in them, and the noise of each step: time = mean_without_pause * factor + pause."""
        scenario, rng, count = self.scenario, self.rng, len(seconds)
        factor = np.exp(scenario.noise * rng.standard_normal(count))
        slow = rng.random(count) < scenario.slow_share
        factor[slow] *= rng.uniform(*SLOW_FACTOR, size=int(slow.sum()))
        mean_factor = np.exp(0.5 * scenario.noise**2) * (1.0 + scenario.slow_share * (np.mean(SLOW_FACTOR) - 1.0))
        paused = rng.random(count) < scenario.pause_share
        pause = np.where(paused, rng.uniform(*PAUSE_S, size=count), 0.0)
        mean_pause = scenario.pause_share * float(np.mean(PAUSE_S))
        return seconds * mean_factor + mean_pause, factor / mean_factor, pause - mean_pause * factor / mean_factor

    def play(self, player: Player) -> Run:
        """Let a policy select the arm of every step; workers take turns.

        A worker reports GROUP of its steps at a time, and the group arrives delay_steps of the fleet later.
        """
        workers = [Worker(self, index) for index in range(len(self.courses))]
        under_way: deque[tuple[int, Worker, list[StepRecord]]] = deque()
        seconds: list[float] = []
        work: list[float] = []
        for step in range(len(self.courses[0].batch)):
            for worker in workers:
                spent_s, done_s = worker.step(step, player)
                seconds.append(spent_s)
                work.append(done_s)
                under_way += [(len(seconds) + self.scenario.delay_steps, worker, group) for group in worker.groups()]
                while under_way and under_way[0][0] <= len(seconds):
                    _, sender, group = under_way.popleft()
                    sender.report(group, player)
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
        self.faulty_from = scenario.faulty_from * len(self.rate) if last and scenario.faulty else np.inf
        self.counts = float(self.faulty_from == np.inf)
        self.rng = np.random.default_rng(0)

    def step(self, step: int, player: Player) -> tuple[float, float]:
        """Take a step; expected seconds, and the oracle's for its tokens. Both 0 for a faulty worker."""
        course, joined = self.course, self.scenario.engine_flags and bool(self.course.joined[step])
        arm, probe_id = self._arm(int(course.batch[step]), joined, player)
        record = course.record(step, arm, probe_id, self.scenario.classes_reported)
        mean_s, extra_s = float(course.seconds[step, arm.speculation_length]), 0.0
        if self.scenario.engine_flags:
            record, extra_s = self.engine.flagged(record, joined, mean_s)
        if step >= self.faulty_from:
            scenario = self.scenario
            self.waiting += [distorted(scenario.faulty, record, self.rng) for _ in range(scenario.faulty_rate)]
        else:
            self.waiting.append(record)
        work_s = float(course.tokens_now[step, arm.speculation_length] * self.rate[step])
        return (mean_s + extra_s) * self.counts, work_s * self.counts

    def _arm(self, batch: int, joined: bool, player: Player) -> tuple[Arm, int]:
        """The probe's arm where one is at hand and fits, else the table's."""
        arm, probe = player.arm_for(batch, self.name), self.probe
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

    def report(self, group: list[StepRecord], player: Player) -> None:
        """A group arrives at the policy, which may answer with a probe."""
        player.observe(group, self.name)
        if self.probe is None or self.probe.is_over(group[-1].batch_size):
            probe = player.probe_for(group[-1].batch_size, self.name)
            self.probe = None if probe is None else ProbeRun(probe)


def neighbour_at_work(rng: np.random.Generator, num_steps: int) -> np.ndarray:
    """True for steps with a neighbour on the device: for 50 steps on average, after 100 without it."""
    active = rng.random() < NEIGHBOUR_STEPS / (NEIGHBOUR_STEPS + NEIGHBOUR_AWAY_STEPS)
    stays: list[np.ndarray] = []
    missing = num_steps
    while missing > 0:
        mean = NEIGHBOUR_STEPS if active else NEIGHBOUR_AWAY_STEPS
        stays.append(np.full(int(rng.geometric(1.0 / mean)), active))
        missing, active = missing - len(stays[-1]), not active
    return np.concatenate(stays)[:num_steps]


def histogram_of(runs: np.ndarray, length: int) -> tuple[int, ...]:
    """Rows by accepted run at a length, from rows by the run that they would accept at the largest."""
    return (*runs[:length].tolist(), int(runs[length:].sum()))
