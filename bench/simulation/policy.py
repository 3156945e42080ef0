"""`speclen bench policy`: plays policies on simulated machines and prints goodput in percent of the oracle's."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TypeVar

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from speclen.bench.simulation.drawing import World
from speclen.bench.simulation.learner import EstimatorLearner
from speclen.bench.simulation.scenarios import SCENARIOS
from speclen.bench.simulation.simulator import play as play_world
from speclen.cli.support.errors import UserError
from speclen.controller.estimator import Estimator

COMPARED = ("adaptive", "profile", "fixed:1", "fixed:2", "fixed:3", "fixed:4", "fixed:6", "none")
J = TypeVar("J")
R = TypeVar("R")
SCENARIO_HELP = f"Scenario, repeatable; all when absent: {', '.join(SCENARIOS)}."


@dataclass(frozen=True, slots=True)
class Job:
    """Runs of some policies in one seed of a scenario: they meet the same steps."""

    scenario: str
    seed: int
    policies: tuple[str, ...]
    num_steps: int = 12_000


@dataclass(frozen=True, slots=True)
class Played:
    """One run. score: goodput in percent of the oracle's."""

    scenario: str
    policy: str
    seed: int
    score: float
    num_probes: int
    num_decisions: int


def play(job: Job) -> list[Played]:
    """Run one job in this process."""
    world = World(SCENARIOS[job.scenario], job.seed, job.num_steps)
    return [_play(job, policy, world) for policy in job.policies]


def _play(job: Job, policy: str, world: World) -> Played:
    learner = EstimatorLearner(world.limits, policy, world.profile)
    run = play_world(world, learner)
    return Played(job.scenario, policy, job.seed, run.score, learner.num_probes, learner.num_decisions)


def run_all(work: Callable[[J], R], jobs: Sequence[J], num_processes: int) -> Iterator[R]:
    """Results of all jobs, as they come."""
    if num_processes == 1:
        yield from map(work, jobs)
        return
    # spawn: forking a process that has threads (progress bars do) can deadlock
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        yield from pool.imap_unordered(work, jobs)


def policy(
    scenario: list[str] = typer.Option([], help=SCENARIO_HELP),
    policies: str = typer.Option(",".join(COMPARED), help="Policies, separated by commas; fixed:K for length K."),
    seeds: int = typer.Option(8, min=1, max=1000, help="Seeds per scenario."),
    first_seed: int = typer.Option(0, min=0, help="First seed."),
    steps: int = typer.Option(12_000, min=300, max=1_000_000, help="Steps per run."),
    processes: int = typer.Option(0, min=0, max=256, help="Processes; 0 for one per core."),
    json_output: bool = typer.Option(False, "--json", help="Print JSON on stdout."),
) -> None:
    """Compare policies in simulated situations: goodput in percent of the oracle's.

    Example: speclen bench policy --scenario acceptance --policies adaptive,profile,fixed:3 --seeds 5
    """
    chosen = scenario or list(SCENARIOS)
    names = [name.strip() for name in policies.split(",") if name.strip()]
    _check(chosen, names)
    wanted = range(first_seed, first_seed + seeds)
    jobs = [Job(where, seed, tuple(names), steps) for where in chosen for seed in wanted]
    todo = track(run_all(play, jobs, processes or os.cpu_count() or 1), total=len(jobs), console=Console(stderr=True))
    runs = sorted((each for some in todo for each in some), key=lambda each: each.seed)
    if json_output:
        typer.echo(json.dumps({"steps": steps, "runs": [asdict(each) for each in runs]}))
        return
    for where in chosen:
        Console().print(_table(where, names, [each for each in runs if each.scenario == where]))


def _check(chosen: list[str], names: list[str]) -> None:
    for where in chosen:
        if where not in SCENARIOS:
            raise UserError(f"scenario {where!r} is unknown: use one of {', '.join(SCENARIOS)}")
    for name in names:
        try:
            Estimator(name)
        except ValueError as error:
            raise UserError(str(error)) from None


def _table(where: str, names: list[str], runs: list[Played]) -> Table:
    title = f"{where}: {SCENARIOS[where].title}; goodput, % of the oracle's"
    table = Table("policy", "median", "worst seed", "probes", "decisions", title=title)
    for name in names:
        mine = [each for each in runs if each.policy == name]
        scores = [each.score for each in mine]
        counts = (f"{median(getattr(each, key) for each in mine):.0f}" for key in ("num_probes", "num_decisions"))
        table.add_row(name, f"{median(scores):.1f}", f"{min(scores):.1f}", *counts)
    return table
