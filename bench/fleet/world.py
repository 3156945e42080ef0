"""A fleet in time: thousands of workers on a few kinds of machine, of which prompts and speed change twice.

Time goes by ticks. Within a tick a worker's batch stays as it is, and its steps are drawn together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from speclen.bench.simulation.world import Machine, Requests, random_machine, random_requests
from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.core import ContextKey, Limits, StepObservation

TICK_S = 0.1
MAX_BATCH, MAX_LENGTH = 32, 8
LIMITS = Limits(MAX_BATCH, MAX_LENGTH)
NOISE = 0.05  # log-sd of a step
BATCH_CHANGES = 0.25  # chance that a worker's batch changes from one tick to the next
# What happens after the first and the second third: other prompts, of which so much is accepted; slower arithmetic.
OTHER_PROMPTS, THROTTLED = 0.6, 1.6


@dataclass(frozen=True)
class Phase:
    """seconds: by kind of machine, batch and length. runs: chance of each accepted run at the largest length."""

    seconds: FloatArray
    runs: FloatArray

    @property
    def tokens(self) -> FloatArray:
        """Expected tokens per row and step at every length."""
        at_least = self.runs[::-1].cumsum()[::-1]
        return np.cumsum(at_least)

    @property
    def rate(self) -> FloatArray:
        """Tokens a second by kind, batch and length."""
        rows = np.arange(MAX_BATCH + 1)[:, None]
        rate: FloatArray = rows * self.tokens / self.seconds
        return rate

    def chances(self, length: int) -> FloatArray:
        """Of each accepted run at a length."""
        return np.minimum(np.append(self.runs[:length], self.runs[length:].sum()), 1.0)  # which rounding may pass


class Fleet:
    """kind: of each worker's machine. batch: [ticks, workers]. Everything is drawn beforehand, whoever decides."""

    def __init__(self, num_workers: int, num_kinds: int, seconds: float, seed: int) -> None:
        rng = np.random.default_rng([seed, num_workers])
        self.num_ticks = round(seconds / TICK_S)
        self.kind = np.arange(num_workers) % num_kinds
        changes = rng.integers(-2, 3, (self.num_ticks, num_workers))
        changes[rng.random(changes.shape) > BATCH_CHANGES] = 0
        walk = changes.cumsum(axis=0) + rng.integers(1, MAX_BATCH + 1, num_workers)
        self.batch = 1 + np.abs(np.mod(walk - 1, 2 * MAX_BATCH - 2) - (MAX_BATCH - 1))  # reflected at both ends
        worlds = np.random.default_rng([seed, 1])  # the same machines for fleets of all sizes
        machines = [random_machine(worlds, MAX_BATCH, MAX_LENGTH) for _ in range(num_kinds)]
        requests = random_requests(worlds, MAX_LENGTH)
        slower = [machine.throttled(THROTTLED) for machine in machines]
        other = requests.scaled(OTHER_PROMPTS)
        self.phases = [phase_of(*world) for world in ((machines, requests), (machines, other), (slower, other))]

    def phase(self, tick: int) -> Phase:
        return self.phases[min(3 * tick // self.num_ticks, 2)]


def phase_of(machines: list[Machine], requests: Requests) -> Phase:
    """What holds while machines and requests are these."""
    shares = np.array([1.0 - requests.hard_share, requests.hard_share])
    return Phase(np.stack([machine.seconds() for machine in machines]), shares @ requests.run_probabilities())


def key_of(kind: int) -> ContextKey:
    """The context of a kind of machine."""
    return ContextKey("target", "draft", f"machine-{kind}", "float32")


def drawn(
    rng: np.random.Generator, phase: Phase, kind: int, batch: int, length: int, num_steps: int
) -> StepObservation:
    """So many steps of a worker, added up."""
    runs = rng.multinomial(num_steps * batch, phase.chances(length))
    mean_log = NOISE * rng.standard_normal() / num_steps**0.5
    seconds = float(phase.seconds[kind, batch, length]) * float(np.exp(mean_log))
    return StepObservation(batch, length, seconds, tuple(runs.tolist()), num_steps=num_steps)
