"""Draws everything of a scenario that does not depend on the policy: machine, requests, profile, steps of all workers."""

from __future__ import annotations

import numpy as np

from speclen.bench.simulation.courses import Course
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
from speclen.records import Limits, Profile, ProfileCell

MAX_LENGTH = 8
PROFILED_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SLOW_FACTOR = (5.0, 20.0)
OTHER_BUMP = 0.03  # of the device that a foreign profile was measured on
PROFILE_NOISE = 0.015  # log-sd of its cells
# Mean lengths of a neighbour's bursts and of the quiet between them, in steps: what a shared core shows.
NEIGHBOUR_STEPS, NEIGHBOUR_AWAY_STEPS = 50.0, 100.0


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
        if scenario.profile == "other":
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
            *(cells, tuple(np.minimum.accumulate(counts).tolist()), (4000,) * MAX_LENGTH), source="simulated"
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
        seconds, factor = self._noise(seconds)
        runs = by_class.sum(axis=1)
        return Course(batch, visits.context, seconds, tokens, tokens_now, runs, factor, visits.joined, by_class)

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

    def _noise(self, seconds: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Mean times with noise in them, and the noise of each step: time = mean * factor."""
        scenario, rng, count = self.scenario, self.rng, len(seconds)
        factor = np.exp(scenario.noise * rng.standard_normal(count))
        slow = rng.random(count) < scenario.slow_share
        factor[slow] *= rng.uniform(*SLOW_FACTOR, size=int(slow.sum()))
        mean_factor = np.exp(0.5 * scenario.noise**2) * (1.0 + scenario.slow_share * (np.mean(SLOW_FACTOR) - 1.0))
        rng.random(2 * count)  # once drawn for pauses: without it the next worker's course would be another one
        return seconds * mean_factor, factor / mean_factor


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
