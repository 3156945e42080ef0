"""What staleness, thinning and partition cost in goodput: the same fleet under controllers of its own and under one that
sees everything at once, with the real estimator.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

import numpy as np

from speclen.bench.fleet.world import LIMITS, MAX_BATCH, TICK_S, Fleet, drawn, key_of
from speclen.controller.estimator.contexts.workers import MOST_WORKERS
from speclen.controller.estimator.core import Decision, StepObservation
from speclen.controller.estimator.estimator import Estimator
from speclen.controller.service.learning_service import URGENT_PAUSE_S, is_urgent

# As in the controller's learning service: workers in one call, of those told apart and of the others; seconds between
# rounds of learning.
TOGETHER, OTHERS_TOGETHER, LEARN_TICKS = 32, 1024, 1
PROBES_A_ROUND = 16
PAUSE_TICKS = round(URGENT_PAUSE_S / TICK_S)

Report = tuple[int, StepObservation]  # worker


@dataclass(frozen=True, slots=True)
class Setting:
    """Who decides, and how late. controllers: workers are shared out by kind of machine first.

    window_ticks: of which steps are added up. delay_ticks: from the end of a window until a decision is in use. share: of
    the workers that are not told apart, who is learned from. rest_ticks: after which the others hear of what is not urgent.
    At once: one tick, none, and all.
    """

    num_controllers: int
    window_ticks: int
    delay_ticks: int
    share: float = 1.0
    rest_ticks: int = 1


@dataclass(slots=True)
class Part:
    """One controller with its workers."""

    estimator: Estimator
    kinds: list[int]
    arrived: list[Report] = field(default_factory=list)
    rounds_s: list[float] = field(default_factory=list)
    calls_s: list[float] = field(default_factory=list)  # the longest of each round
    num_urgent: int = 0  # times that everybody was told at once
    urgent: bool = False  # whether everybody is to be told of something
    told_at: int = -PAUSE_TICKS  # tick at which everybody was

    def learn(self, fleet: Fleet) -> None:
        """A round of learning: all that has arrived, in calls as the service makes them."""
        arrived, self.arrived = self.arrived, []
        began, longest_s, decisions = time.process_time(), 0.0, list[Decision]()
        arrived.sort(key=lambda each: (fleet.kind[each[0]], each[0]))
        for kind, members in groupby(arrived, key=lambda each: int(fleet.kind[each[0]])):
            for calls in self._calls(kind, list(members)):
                started = time.process_time()
                observations = [step for _, step in calls]
                senders = [f"worker-{worker}" for worker, _ in calls]
                decisions += self.estimator.observe(key_of(kind), observations, senders).decisions
                longest_s = max(longest_s, time.process_time() - started)
        self.calls_s.append(longest_s)
        self.rounds_s.append(time.process_time() - began)
        self.urgent |= any(map(is_urgent, decisions))

    def tells_all(self, tick: int) -> bool:
        """Whether everybody is told after this round: no sooner than the pause after the last time allows."""
        if not self.urgent or tick < self.told_at + PAUSE_TICKS:
            return False
        self.urgent, self.told_at = False, tick
        self.num_urgent += 1
        return True

    def _calls(self, kind: int, reports: list[Report]) -> Iterator[list[Report]]:
        """Reports of workers side by side, so many workers together."""
        by_worker = [list(mine) for _, mine in groupby(reports, key=itemgetter(0))]
        apart = [self.estimator.tells_apart(key_of(kind), f"worker-{mine[0][0]}") for mine in by_worker]
        for told, most in ((True, TOGETHER), (False, OTHERS_TOGETHER)):
            mine = [each for each, known in zip(by_worker, apart, strict=True) if known is told]
            for first in range(0, len(mine), most):
                yield [report for each in mine[first : first + most] for report in each]

    def lengths(self) -> dict[int, np.ndarray]:
        """The length at every batch size, by kind."""
        sizes = range(1, MAX_BATCH + 1)
        return {
            kind: np.array([0, *(self.estimator.length_for(key_of(kind), size) for size in sizes)])
            for kind in self.kinds
        }

    def probes(self, kind: int, batches: np.ndarray) -> list[tuple[int, int]]:
        """Exploratory lengths for steps at these batch sizes: (which of them, length)."""
        found = []
        for at, batch in enumerate(batches[:PROBES_A_ROUND].tolist()):
            probe = self.estimator.take_probe(key_of(kind), batch)
            if probe is not None:
                found.append((at, probe.speculation_length))
        return found


@dataclass(frozen=True, slots=True)
class Quality:
    """goodput: tokens of the fleet over those of a clairvoyant. round_s: processor time of a round of learning at the
    busiest controller, median; call_s: of its usual longest call; urgent_per_s: tables that all workers are told of at once,
    of the controller with most.
    """

    goodput: float
    round_s: float
    call_s: float
    urgent_per_s: float


def parts_of(fleet: Fleet, num_controllers: int) -> tuple[list[Part], np.ndarray]:
    """The controllers, and which of them each worker reports to: by machine, and by name where there are more of them."""
    num_kinds = int(fleet.kind.max()) + 1
    if num_controllers <= num_kinds:
        of_worker = fleet.kind % num_controllers
    else:
        each = num_controllers // num_kinds
        of_worker = fleet.kind * each + np.arange(len(fleet.kind)) // num_kinds % each
    parts = []
    for part in range(int(of_worker.max()) + 1):
        kinds = sorted(set(fleet.kind[of_worker == part].tolist()))
        estimator = Estimator()
        for kind in kinds:
            estimator.add_context(key_of(kind), LIMITS)
        parts.append(Part(estimator, kinds))
    return parts, of_worker


def play(fleet: Fleet, setting: Setting, seed: int = 0) -> Quality:
    """Let the controllers decide for the fleet."""
    parts, of_worker = parts_of(fleet, setting.num_controllers)
    game = _Game(fleet, parts, of_worker, setting, np.random.default_rng([seed, 2]))
    for tick in range(fleet.num_ticks):
        game.play(tick)
    rounds_s = [float(np.median(part.rounds_s)) for part in parts]
    calls_s = [float(np.median(part.calls_s)) for part in parts]
    urgent_per_s = max(part.num_urgent for part in parts) / (TICK_S * fleet.num_ticks)
    return Quality(game.tokens / game.best_tokens, max(rounds_s), max(calls_s), urgent_per_s)


class _Game:
    """The state of a run. newest: lengths at each batch size, [controllers, kinds, batches]; tables: those that each worker
    has, [workers, batches].
    """

    def __init__(
        self, fleet: Fleet, parts: list[Part], of_worker: np.ndarray, setting: Setting, rng: np.random.Generator
    ) -> None:
        self.fleet, self.parts, self.of_worker, self.setting, self.rng = fleet, parts, of_worker, setting, rng
        self.newest = np.zeros((len(parts), int(fleet.kind.max()) + 1, MAX_BATCH + 1), dtype=np.int64)
        self.tables = np.zeros((len(fleet.kind), MAX_BATCH + 1), dtype=np.int64)
        # Tick, controller, lengths, whether all are told at once.
        self.under_way: deque[tuple[int, int, dict[int, np.ndarray], bool]] = deque()
        self.played: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=setting.window_ticks)  # lengths and steps
        self.tokens = self.best_tokens = 0.0
        self.fresh = rng.random(len(fleet.kind)) < setting.share
        for kind in range(int(fleet.kind.max()) + 1):
            for part in range(len(parts)):
                mine = np.flatnonzero((fleet.kind == kind) & (of_worker == part))
                self.fresh[mine[:MOST_WORKERS]] = True
        for part in range(len(parts)):
            self._apply(part, parts[part].lengths(), True)

    def _apply(self, part: int, lengths: dict[int, np.ndarray], urgent: bool) -> None:
        """A decision has arrived where it is told at once: at the workers that are learned from, or at all."""
        for kind, by_batch in lengths.items():
            self.newest[part, kind] = by_batch
            told = (self.of_worker == part) & (self.fleet.kind == kind) & (self.fresh | urgent)
            self.tables[told] = by_batch

    def play(self, tick: int) -> None:
        """One tick: decisions arrive, steps are done, windows that end are sent, and learned from when it is time."""
        while self.under_way and self.under_way[0][0] <= tick:
            self._apply(*self.under_way.popleft()[1:])
        fleet, phase = self.fleet, self.fleet.phase(tick)
        kind, batch = fleet.kind, fleet.batch[tick]
        answered = np.arange(tick % self.setting.rest_ticks, len(kind), self.setting.rest_ticks)
        self.tables[answered] = self.newest[self.of_worker[answered], kind[answered]]
        length = self.tables[np.arange(len(kind)), batch]
        rate = phase.rate
        self.tokens += TICK_S * float(rate[kind, batch, length].sum())
        self.best_tokens += TICK_S * float(rate.max(axis=2)[kind, batch].sum())
        steps = np.maximum(np.rint(TICK_S / phase.seconds[kind, batch, length]), 1.0)
        self.played.append((length, steps.astype(np.int64)))
        in_turn = np.arange(len(kind)) % self.setting.window_ticks == tick % self.setting.window_ticks
        due = np.flatnonzero(self.fresh & in_turn)
        for worker in due.tolist():
            self.parts[self.of_worker[worker]].arrived += self._window(worker, tick)
        if tick % min(LEARN_TICKS, self.setting.window_ticks) == 0:
            self._learn(tick)

    def _window(self, worker: int, tick: int) -> Iterator[Report]:
        """A worker's steps since its last window, added up by batch size and length."""
        cells: dict[tuple[int, int], int] = {}
        first = tick - len(self.played) + 1
        for at, (length, steps) in enumerate(self.played):
            cell = int(self.fleet.batch[first + at, worker]), int(length[worker])
            cells[cell] = cells.get(cell, 0) + int(steps[worker])
        kind, phase = int(self.fleet.kind[worker]), self.fleet.phase(first + len(self.played) // 2)
        for (batch, played), num_steps in cells.items():
            yield worker, drawn(self.rng, phase, kind, batch, played, num_steps)

    def _learn(self, tick: int) -> None:
        for number, part in enumerate(self.parts):
            if not part.arrived:
                continue
            part.learn(self.fleet)
            arrives = tick + max(self.setting.delay_ticks, 1)
            self.under_way.append((arrives, number, part.lengths(), part.tells_all(tick)))
            self._probe(number, part, tick)

    def _probe(self, number: int, part: Part, tick: int) -> None:
        """Steps at exploratory lengths: paid for, and reported with what arrives next."""
        phase = self.fleet.phase(tick)
        for kind in part.kinds:
            mine = np.flatnonzero(self.fresh & (self.of_worker == number) & (self.fleet.kind == kind))
            some = self.rng.choice(mine, min(PROBES_A_ROUND, len(mine)), replace=False)
            batches = self.fleet.batch[tick, some]
            for at, length in part.probes(kind, batches):
                batch = int(batches[at])
                usual, rate = int(self.newest[number, kind, batch]), phase.rate[kind, batch]
                self.tokens += float(phase.seconds[kind, batch, length] * (rate[length] - rate[usual]))
                part.arrived.append((int(some[at]), drawn(self.rng, phase, kind, batch, length, 1)))


def window_ticks(window_s: float) -> int:
    """At least one."""
    return max(1, round(window_s / TICK_S))


def delay_ticks(after_s: float) -> int:
    """Rounded up; of which the tick in which a window is learned from is one."""
    return math.ceil(after_s / TICK_S)
