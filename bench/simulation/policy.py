"""`speclen bench policy`: plays policies against simulated machines and prints how close they come to an oracle."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, TypeVar

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from speclen.bench.simulation.players import EstimatorPlayer
from speclen.bench.simulation.scenarios import SCENARIOS
from speclen.bench.simulation.simulator import World
from speclen.console.errors import UserError
from speclen.controller.estimator import Estimator

ADAPTIVE = "adaptive"
COMPARED = (ADAPTIVE, "profile", *(f"fixed:{length}" for length in (1, 2, 3, 4, 6, 8)), "none")
J = TypeVar("J")
R = TypeVar("R")
SCENARIO_HELP = f"Scenario, repeatable; all when absent: {', '.join(SCENARIOS)}."


@dataclass(frozen=True, slots=True)
class Job:
    """Runs of some policies in one seed of a scenario: they meet the same steps."""

    scenario: str
    seed: int
    policies: tuple[str, ...]
    num_steps: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Score of one policy in one seed.

    score: percent, the oracle's time for the same work over the time spent. recovery_steps: after each change of the
    world, until the next 50 steps lose at most 2%.
    """

    scenario: str
    policy: str
    seed: int
    score: float
    recovery_steps: tuple[int, ...]
    num_probes: int
    num_decisions: int


def play(job: Job) -> list[Outcome]:
    """Run one job in this process."""
    world = World(SCENARIOS[job.scenario], job.seed, job.num_steps)
    return [_play_one(job, policy, world) for policy in job.policies]


def _play_one(job: Job, policy: str, world: World) -> Outcome:
    player = EstimatorPlayer(world, policy)
    # A table can be scored at once only where a step takes no longer for what was played before it.
    at_once = policy != ADAPTIVE and not world.scenario.engine_flags
    run = world.play_table(player.table()) if at_once else world.play(player)
    recovery = tuple(run.recovery_steps())
    return Outcome(job.scenario, policy, job.seed, run.score, recovery, player.num_probes, player.num_decisions)


def run_all(work: Callable[[J], R], jobs: Sequence[J], num_processes: int) -> Iterator[R]:
    """Results of all jobs, as they come."""
    if num_processes == 1:
        yield from map(work, jobs)
        return
    # spawn: forking a process that has threads (progress bars do) can deadlock
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        yield from pool.imap_unordered(work, jobs)


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy in one scenario over all seeds. recovery: median over changes and seeds; None without any."""

    scenario: str
    policy: str
    median: float
    worst: float
    recovery: float | None
    num_seeds: int


def summarise(outcomes: Iterable[Outcome]) -> list[Summary]:
    """By scenario and policy, in the order in which they were asked for."""
    cells: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        cells.setdefault((outcome.scenario, outcome.policy), []).append(outcome)
    return [_summary(*cell, found) for cell, found in cells.items()]


def _summary(scenario: str, policy: str, outcomes: list[Outcome]) -> Summary:
    scores = [outcome.score for outcome in outcomes]
    steps = [count for outcome in outcomes for count in outcome.recovery_steps]
    return Summary(scenario, policy, median(scores), min(scores), median(steps) if steps else None, len(scores))


def policy(
    scenario: list[str] = typer.Option([], help=SCENARIO_HELP),
    policies: str = typer.Option(",".join(COMPARED), help="Policies, separated by commas; fixed:K for length K."),
    seeds: int = typer.Option(4, min=1, max=1000, help="Seeds per scenario."),
    first_seed: int = typer.Option(0, min=0, help="First seed."),
    steps: int = typer.Option(12_000, min=300, max=1_000_000, help="Steps per run."),
    processes: int = typer.Option(0, min=0, max=256, help="Processes; 0 for one per core."),
    json_output: bool = typer.Option(False, "--json", help="Print JSON on stdout."),
) -> None:
    """Compare policies in simulated situations: goodput in percent of an oracle's, and recovery.

    Example: speclen bench policy --scenario acceptance --policies adaptive,profile,none --seeds 5
    """
    chosen, names = scenario or list(SCENARIOS), [name.strip() for name in policies.split(",") if name.strip()]
    check(chosen, names)
    jobs = [Job(where, first_seed + at, tuple(names), steps) for where in chosen for at in range(seeds)]
    done = run_all(play, jobs, processes or os.cpu_count() or 1)
    console = Console(stderr=True)
    outcomes = [each for some in track(done, "Simulating", total=len(jobs), console=console) for each in some]
    order = [(where, name) for where in chosen for name in names]
    outcomes.sort(key=lambda each: (order.index((each.scenario, each.policy)), each.seed))
    if json_output:
        typer.echo(json.dumps(document(outcomes, steps)))
    else:
        show(summarise(outcomes))


def check(chosen: list[str], names: list[str]) -> None:
    """Raise UserError for an unknown scenario or policy."""
    for where in chosen:
        if where not in SCENARIOS:
            raise UserError(f"scenario {where!r} is unknown: use one of {', '.join(SCENARIOS)}")
    for name in names:
        try:
            Estimator(name)
        except ValueError as error:
            raise UserError(str(error)) from None


def document(outcomes: list[Outcome], num_steps: int) -> dict[str, Any]:
    """All runs and their conditions."""
    return {
        "steps": num_steps,
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "summary": [asdict(each) for each in summarise(outcomes)],
        "runs": [asdict(each) for each in outcomes],
    }


def show(summaries: list[Summary]) -> None:
    """One table per scenario."""
    for name in dict.fromkeys(summary.scenario for summary in summaries):
        columns = ("policy", "median", "worst seed", "steps to recover")
        table = Table(*columns, title=f"{SCENARIOS[name].title}: goodput, % of the oracle's")
        for each in summaries:
            if each.scenario == name:
                recovery = "" if each.recovery is None else f"{each.recovery:.0f}"
                table.add_row(each.policy, f"{each.median:.1f}", f"{each.worst:.1f}", recovery)
        Console().print(table)
