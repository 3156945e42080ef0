"""Cost of a report to the estimator, in microseconds of processor time."""

from __future__ import annotations

import time

from speclen.bench.simulation.drawing import World
from speclen.bench.simulation.learner import KEY
from speclen.bench.simulation.scenarios import SCENARIOS
from speclen.controller.estimator import Estimator
from speclen.records import Arm, StepRecord

WORLDS = ("stationary", "classes")
GROUPS = (8, 64)
NUM_REPORTS, SEED, PASSES = 6400, 1000, 3


def costs() -> dict[str, float]:
    """By world and size of the groups; the quickest of some passes."""
    found = {}
    for name in WORLDS:
        world = World(SCENARIOS[name], SEED, NUM_REPORTS)
        records = _records(world)
        for size in GROUPS:
            found[f"{name}, groups of {size}"] = round(min(_cost_us(records, world, size) for _ in range(PASSES)), 1)
    return found


def _records(world: World) -> list[StepRecord]:
    """Steps with lengths that change slowly, as of a worker whose batch size changes."""
    course, classes = world.courses[0], world.scenario.classes_reported
    return [course.record(at, Arm(1 + at // 7 % 5), 0, classes) for at in range(NUM_REPORTS)]


def _cost_us(records: list[StepRecord], world: World, size: int) -> float:
    estimator = Estimator()
    estimator.add_context(KEY, world.limits)
    if world.profile is not None:
        estimator.seed_profile(KEY, world.profile)
    start = time.process_time()
    for first in range(0, NUM_REPORTS, size):
        estimator.observe(KEY, records[first : first + size], "worker-0")
    return 1e6 * (time.process_time() - start) / NUM_REPORTS
