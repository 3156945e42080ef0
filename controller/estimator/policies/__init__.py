"""Ways to choose a speculation length, one short file each, behind `pull` and `update`."""

from __future__ import annotations

from collections.abc import Callable

from speclen.controller.estimator.context import ContextModel
from speclen.controller.estimator.policies.adaptive import AdaptivePolicy
from speclen.controller.estimator.policies.banditspec import Exp3SpecPolicy, UcbSpecPolicy
from speclen.controller.estimator.policies.bin_greedy import BinGreedyPolicy
from speclen.controller.estimator.policies.ema import EmaPolicy
from speclen.controller.estimator.policies.fixed import FixedPolicy
from speclen.controller.estimator.policies.policy import Policy
from speclen.controller.estimator.policies.profile import ProfilePolicy
from speclen.controller.estimator.policies.thompson import ThompsonPolicy
from speclen.controller.estimator.policies.throughput_aware import ThroughputAwarePolicy
from speclen.controller.estimator.policies.ucb1 import Ucb1Policy

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
