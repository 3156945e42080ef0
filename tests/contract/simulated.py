"""A worker on a made-up machine and text that follows its table and probes over gRPC.

Workers stay within draft lengths: an arm with n-grams is outside their limits.
"""

from dataclasses import dataclass

import grpc
import numpy as np

from speclen.v1 import control_pb2 as pb
from tests.contract.protocol import Control, ReportStream
from tests.support.world import World

GROUP = 8


@dataclass(frozen=True)
class Played:
    """A reported step of a simulated worker, and the length its table had for it."""

    step: pb.StepReport
    choice: int


class SimulatedWorker:
    """A worker whose steps are drawn from a distribution and take no real time."""

    def __init__(self, channel: grpc.Channel, name: str, worker_id: str, world: World, seed: int = 0) -> None:
        self.control = Control(channel, name, worker_id)
        self.choices = self.control.register()
        self.stream = ReportStream(self.control)
        self.world = world
        self.dice = np.random.default_rng(seed)
        self.history: list[Played] = []
        self.seq = 0
        self._probe: pb.Probe | None = None
        self._steps_left = 0

    def play(self, batch_size: int, num_steps: int) -> None:
        """Decode at one batch size, reporting in groups."""
        for _ in range(num_steps // GROUP):
            group = [self._step(batch_size) for _ in range(GROUP)]
            self.history += group
            choices, probes = self.stream.send((played.step for played in group), self.seq)
            self.choices.update(choices)
            if probes:
                self._probe = probes[-1]
                self._steps_left = self._probe.num_steps

    def _step(self, batch_size: int) -> Played:
        choice, probe, probe_id = self.choices[batch_size], self._probe, 0
        length = choice
        if probe is not None and probe.batch_min <= batch_size <= probe.batch_max:
            length, probe_id = probe.speculation_length, probe.probe_id
            self._steps_left -= 1
            if not self._steps_left:
                self._probe = None
        self.seq += 1
        latency_s, histogram = self.world.draw(batch_size, length, self.dice)
        step = pb.StepReport(
            seq=self.seq,
            batch_size=batch_size,
            speculation_length=length,
            latency_s=latency_s,
            accepted_histogram=histogram,
            mean_context_length=100.0,
            probe_id=probe_id,
        )
        return Played(step, choice)
