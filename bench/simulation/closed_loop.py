"""A server whose batch size follows from the policy's own speed: slow steps let the queue grow.

The same requests arrive at the same times for every policy, and whether the draft would be right at each position of a
request's output is fixed beforehand, as it is in greedy decoding. Time passes by true means; only reports are noisy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from speclen.bench.simulation.scenarios import Scenario
from speclen.bench.simulation.simulator import MAX_LENGTH, Player, World
from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.core import StepObservation

PHASE_S = 15.0
LOADS = (0.3, 0.6, 0.85, 0.95)  # of what the clairvoyant can serve in the worst phase of the world


@dataclass
class Request:
    """One request; luck[i] < acceptance at a run's position means that draft token i of the output is right."""

    arrival_s: float
    num_tokens: int
    kind: int
    luck: FloatArray
    done: int = 0


@dataclass(frozen=True)
class ClosedRun:
    """latency_per_token_s: mean over requests of (end - arrival) / tokens; num_steps: decoding steps it took."""

    latency_per_token_s: float
    num_steps: int


class ClosedLoop:
    """One seed of a closed-loop scenario."""

    def __init__(self, scenario: Scenario, seed: int, duration_s: float = 240.0) -> None:
        self.world = World(scenario, seed, num_steps=10)
        self.duration_s = duration_s
        self.scenario = scenario
        self.seed = seed
        self.seconds = [phase.machine(self.world.machine).seconds() for phase in scenario.phases]
        self.requests = [phase.requests(self.world.requests) for phase in scenario.phases]
        hard = self.world.requests.hard_share
        self.tokens = [requests.tokens(hard) for requests in self.requests]
        self.best = [
            (tokens / seconds).argmax(axis=1) for tokens, seconds in zip(self.tokens, self.seconds, strict=True)
        ]

    def phase_at(self, clock: float) -> int:
        """Phase of the world at a time."""
        share = clock / self.duration_s
        return sum(share >= phase.start for phase in self.scenario.phases[1:])

    def arrivals(self) -> list[Request]:
        """Every request, by time."""
        rng = np.random.default_rng([self.seed, 7])
        full = self.scenario.max_batch
        capacity = min(
            full * tokens[best[full]] / seconds[full, best[full]]
            for tokens, seconds, best in zip(self.tokens, self.seconds, self.best, strict=True)
        )
        requests, clock, until, rate, shape = [], 0.0, 0.0, 1.0, 1.0
        while clock < self.duration_s:
            if clock >= until:
                until += PHASE_S
                rate = float(rng.choice(LOADS)) * capacity / self.scenario.mean_new_tokens
                shape = 1.0 / float(rng.choice([0.5, 1.0, 2.0, 4.0])) ** 2
            clock += rng.gamma(shape, 1.0 / (shape * rate))
            count = 1 + int(rng.exponential(self.scenario.mean_new_tokens))
            kind = int(rng.random() < self.world.requests.hard_share)
            requests.append(Request(clock, count, kind, rng.random(count + MAX_LENGTH + 1)))
        return requests

    def play(self, player: Player | None) -> ClosedRun:
        """Serve every request; without a player, by the true table of each phase."""
        noise = np.random.default_rng([self.seed, 8])
        waiting = self.arrivals()[::-1]
        running: list[Request] = []
        clock, total, count, steps = 0.0, 0.0, 0, 0
        while waiting or running:
            if not running and waiting:
                clock = max(clock, waiting[-1].arrival_s)
            while waiting and len(running) < self.scenario.max_batch and waiting[-1].arrival_s <= clock:
                running.append(waiting.pop())
            phase = self.phase_at(clock)
            batch = len(running)
            length = int(self.best[phase][batch]) if player is None else player.pull(batch)
            seconds = float(self.seconds[phase][batch, length])
            histogram = self._decode(running, length, self.requests[phase].acceptance)
            clock += seconds
            steps += 1
            if player is not None:
                player.report(0, [self._report(batch, length, seconds, histogram, noise)])
            finished = [request for request in running if request.done >= request.num_tokens]
            if finished:
                total += sum((clock - request.arrival_s) / request.num_tokens for request in finished)
                count += len(finished)
                running = [request for request in running if request.done < request.num_tokens]
        return ClosedRun(total / count, steps)

    def _decode(self, running: list[Request], length: int, acceptance: FloatArray) -> list[int]:
        """One step of every row; returns the histogram of accepted runs."""
        histogram = [0] * (length + 1)
        for request in running:
            luck, chances, run = request.luck, acceptance[request.kind], 0
            while run < length and luck[request.done + run] < chances[run]:
                run += 1
            histogram[run] += 1
            request.done += min(run + 1, request.num_tokens - request.done)
        return histogram

    def _report(
        self, batch: int, length: int, seconds: float, histogram: list[int], noise: np.random.Generator
    ) -> StepObservation:
        factor = float(np.exp(self.scenario.noise * noise.standard_normal()))
        if noise.random() < self.scenario.slow_share:
            factor *= float(noise.uniform(5.0, 20.0))
        return StepObservation(batch, length, seconds * factor, tuple(histogram))
