"""Capacity of the machine: tokens per second that reach clients with every slot busy, at the best of some fixed lengths.

Unlike a profile, which times steps inside the engine, prompts come and go and gRPC is in between. Loads of tracks are shares
of it.
"""

from __future__ import annotations

from collections.abc import Callable

from speclen.bench.serving.load import Yield
from speclen.records import Arm

LENGTHS = (0, 1, 2, 3, 4)  # the one that serves a full worker fastest is short
AGREE, MOST_VISITS = 1.05, 6
Visit = Callable[[Arm], Yield]


def best_length(visit: Visit, max_length: int) -> Arm:
    """The length with the most tokens per second in its second visit: in the first one shapes are new."""
    arms = [Arm(length) for length in LENGTHS if length <= max_length]
    for arm in arms:
        visit(arm)
    return max(arms, key=lambda arm: visit(arm).tokens_per_s)


def capacity(visit: Visit, max_length: int) -> list[float]:
    """Tokens per second by visit at the best length; the last two agree unless something else runs, and are what counts."""
    arm, rates = best_length(visit, max_length), list[float]()
    while len(rates) < MOST_VISITS and not is_settled(rates):
        rates.append(visit(arm).tokens_per_s)
    return rates


def is_settled(rates: list[float]) -> bool:
    """True if the last two visits agree."""
    return len(rates) > 1 and max(rates[-2:]) <= AGREE * min(rates[-2:])


def capacity_of(rates: list[float]) -> float:
    """Mean of the last two visits."""
    return sum(rates[-2:]) / len(rates[-2:])
