"""A worker on a made-up machine and text that follows its table and probes over gRPC.

Workers stay within draft lengths: an arm with n-grams is outside their limits.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc
import numpy as np

from tests.contract.protocol import Control, Probe, ReportStream, Step
from tests.support.world import World

GROUP = 8


def step(world: World, batch_size: int, length: int, dice: np.random.Generator, probe_id: int = 0) -> Step:
    """One step with noise."""
    return Step(batch_size, length, *world.draw(batch_size, length, dice), probe_id)


@dataclass(frozen=True)
class Played:
    """A step of a simulated worker, and the length its table had for it."""

    step: Step
    choice: int


class SimulatedWorker:
    """A worker whose steps take no time."""

    def __init__(self, channel: grpc.Channel, name: str, worker_id: str, world: World, seed: int = 0) -> None:
        self.control = Control(channel, name, worker_id)
        self.choices = dict(self.control.register().choices)
        self.stream = ReportStream(self.control)
        self.world = world
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
            reports = enumerate((played.step for played in group), first)
            answer = self.stream.send(reports, self.seq)
            self.choices.update(answer.choices)
            if answer.probes:
                self._probe = answer.probes[-1]
                self._steps_left = self._probe.num_steps

    def _step(self, batch_size: int) -> Played:
        choice = self.choices[batch_size]
        probe = self._probe
        if probe is None or not probe.batch_min <= batch_size <= probe.batch_max:
            return Played(step(self.world, batch_size, choice, self.dice), choice)
        self._steps_left -= 1
        if not self._steps_left:
            self._probe = None
        return Played(step(self.world, batch_size, probe.length, self.dice, probe.probe_id), choice)
