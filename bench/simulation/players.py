"""Policies as players of the simulator: `adaptive` through the whole controller, the others by themselves."""

from __future__ import annotations

import numpy as np

from speclen.bench.simulation.simulator import World
from speclen.controller.estimator.acceptance import AcceptanceModel, band_of
from speclen.controller.estimator.buckets import buckets_for
from speclen.controller.estimator.context import ContextModel
from speclen.controller.estimator.core import ContextKey, StepObservation
from speclen.controller.estimator.estimation import Estimator
from speclen.controller.estimator.policies import make_policy
from speclen.controller.estimator.policies.fixed import FixedPolicy
from speclen.controller.estimator.policies.profile import ProfilePolicy
from speclen.controller.successor.estimator import Estimator as Successor

SUCCESSOR = "successor"  # the policy name of the estimator to come

KEY = ContextKey("simulated target", "simulated draft", "simulated device", "float32")


class ControllerPlayer:
    """The controller as workers see it: a table, probes, groups of reports."""

    def __init__(self, world: World, policy: str = "adaptive", seed: int = 0) -> None:
        self.controller = Estimator(policy, seed, world.scenario.buckets)
        self.controller.add_context(KEY, world.limits)
        if world.profile is not None:
            self.controller.seed_profile(KEY, world.profile)
        self.num_probes = 0
        self.num_decisions = 0

    def pull(self, batch_size: int, with_prompts: bool = False, worker: int = 0, rows: tuple[int, ...] = ()) -> int:
        """A probe if there is one and the worker would use it now, else the table's length."""
        length = self.controller.length_for(KEY, batch_size)
        if with_prompts and length:
            return length
        probe = self.controller.take_probe(KEY, batch_size)
        if probe is not None:
            self.num_probes += 1
            return probe.speculation_length
        return length

    def report(self, worker: int, steps: list[StepObservation]) -> None:
        """A group of reports arrives."""
        self.num_decisions += len(self.controller.observe(KEY, steps, f"worker-{worker}").decisions)


class SuccessorPlayer:
    """The estimator to come, as workers would see it."""

    def __init__(self, world: World, seed: int = 0) -> None:
        self.estimator = Successor(world.scenario.buckets)
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
        limits = world.limits
        acceptance = AcceptanceModel(limits.max_speculation_length, band_of(limits.max_batch_size) + 1)
        buckets = buckets_for(world.scenario.buckets, limits.max_batch_size)
        self.model = ContextModel(KEY, limits, buckets, acceptance)
        self.policy = make_policy(policy, self.model, seed)
        if world.profile is not None:
            self.policy.seed(world.profile)

    def table(self) -> np.ndarray | None:
        """Lengths by batch size of a policy that never learns; None for one that does."""
        if not isinstance(self.policy, FixedPolicy | ProfilePolicy):
            return None
        return np.array(self.policy.pull_all())[self.model.latency.bucket_of]

    def pull(self, batch_size: int, with_prompts: bool = False, worker: int = 0, rows: tuple[int, ...] = ()) -> int:
        """The policy's choice in the bucket of this batch size."""
        return self.policy.pull(int(self.model.latency.bucket_of[batch_size]))

    def report(self, worker: int, steps: list[StepObservation]) -> None:
        """A group of reports arrives."""
        self.policy.update(np.array([self.model.latency.bucket_of[step.batch_size] for step in steps]), steps)


def make_player(world: World, policy: str, seed: int = 0) -> SuccessorPlayer | ControllerPlayer | PolicyPlayer:
    """The player of that policy. ValueError for an unknown one."""
    if policy == SUCCESSOR:
        return SuccessorPlayer(world, seed)
    return ControllerPlayer(world, policy, seed) if policy == "adaptive" else PolicyPlayer(world, policy, seed)
