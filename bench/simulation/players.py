"""A controller's policy as a player of the simulator: a table, probes of some steps, groups of reports."""

from __future__ import annotations

import numpy as np

from speclen.bench.simulation.simulator import World
from speclen.controller.estimator import Estimator
from speclen.records import ContextKey, Probe, StepRecord, Table

KEY = ContextKey("simulated target", "simulated draft", "simulated device", "float32")
PROBE_STEPS = 3


class EstimatorPlayer:
    """The estimator under one policy, as its workers see it. ValueError for an unknown policy."""

    def __init__(self, world: World, policy: str = "adaptive") -> None:
        self.estimator, self.limits = Estimator(policy), world.limits
        self.estimator.add_context(KEY, world.limits)
        if world.profile is not None:
            self.estimator.seed_profile(KEY, world.profile)
        self.num_probes = self.num_decisions = 0
        self._tables: dict[int, Table] = {}
        self._probes: dict[int, tuple[Probe, int]] = {}  # with the steps that are left of it

    def table(self) -> np.ndarray:
        """Lengths by batch size."""
        table = self.estimator.table(KEY)
        return np.array([table.arm_for(size).speculation_length for size in range(self.limits.max_batch_size + 1)])

    def pull(self, batch_size: int, with_prefill: bool = False, worker: int = 0) -> tuple[int, int]:
        """The table's length, or that of a probe at the worker, with its number."""
        if worker not in self._tables:
            self._tables[worker] = self.estimator.table(KEY, _name(worker))
        length = self._tables[worker].arm_for(batch_size).speculation_length
        probe, left = self._probes.get(worker, (None, 0))
        if probe is None or (with_prefill and length) or not probe.batch_min <= batch_size <= probe.batch_max:
            return length, 0
        self._probes[worker] = probe, left - 1
        if left == 1:
            del self._probes[worker]
        return probe.arm.speculation_length, probe.probe_id

    def report(self, worker: int, steps: list[StepRecord]) -> None:
        """Take a group of reports, and perhaps a probe for their sender."""
        outcome = self.estimator.observe(KEY, steps, _name(worker))
        self.num_decisions += len(outcome.decisions)
        self._tables = {}
        if worker not in self._probes:
            size = steps[-1].batch_size
            probe = self.estimator.take_probe(KEY, _name(worker), size, self.limits, PROBE_STEPS)
            if probe is not None:
                self._probes[worker] = probe, probe.num_steps
                self.num_probes += 1


def _name(worker: int) -> str:
    return f"worker-{worker}"
