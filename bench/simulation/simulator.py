"""Plays policies against a simulated machine and scores them by true means.

Everything random that does not depend on the policy is drawn beforehand: batch sizes, who is in the batch, how far
each row would accept, noise, slow steps and pauses. So policies differ by their choices alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from speclen.bench.simulation.liars import lie
from speclen.bench.simulation.scenarios import Scenario, hard_share_at
from speclen.bench.simulation.traffic import Traffic, traffic
from speclen.bench.simulation.world import NUM_CLASSES, Machine, random_cpu, random_machine, random_requests
from speclen.controller.estimator.acceptance import band_of
from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.buckets import EACH, buckets_for
from speclen.controller.estimator.core import Limits, Profile, ProfileCell, StepObservation

MAX_LENGTH = 8
PROFILED_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PAUSE_S = (0.1, 0.4)
SLOW_FACTOR = (5.0, 20.0)
OTHER_BUMP = 0.03  # of the device that a foreign profile was measured on
FIRST_USE_FACTOR = 1.25  # of a step whose shape the engine meets for the first time
# Mean lengths of a neighbour's bursts and of the quiet between them, in steps: what a shared core shows.
NEIGHBOUR_STEPS, NEIGHBOUR_AWAY_STEPS = 50.0, 100.0
# Clusters of stalls: seconds, steps of a cluster and between two, share of its steps that stall; and of all steps.
STALL_S, STALL_STEPS, STALL_APART, STALLING = (0.05, 0.2), 15, 600, 0.5
STALL_SHARE = STALLING * STALL_STEPS / STALL_APART


class Player(Protocol):
    """A policy in the simulator."""

    def pull(self, batch_size: int, with_prompts: bool = False, worker: int = 0, rows: tuple[int, ...] = ()) -> int:
        """Length for a worker's next step. with_prompts: whether it feeds prompts along. rows: by class, where told."""
        ...

    def report(self, worker: int, steps: list[StepObservation]) -> None:
        """Steps of one worker arrive."""
        ...


@dataclass(frozen=True)
class Course:
    """One worker's steps, drawn beforehand. [steps] or [steps, lengths].

    seconds: true mean of every length at each step. tokens: true mean over all requests, by which the clairvoyant
    chooses; tokens_now: given which requests are in the batch, by which everybody is scored. runs: rows
    by the run that they would accept at the largest length. factor, pause: noise of the step. regime: phase.
    """

    batch: np.ndarray
    context: FloatArray
    seconds: FloatArray
    tokens: FloatArray
    tokens_now: FloatArray
    runs: np.ndarray
    factor: FloatArray
    pause: FloatArray
    regime: np.ndarray
    joined: np.ndarray  # whether a request has just come, whose prompt is fed along
    rows: np.ndarray  # by class of request, [steps, classes]
    runs_by_class: np.ndarray  # as runs, [steps, classes, lengths]
    bucket: np.ndarray | None = None  # bucket of each step, where a bucket holds several batch sizes

    def best(self) -> np.ndarray:
        """The clairvoyant's length at each step: the most tokens per second by true means.

        Where buckets hold several batch sizes, one length per bucket and phase, by the steps that fell into it.
        """
        if self.bucket is None:
            lengths: np.ndarray = (self.tokens / self.seconds).argmax(axis=1)
            return lengths
        cell = self.bucket * (1 + self.regime.max()) + self.regime
        tokens, seconds = np.zeros((2, cell.max() + 1, self.seconds.shape[1]))
        np.add.at(tokens, cell, self.tokens * self.batch[:, None])
        np.add.at(seconds, cell, self.seconds)
        chosen: np.ndarray = (tokens / np.maximum(seconds, 1e-9)).argmax(axis=1)[cell]
        return chosen

    def best_rate(self) -> FloatArray:
        """The clairvoyant's seconds per token and row at each step."""
        steps, lengths = np.arange(len(self.batch)), self.best()
        rate: FloatArray = self.seconds[steps, lengths] / self.tokens_now[steps, lengths]
        return rate


class Engine:
    """Which steps of a worker take longer for a reason of their own, and are flagged for it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.used: set[tuple[int, int]] = set()
        self.last_length = -1

    def flagged(self, report: StepObservation, joined: bool, mean_s: float) -> tuple[StepObservation, float]:
        """The report as a worker sends it, and by how many seconds the choice of its length made the step longer.

        mean_s: true mean of such a step.
        """
        batch, length = report.batch_size, report.speculation_length
        catches_up, first_use = self.last_length == 0 < length, (batch, length) not in self.used
        self.last_length = length
        self.used.add((batch, length))
        extra_s = (FIRST_USE_FACTOR - 1.0) * mean_s if first_use else 0.0
        if catches_up:
            extra_s += self.machine.draft_s + self.machine.draft_row_s * batch
        teaches = not (joined or catches_up or first_use)
        return report._replace(latency_s=report.latency_s + extra_s, teaches_latency=teaches), extra_s


@dataclass(frozen=True)
class Run:
    """What a policy did: lengths in the order in which steps happened, with the courses' means beside them."""

    lengths: np.ndarray
    seconds: FloatArray
    work: FloatArray  # clairvoyant's time for the tokens that the step made
    regime: np.ndarray

    @property
    def score(self) -> float:
        """Clairvoyant's time for the same work over the time spent, in percent."""
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
        if scenario.context_growth:
            values |= {"kv_s": machine.verify_s * 0.03, "kv_draft_s": machine.verify_s * 0.001}
        values["padded_to"] = scenario.padded_to
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
        profiled = self.requests.scaled(scenario.profile_acceptance)
        survival = np.diff(profiled.tokens(profiled.hard_share))
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
            seconds[here] = self._seconds(phase.machine(machine), batch[here], visits.context[here])
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
        return Course(
            *(
                batch,
                visits.context,
                seconds,
                tokens,
                tokens_now,
                by_class.sum(axis=1),
                factor,
                pause,
                regime,
                visits.joined,
            ),
            *(visits.rows, by_class, self._buckets(batch)),
        )

    def _buckets(self, batch: np.ndarray) -> np.ndarray | None:
        if self.scenario.buckets == EACH:
            return None
        ends = [bucket.batch_max for bucket in buckets_for(self.scenario.buckets, self.scenario.max_batch)]
        return np.searchsorted(ends, batch)

    def _hard_shares(self, visits: Traffic) -> FloatArray:
        """Expected share of hard rows: by band of load where it depends on the load, of all steps otherwise."""
        batch = visits.batch
        hard = visits.rows[:, 1]
        if not self.scenario.hard_with_load:
            return np.full(len(batch), hard.sum() / batch.sum())
        bands = np.array([band_of(size) for size in range(self.scenario.max_batch + 1)])[batch]
        total = np.bincount(bands, batch)
        smooth = np.array(
            [hard_share_at(2.0**band / self.scenario.max_batch, self.requests) for band in range(len(total))]
        )
        shares = (np.bincount(bands, hard) + 200.0 * smooth) / (total + 200.0)
        return np.asarray(shares[bands])

    def _seconds(self, machine: Machine, batch: np.ndarray, context: FloatArray) -> FloatArray:
        if not self.scenario.context_growth:
            return machine.seconds()[batch]
        empty, unit = machine.seconds(0.0)[batch], machine.seconds(1024.0)[batch]
        return empty + (unit - empty) * (context / 1024.0)[:, None]

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
        if scenario.stalls:
            stalled = stalls(rng, count)
            pause = np.where(stalled, rng.uniform(*STALL_S, size=count), 0.0)
            mean_pause = STALL_SHARE * float(np.mean(STALL_S))
        return seconds * mean_factor + mean_pause, factor / mean_factor, pause - mean_pause * factor / mean_factor

    def play(self, player: Player) -> Run:
        """Let a policy choose every step; workers take turns.

        A worker reports stale_steps of its steps at a time, and the group arrives delay_steps of the fleet later.
        """
        scenario = self.scenario
        waiting: list[list[StepObservation]] = [[] for _ in self.courses]
        rate = [course.best_rate() for course in self.courses]
        engines = [Engine(machine) for machine in self.machines]
        under_way: deque[tuple[int, int, list[StepObservation]]] = deque()
        lengths, seconds, work, regime = [], [], [], []
        liar, rng = (len(self.courses) - 1 if scenario.liar else -1), np.random.default_rng(0)
        num_steps = len(self.courses[0].batch)
        for step in range(num_steps):
            for worker, course in enumerate(self.courses):
                joined = scenario.engine_flags and bool(course.joined[step])
                rows = tuple(course.rows[step].tolist()) if scenario.classes_told else ()
                length = player.pull(int(course.batch[step]), joined, worker, rows)
                lengths.append(length)
                report = observe(course, step, length, scenario.classes_told)
                mean_s, extra_s = course.seconds[step, length], 0.0
                if scenario.engine_flags:
                    report, extra_s = engines[worker].flagged(report, joined, mean_s)
                counts = float(worker != liar)
                seconds.append((mean_s + extra_s) * counts)
                work.append(course.tokens_now[step, length] * rate[worker][step] * counts)
                regime.append(course.regime[step])
                lies = worker == liar and step >= scenario.liar_from * num_steps
                waiting[worker] += (
                    [lie(scenario.liar, report, rng) for _ in range(scenario.liar_rate)] if lies else [report]
                )
                while len(waiting[worker]) >= scenario.stale_steps:
                    group, waiting[worker] = (
                        waiting[worker][: scenario.stale_steps],
                        waiting[worker][scenario.stale_steps :],
                    )
                    under_way.append((len(lengths) + scenario.delay_steps, worker, group))
                while under_way and under_way[0][0] <= len(lengths):
                    _, sender, steps = under_way.popleft()
                    player.report(sender, steps)
        return Run(np.array(lengths), np.array(seconds), np.array(work), np.array(regime))

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


def stalls(rng: np.random.Generator, num_steps: int) -> np.ndarray:
    """Whether a step stalls: half of those in clusters of 15, which begin 600 steps apart on average."""
    inside = np.zeros(num_steps, dtype=bool)
    for start in np.flatnonzero(rng.random(num_steps) < 1.0 / STALL_APART):
        inside[start : start + STALL_STEPS] = True
    stalled: np.ndarray = inside & (rng.random(num_steps) < STALLING)
    return stalled


def neighbour_at_work(rng: np.random.Generator, num_steps: int) -> np.ndarray:
    """Whether a neighbour uses the device too, by step: for 50 steps on average, after 100 without it."""
    active = rng.random() < NEIGHBOUR_STEPS / (NEIGHBOUR_STEPS + NEIGHBOUR_AWAY_STEPS)
    stays: list[np.ndarray] = []
    missing = num_steps
    while missing > 0:
        mean = NEIGHBOUR_STEPS if active else NEIGHBOUR_AWAY_STEPS
        stays.append(np.full(int(rng.geometric(1.0 / mean)), active))
        missing, active = missing - len(stays[-1]), not active
    return np.concatenate(stays)[:num_steps]


def observe(course: Course, step: int, length: int, classes_told: bool = False) -> StepObservation:
    """The report of one step at one length."""
    histogram = histogram_of(course.runs[step], length)
    taken = max(course.seconds[step, length] * course.factor[step] + course.pause[step], 1e-5)
    by_class: tuple[tuple[int, tuple[int, ...]], ...] = ()
    if classes_told:
        runs = course.runs_by_class[step]
        by_class = tuple((kind, histogram_of(mine, length)) for kind, mine in enumerate(runs) if mine.any())
    return StepObservation(
        *(int(course.batch[step]), length, float(taken), histogram, float(course.context[step])), by_class=by_class
    )


def histogram_of(runs: np.ndarray, length: int) -> tuple[int, ...]:
    """Rows by accepted run at a length, from rows by the run that they would accept at the largest."""
    return (*runs[:length].tolist(), int(runs[length:].sum()))
