"""Plays policies against a simulated machine and scores them by true means.

Everything random that does not depend on the policy is drawn beforehand: batch sizes, who is in the batch, how far
each row would accept, noise, slow steps and pauses. So policies differ by their choices alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from speclen.bench.simulation.courses import Course, neighbour_at_work, observe
from speclen.bench.simulation.liars import lie
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
from speclen.records import Limits, Profile, ProfileCell, StepFlag, StepRecord

MAX_LENGTH = 8
PROFILED_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SLOW_FACTOR = (5.0, 20.0)
OTHER_BUMP = 0.03  # of the device that a foreign profile was measured on
FIRST_USE_FACTOR = 1.25  # of a step whose shape the engine meets for the first time


class Player(Protocol):
    """A policy in the simulator."""

    def pull(self, batch_size: int, with_prefill: bool = False, worker: int = 0) -> tuple[int, int]:
        """Length for a worker's next step, and the number of the probe that it belongs to, 0 for none."""
        ...

    def report(self, worker: int, steps: list[StepRecord]) -> None:
        """Steps of one worker arrive."""
        ...


class Engine:
    """Flags of a worker's steps, and the time that they take longer."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.used: set[tuple[int, int]] = set()
        self.last_length = -1

    def flagged(self, report: StepRecord, joined: bool, mean_s: float) -> tuple[StepRecord, float]:
        """The report as a worker sends it, and by how many seconds the choice of its length made the step longer.

        mean_s: true mean of such a step.
        """
        batch, length = report.batch_size, report.arm.speculation_length
        catches_up, first_use = self.last_length == 0 < length, (batch, length) not in self.used
        self.last_length = length
        self.used.add((batch, length))
        extra_s = (FIRST_USE_FACTOR - 1.0) * mean_s if first_use else 0.0
        if catches_up:
            extra_s += self.machine.draft_s + self.machine.draft_row_s * batch
        found = ((StepFlag.FIRST_USE, first_use), (StepFlag.CATCH_UP, catches_up), (StepFlag.PREFILL, joined))
        flags = frozenset(flag for flag, is_set in found if is_set)
        return report._replace(latency_s=report.latency_s + extra_s, flags=flags), extra_s


@dataclass(frozen=True)
class Run:
    """What a policy did: lengths in the order in which steps happened, with the courses' means beside them."""

    lengths: np.ndarray
    seconds: FloatArray
    work: FloatArray  # the oracle's time for the tokens that the step made
    regime: np.ndarray

    @property
    def score(self) -> float:
        """The oracle's time for the same work over the time spent, in percent."""
        return 100.0 * float(self.work.sum() / self.seconds.sum())

    def recovery_steps(self) -> list[int]:
        """After each change of the world: steps until the next 50 lose at most 2% (never: all that are left)."""
        out = []
        for start in np.flatnonzero(np.diff(self.regime)) + 1:
            stop = start + int(np.argmax(np.append(self.regime[start:] != self.regime[start], True)))
            window = np.ones(50)
            work = np.convolve(self.work[start:stop], window, "valid")
            spent = np.convolve(self.seconds[start:stop], window, "valid")
            good = np.flatnonzero(work >= 0.98 * spent)
            out.append(int(good[0]) if len(good) else int(stop - start))
        return out


class Played(NamedTuple):
    """A step, as in `Run`."""

    length: int
    seconds: float
    work: float
    regime: int


class Worker:
    """One worker while it is played. A liar's steps do not count."""

    def __init__(self, world: World, number: int) -> None:
        scenario, self.number = world.scenario, number
        self.scenario, self.course, self.engine = scenario, world.courses[number], Engine(world.machines[number])
        self.rate, self.waiting = self.course.best_rate(), list[StepRecord]()
        self.is_liar = bool(scenario.liar) and number == scenario.num_workers - 1
        self.lies_from = scenario.liar_from * len(self.rate) if self.is_liar else np.inf
        self.rng = np.random.default_rng(0)

    def play(self, player: Player, step: int) -> Played:
        """Take a step, and keep its report."""
        course, flags = self.course, self.scenario.engine_flags
        joined = flags and bool(course.joined[step])
        length, probe_id = player.pull(int(course.batch[step]), joined, self.number)
        report = observe(course, step, length, self.scenario.classes_told)._replace(probe_id=probe_id)
        seconds, extra_s = float(course.seconds[step, length]), 0.0
        if flags:
            report, extra_s = self.engine.flagged(report, joined, seconds)
        self._report(report, step)
        counts = float(not self.is_liar)
        work = counts * float(course.tokens_now[step, length] * self.rate[step])
        return Played(length, counts * (seconds + extra_s), work, int(course.regime[step]))

    def _report(self, report: StepRecord, step: int) -> None:
        if step < self.lies_from:
            self.waiting.append(report)
            return
        self.waiting += [lie(self.scenario.liar, report, self.rng) for _ in range(self.scenario.liar_rate)]

    def groups(self) -> Iterator[list[StepRecord]]:
        """Reports that are due."""
        size = self.scenario.stale_steps
        while len(self.waiting) >= size:
            yield self.waiting[:size]
            del self.waiting[:size]


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
        """What `speclen profile run` would have measured: a few steps per cell, 200 prompts."""
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
        noise = scenario.profile_noise
        cells = tuple(
            ProfileCell(
                batch, length, float(seconds[batch, length] * np.exp(noise * self.rng.standard_normal())), 0.0, 20
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
        regime = np.repeat(np.arange(len(scenario.phases)), np.diff(starts))
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
        seconds, factor = self._noise(seconds)
        return Course(
            *(batch, visits.context, seconds, tokens, tokens_now, by_class.sum(axis=1)),
            *(factor, regime, visits.joined, by_class),
        )

    def _hard_shares(self, visits: Traffic) -> FloatArray:
        """Expected share of hard rows: by band of load where it depends on the load, of all steps otherwise."""
        batch = visits.batch
        hard = visits.rows[:, 1]
        if not self.scenario.hard_with_load:
            return np.full(len(batch), hard.sum() / batch.sum())
        bands = np.ceil(np.log2(np.maximum(batch, 1))).astype(int)
        total = np.bincount(bands, batch)
        smooth = np.array(
            [hard_share_at(2.0**band / self.scenario.max_batch, self.requests) for band in range(len(total))]
        )
        shares = (np.bincount(bands, hard) + 200.0 * smooth) / (total + 200.0)
        return np.asarray(shares[bands])

    def _noise(self, seconds: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Mean times with noise in them, and the factor of each step, 1 on average."""
        scenario, rng, count = self.scenario, self.rng, len(seconds)
        factor = np.exp(scenario.noise * rng.standard_normal(count))
        slow = rng.random(count) < scenario.slow_share
        factor[slow] *= rng.uniform(*SLOW_FACTOR, size=int(slow.sum()))
        mean_factor = np.exp(0.5 * scenario.noise**2) * (1.0 + scenario.slow_share * (np.mean(SLOW_FACTOR) - 1.0))
        return seconds * mean_factor, factor / mean_factor

    def play(self, player: Player) -> Run:
        """Let a policy select every step; workers take turns.

        A worker reports stale_steps of its steps at a time, and the group arrives delay_steps of the fleet later.
        """
        workers = [Worker(self, number) for number in range(len(self.courses))]
        under_way: deque[tuple[int, int, list[StepRecord]]] = deque()
        played: list[Played] = []
        for step in range(len(self.courses[0].batch)):
            for number, worker in enumerate(workers):
                played.append(worker.play(player, step))
                for group in worker.groups():
                    under_way.append((len(played) + self.scenario.delay_steps, number, group))
                while under_way and under_way[0][0] <= len(played):
                    player.report(*under_way.popleft()[1:])
        return Run(*map(np.array, zip(*played, strict=True)))

    def play_table(self, table: np.ndarray) -> Run:
        """The same for a policy that never learns; table[b] is its length for batch size b."""
        lengths = np.stack([table[course.batch] for course in self.courses], axis=1)
        picked = lengths[:, :, None]
        seconds, tokens = (
            np.take_along_axis(np.stack([getattr(course, name) for course in self.courses], axis=1), picked, axis=2)[
                ..., 0
            ]
            for name in ("seconds", "tokens_now")
        )
        work = tokens * np.stack([course.best_rate() for course in self.courses], axis=1)
        regime = np.stack([course.regime for course in self.courses], axis=1)
        return Run(lengths.reshape(-1), seconds.reshape(-1), work.reshape(-1), regime.reshape(-1))
