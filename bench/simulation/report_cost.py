"""What a report costs the estimator: `python -m speclen.bench.simulation.report_cost`, in microseconds of processor time."""

from __future__ import annotations

import time

import typer

from speclen.bench.simulation.scenarios import SCENARIOS
from speclen.bench.simulation.simulator import World, observe
from speclen.controller.estimator.core import ContextKey, Profile, StepObservation
from speclen.controller.estimator.estimator import Estimator

KEY = ContextKey("target", "draft", "device", "float32")
# Requests told apart, and contexts that grow: what the service's reports are like.
WORLDS = ("stationary", "context", "classes")
GROUPS = ((8, 1), (64, 1), (64, 8))  # reports of a group, workers that sent them
NUM_REPORTS, SEED = 6400, 100


def reports(world: World) -> list[StepObservation]:
    """Steps at lengths that change slowly, as a worker plays them whose batch changes."""
    course, told = world.courses[0], world.scenario.classes_told
    return [observe(course, at, 1 + at // 7 % 5, told) for at in range(NUM_REPORTS)]


def cost_us(steps: list[StepObservation], world: World, size: int, num_workers: int) -> float:
    """Microseconds of processor time per report, of one pass over all of them."""
    estimator, profile = Estimator(), world.profile
    estimator.add_context(KEY, world.limits)
    estimator.seed_profile(KEY, profile if profile is not None else Profile((), (), ()))
    senders = [f"worker-{at * num_workers // size}" for at in range(size)]
    start = time.process_time()
    for first in range(0, NUM_REPORTS, size):
        estimator.observe(KEY, steps[first : first + size], senders)
    return 1e6 * (time.process_time() - start) / NUM_REPORTS


def main(repeats: int = typer.Option(3, min=1, help="Passes over the reports; the quickest counts.")) -> None:
    """Print microseconds per report, of one core."""
    for name in WORLDS:
        world = World(SCENARIOS[name], SEED, NUM_REPORTS)
        steps = reports(world)
        for size, num_workers in GROUPS:
            least = min(cost_us(steps, world, size, num_workers) for _ in range(repeats))
            typer.echo(f"{name:10} groups of {size:2} from {num_workers} workers: {least:5.1f} us a report")


if __name__ == "__main__":
    typer.run(main)
