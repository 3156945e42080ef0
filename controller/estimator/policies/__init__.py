"""Ways to choose a speculation length, one short file each, behind `pull` and `update`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from speclen.controller.estimator.context import ContextModel
from speclen.controller.estimator.core import Profile, StepObservation
from speclen.controller.estimator.policies.adaptive import AdaptivePolicy
from speclen.controller.estimator.policies.banditspec import Exp3SpecPolicy, UcbSpecPolicy
from speclen.controller.estimator.policies.bin_greedy import BinGreedyPolicy
from speclen.controller.estimator.policies.ema import EmaPolicy
from speclen.controller.estimator.policies.fixed import FixedPolicy
from speclen.controller.estimator.policies.profile import ProfilePolicy
from speclen.controller.estimator.policies.thompson import ThompsonPolicy
from speclen.controller.estimator.policies.throughput_aware import ThroughputAwarePolicy
from speclen.controller.estimator.policies.ucb1 import Ucb1Policy


class Policy(Protocol):
    """Chooses a length per bucket of one context; learns from groups of steps."""

    def pull(self, bucket: int) -> int:
        """The length to use next in a bucket."""
        ...

    def pull_all(self) -> list[int]:
        """The same for every bucket, in order."""
        ...

    def update(self, buckets: np.ndarray, observations: Sequence[StepObservation]) -> None:
        """Learn from a group; buckets[i] is that of observations[i]. The context's model has learned from it before."""
        ...

    def seed(self, profile: Profile) -> None:
        """A profile was imported; the context's model has been seeded with it before."""
        ...

    def extend(self) -> None:
        """The context's model got more buckets or lengths, or was restored."""
        ...

    def export_state(self) -> dict[str, Any]:
        """JSON-able values from which to go on."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from an exported state, after the context's model has been restored."""
        ...


# name -> constructor from the context's model and a seed
POLICIES: dict[str, Callable[[ContextModel, int], Policy]] = {
    "adaptive": lambda model, seed: AdaptivePolicy(model),
    "profile": lambda model, seed: ProfilePolicy(model),
    "none": lambda model, seed: FixedPolicy(model, 0),
    "ucb1": Ucb1Policy,
    "thompson": ThompsonPolicy,
    "ema": EmaPolicy,
    "throughput-aware": ThroughputAwarePolicy,
    "bin-greedy": BinGreedyPolicy,
    "ucbspec": UcbSpecPolicy,
    "exp3spec": Exp3SpecPolicy,
}


def is_policy(name: str) -> bool:
    """Whether there is a policy of that name; fixed:K counts for K from 0 to 64."""
    kind, _, length = name.partition(":")
    return name in POLICIES or (kind == "fixed" and length.isdigit() and int(length) <= 64)


def make_policy(name: str, model: ContextModel, seed: int = 0) -> Policy:
    """The policy of that name ("fixed:4" is length 4 always). ValueError if there is none."""
    if name in POLICIES:
        return POLICIES[name](model, seed)
    if is_policy(name):
        return FixedPolicy(model, int(name.partition(":")[2]))
    raise ValueError(
        f"policy {name!r} is unknown: use one of {', '.join(sorted(POLICIES))}, or fixed:K with K from 0 to 64"
    )
