"""A made-up machine and text, and a worker on them that follows its table and probes over gRPC.

Workers stay within draft lengths: an arm with n-grams is outside their limits.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc
import numpy as np

from tests.contract.protocol import MAX_LENGTH, Control, Probe, ReportStream, Step

GROUP = 8


@dataclass(frozen=True)
class World:
    """True means. acceptance: of each draft token after accepted ones; draft_s: seconds of a draft pass."""

    acceptance: float = 0.75
    draft_s: float = 0.0015
    noise: float = 0.03

    def step_s(self, batch_size: int, length: int) -> float:
        """Mean step time: overhead, draft passes, and a verifying pass that grows beyond 60 tokens."""
        return 0.002 + self.draft_s * length + 0.020 * max(1.0, batch_size * (length + 1) / 60.0)

    def survival(self) -> list[float]:
        """Probability that the first 1, 2, ... draft tokens are all accepted."""
        return [self.acceptance**at for at in range(1, MAX_LENGTH + 1)]

    def tokens(self, length: int) -> float:
        """Mean tokens per sequence and step."""
        return 1.0 + sum(self.survival()[:length])

    def goodput(self, batch_size: int, length: int) -> float:
        """Mean tokens per sequence and second."""
        return self.tokens(length) / self.step_s(batch_size, length)

    def best(self, batch_size: int) -> int:
        """The oracle's length."""
        return max(range(MAX_LENGTH + 1), key=lambda length: self.goodput(batch_size, length))

    def shortfall(self, batch_size: int, length: int) -> float:
        """Share of the oracle's goodput that a length loses."""
        return 1.0 - self.goodput(batch_size, length) / self.goodput(batch_size, self.best(batch_size))

    def step(self, batch_size: int, length: int, dice: np.random.Generator, probe_id: int = 0) -> Step:
        """One step with noise."""
        runs = np.minimum(dice.geometric(1.0 - self.acceptance, size=batch_size) - 1, length)
        histogram = tuple(np.bincount(runs, minlength=length + 1).tolist())
        latency_s = self.step_s(batch_size, length) * float(np.exp(self.noise * dice.standard_normal()))
        return Step(batch_size, length, latency_s, histogram, probe_id)


@dataclass(frozen=True)
class Played:
    """A step of a simulated worker, and the length its table had for it."""

    step: Step
    choice: int

    @property
    def is_probe(self) -> bool:
        """True if the step was exploratory."""
        return self.step.probe_id > 0


class SimulatedWorker:
    """A worker whose steps take no time. faulty: reports that all is accepted, every other step in a microsecond."""

    def __init__(self, channel: grpc.Channel, name: str, worker_id: str, world: World, seed: int = 0) -> None:
        self.control = Control(channel, name, worker_id)
        self.choices = dict(self.control.register().choices)
        self.stream = ReportStream(self.control)
        self.world, self.faulty = world, False
        self.dice = np.random.default_rng(seed)
        self.history: list[Played] = []
        self.seq = 0
        self._probe: Probe | None = None
        self._steps_left = 0

    def play(self, batch_size: int, num_steps: int) -> None:
        """Decode at one batch size, reporting in groups."""
        for _ in range(num_steps // GROUP):
            group = [self._step(batch_size) for _ in range(GROUP)]
            self.history += group
            first, self.seq = self.seq + 1, self.seq + GROUP
            reports = enumerate((self._reported(played.step) for played in group), first)
            answer = self.stream.send(reports, self.seq)
            self.choices.update(answer.choices)
            if answer.probes:
                self._probe = answer.probes[-1]
                self._steps_left = self._probe.num_steps

    def _step(self, batch_size: int) -> Played:
        choice = self.choices[batch_size]
        probe = self._probe
        if probe is None or not probe.batch_min <= batch_size <= probe.batch_max:
            return Played(self.world.step(batch_size, choice, self.dice), choice)
        self._steps_left -= 1
        if not self._steps_left:
            self._probe = None
        return Played(self.world.step(batch_size, probe.length, self.dice, probe.probe_id), choice)

    def _reported(self, step: Step) -> Step:
        if not self.faulty:
            return step
        latency_s = 1e-6 if self.dice.random() < 0.5 else step.latency_s
        return Step(step.batch_size, step.length, latency_s, (0,) * step.length + (step.batch_size,), step.probe_id)
