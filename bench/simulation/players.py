"""Policies as players of the simulator: `adaptive` as the whole estimator, the others by themselves."""

from __future__ import annotations

import numpy as np

from speclen.bench.simulation.simulator import World
from speclen.controller.estimator.buckets import buckets_for
from speclen.controller.estimator.core import ContextKey, StepObservation
from speclen.controller.estimator.estimator import Estimator
from speclen.controller.estimator.policies import ADAPTIVE, make_policy
from speclen.controller.estimator.policies.fixed import FixedPolicy
from speclen.controller.estimator.policies.policy import Space
from speclen.controller.estimator.policies.profile import ProfilePolicy

KEY = ContextKey("simulated target", "simulated draft", "simulated device", "float32")


class EstimatorPlayer:
    """The estimator as workers see it: a table, numbers for mixed batches, probes, groups of reports."""

    def __init__(self, world: World) -> None:
        self.estimator = Estimator(world.scenario.buckets)
        self.estimator.add_context(KEY, world.limits)
        if world.profile is not None:
            self.estimator.seed_profile(KEY, world.profile)
        self.num_probes = self.num_decisions = 0

    def pull(self, batch_size: int, with_prompts: bool = False, worker: int = 0, rows: tuple[int, ...] = ()) -> int:
        """A probe if there is one and the worker would use it now, else the table's length, or that for its rows."""
        name = f"worker-{worker}"
        length = self.estimator.length_for(KEY, batch_size, name)
        if rows:
            mix = self.estimator.mix(KEY, name)
            length = length if mix is None else mix.length_for(rows)
        if with_prompts and length:
            return length
        probe = self.estimator.take_probe(KEY, batch_size, worker_id=name)
        if probe is not None:
            self.num_probes += 1
            return probe.speculation_length
        return length

    def report(self, worker: int, steps: list[StepObservation]) -> None:
        """A group of reports arrives."""
        outcome = self.estimator.observe(KEY, steps, f"worker-{worker}")
        self.num_decisions += len(outcome.decisions)


class PolicyPlayer:
    """A policy alone, asked before every step: without the controller's estimates, which it does not use."""

    def __init__(self, world: World, policy: str, seed: int = 0) -> None:
        self.space = Space(world.limits, buckets_for(world.scenario.buckets, world.limits.max_batch_size))
        self.bucket_of = self.space.bucket_of(range(world.limits.max_batch_size + 1))
        self.policy = make_policy(policy, self.space, seed)
        if world.profile is not None:
            self.policy.seed(world.profile)

    def table(self) -> np.ndarray | None:
        """Lengths by batch size of a policy that never learns; None for one that does."""
        if not isinstance(self.policy, FixedPolicy | ProfilePolicy):
            return None
        return np.array(self.policy.pull_all())[self.bucket_of]

    def pull(self, batch_size: int, with_prompts: bool = False, worker: int = 0, rows: tuple[int, ...] = ()) -> int:
        """The policy's choice in the bucket of this batch size."""
        return self.policy.pull(int(self.bucket_of[batch_size]))

    def report(self, worker: int, steps: list[StepObservation]) -> None:
        """A group of reports arrives."""
        self.policy.update(self.bucket_of[[step.batch_size for step in steps]], steps)


def make_player(world: World, policy: str, seed: int = 0) -> EstimatorPlayer | PolicyPlayer:
    """The player of that policy. ValueError for an unknown one."""
    return EstimatorPlayer(world) if policy == ADAPTIVE else PolicyPlayer(world, policy, seed)
