"""A simulated worker of an estimator: it follows its table and its probes, and reports steps with noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from speclen.controller.estimator import Estimator
from speclen.records import Arm, ContextKey, Limits, Probe, Profile, ProfileCell, StepRecord
from tests.support.world import World

KEY = ContextKey("target", "draft", "cpu:test", "float32")
LIMITS = Limits(32, 8)
GROUP = 8
SIZES = (1, 2, 4, 8, 16, 32)


class Worker:
    """A simulated worker that follows its table and its probes. distort: what it makes of its reports."""

    def __init__(self, estimator: Estimator, name: str = "worker", seed: int = 0, acceptance: float = 0.75) -> None:
        self.estimator, self.name, self.world = estimator, name, World(acceptance)
        self.rng, self.seq = np.random.default_rng(seed), 0
        self.distort: Callable[[StepRecord], StepRecord] = lambda step: step
        self.slowdown, self.total_s, self.lost_s = 1.0, 0.0, 0.0
        self.probe: Probe | None = None

    def chosen(self, batch_size: int) -> int:
        return self.estimator.table(self.name).arm_for(batch_size).speculation_length

    def shortfall(self, batch_size: int) -> float:
        """Share of the oracle's goodput that the table loses."""
        return self.world.shortfall(batch_size, self.chosen(batch_size))

    def step(self, batch_size: int, length: int, probe_id: int = 0) -> StepRecord:
        """One step with noise."""
        self.seq += 1
        latency_s, histogram = self.world.draw(batch_size, length, self.rng)
        drafted = batch_size if length else 0
        counts = (frozenset(), probe_id, (), drafted, batch_size * (length + 1))
        latency_s *= self.slowdown
        return self.distort(StepRecord(self.seq, batch_size, Arm(length), latency_s, histogram, 100.0, 0, *counts))

    def serve(self, batch_size: int, num_steps: int) -> list[object]:
        """Decode and report in groups; returns decisions and probes."""
        happened: list[object] = []
        for _ in range(num_steps // GROUP):
            chosen = self.chosen(batch_size)
            probe, self.probe = self.probe, None
            lengths = [chosen] * GROUP
            if probe is not None and probe.batch_min <= batch_size <= probe.batch_max:
                lengths[: probe.num_steps] = [probe.arm.speculation_length] * probe.num_steps
            ids = [probe.probe_id if probe and length != chosen else 0 for length in lengths]
            steps = [self.step(batch_size, *each) for each in zip(lengths, ids, strict=True)]
            for each in steps:
                self.lost_s += self.world.lost_s(batch_size, each.arm.speculation_length, chosen)
                self.total_s += each.latency_s
            happened += self.estimator.observe(steps, self.name).decisions
            self.probe = self.estimator.probe(self.name, batch_size)
            happened.append(self.probe)
        return happened


def made(limits: Limits = LIMITS) -> Estimator:
    """Estimators of one context."""
    return Estimator(limits=limits, key=KEY)


def profile(
    draft_s: float = 0.0015, acceptance: float = 0.75, sizes: Sequence[int] = SIZES, longest: int = 8
) -> Profile:
    """An offline profile, right by default."""
    world, lengths = World(acceptance, draft_s), range(longest + 1)
    cells = tuple(ProfileCell(size, at, world.step_s(size, at), num_steps=20) for size in sizes for at in lengths)
    return Profile(cells, tuple(world.survival()[:longest]), (4000,) * longest, source="test")
