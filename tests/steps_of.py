"""Made-up steps for the tests of the estimator: a cost formula and an acceptance, with seeded noise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from speclen.controller.estimator.core import ContextKey, Limits, Profile, ProfileCell, StepObservation
from speclen.controller.estimator.estimator import Estimator
from speclen.controller.estimator.plans.choice import PlanChoice

KEY = ContextKey("target", "draft", "device", "float32")
LIMITS = Limits(32, 8)


def step_time(batch: int, length: int) -> float:
    """Seconds of a step: overhead, draft passes, and a verifying pass that grows beyond 60 tokens."""
    return 0.002 + 0.0015 * length + 0.020 * max(1.0, batch * (length + 1) / 60.0)


class Steps:
    """Draws the reports of a simulated worker."""

    def __init__(self, seed: int, acceptance: float = 0.75, noise: float = 0.03) -> None:
        self.rng = np.random.default_rng(seed)
        self.acceptance = acceptance
        self.noise = noise
        self.time: Callable[[int, int], float] = step_time

    def step(self, batch: int, length: int, context: float = 100.0) -> StepObservation:
        """One report."""
        runs = np.minimum(self.rng.geometric(1.0 - self.acceptance, size=batch) - 1, length)
        histogram = tuple(np.bincount(runs, minlength=length + 1).tolist())
        taken = self.time(batch, length) * float(np.exp(self.noise * self.rng.standard_normal()))
        return StepObservation(batch, length, taken, histogram, context)

    def goodput(self, batch: int, length: int) -> float:
        """True tokens per row and second."""
        tokens = sum(self.acceptance**i for i in range(length + 1))
        return tokens / self.time(batch, length)

    def best(self, batch: int) -> int:
        """The best length by true means."""
        return max(range(LIMITS.max_speculation_length + 1), key=lambda length: self.goodput(batch, length))


def profile_of(steps: Steps, factor: float = 1.0) -> Profile:
    """What a profile of these steps says; factor: on the times of all steps with draft tokens."""
    cells = tuple(
        ProfileCell(batch, length, steps.time(batch, length) * (factor if length else 1.0), 0.0, 20)
        for batch in (1, 2, 4, 8, 16, 32)
        for length in range(9)
    )
    return Profile(cells, tuple(steps.acceptance**i for i in range(1, 9)), (4000,) * 8, source="test")


def controller_for(steps: Steps | None = None, policy: str = "adaptive", factor: float = 1.0) -> Estimator:
    """A controller with one context, seeded from a profile of the steps if there are any."""
    controller = Estimator(policy=policy)
    controller.add_context(KEY, LIMITS)
    if steps is not None:
        controller.seed_profile(KEY, profile_of(steps, factor))
    return controller


def serve(
    controller: Estimator, steps: Steps, batch: int, count: int, worker: str = "w", probes: bool = True
) -> list[int]:
    """Let a worker decode with the controller's table, four steps to a report group; returns the lengths played."""
    played = []
    for _ in range(count // 4):
        group = []
        for _ in range(4):
            probe = controller.take_probe(KEY, batch) if probes else None
            length = probe.speculation_length if probe else controller.length_for(KEY, batch)
            played.append(length)
            group.append(steps.step(batch, length))
        controller.observe(KEY, group, worker)
    return played


def plans_at_four_rows() -> tuple[PlanChoice, np.ndarray, np.ndarray]:
    """Plans that know 50 steps, the bucket of four rows, and what is expected there without copies."""
    estimator = Estimator()
    estimator.add_context(KEY, Limits(8, 4, 16))
    estimator.observe(KEY, [Steps(3).step(4, 2) for _ in range(50)], "w")
    context = estimator.context(KEY)
    plans = context.main.plans
    assert plans is not None
    bucket = np.array([estimator.bucket_index(KEY, 4)])
    return plans, bucket, context.tokens(context.main)[bucket]


def restarted(first: Estimator) -> Estimator:
    """Another one that goes on from what this one would have saved."""
    second = Estimator()
    second.restore(KEY, first.limits(KEY), first.export_state(KEY), first.export_pair_state(KEY.pair))
    return second
