"""Other ways to choose a speculation length than the estimator's own, one short file each, behind `pull` and `update`."""

from __future__ import annotations

from collections.abc import Callable

from speclen.controller.estimator.policies.banditspec import Exp3SpecPolicy, UcbSpecPolicy
from speclen.controller.estimator.policies.bin_greedy import BinGreedyPolicy
from speclen.controller.estimator.policies.ema import EmaPolicy
from speclen.controller.estimator.policies.fixed import FixedPolicy
from speclen.controller.estimator.policies.policy import Policy, Space
from speclen.controller.estimator.policies.profile import ProfilePolicy
from speclen.controller.estimator.policies.thompson import ThompsonPolicy
from speclen.controller.estimator.policies.throughput_aware import ThroughputAwarePolicy
from speclen.controller.estimator.policies.ucb1 import Ucb1Policy

# The estimator's own choice: `speclen.controller.estimator.choice`.
ADAPTIVE = "adaptive"

# name -> constructor from what there is to choose among and a seed
POLICIES: dict[str, Callable[[Space, int], Policy]] = {
    "profile": lambda space, seed: ProfilePolicy(space),
    "none": lambda space, seed: FixedPolicy(space, 0),
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
    return name == ADAPTIVE or name in POLICIES or (kind == "fixed" and length.isdigit() and int(length) <= 64)


def check_policy(name: str) -> str:
    """The name. ValueError if there is no such policy."""
    if not is_policy(name):
        known = ", ".join(sorted({ADAPTIVE, *POLICIES}))
        raise ValueError(f"policy {name!r} is unknown: use one of {known}, or fixed:K with K from 0 to 64")
    return name


def make_policy(name: str, space: Space, seed: int = 0) -> Policy:
    """A policy other than the estimator's own ("fixed:4" is length 4 always). ValueError if there is none of that name."""
    check_policy(name)
    if name in POLICIES:
        return POLICIES[name](space, seed)
    if name == ADAPTIVE:
        raise ValueError("policy 'adaptive' is the estimator itself")
    return FixedPolicy(space, int(name.partition(":")[2]))
