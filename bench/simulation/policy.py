"""`speclen bench policy`: plays policies on simulated machines and prints goodput in percent of the oracle's."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import NamedTuple

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from speclen.bench.simulation.learner import Constant, EstimatorLearner, Learner
from speclen.bench.simulation.own_h200 import OwnH200
from speclen.bench.simulation.play import play
from speclen.bench.simulation.scenarios import SCENARIOS, Scenario, Worlds
from speclen.cli.support.errors import UserError, user_errors
from speclen.worker.config import parse_policy

COMPARED = "adaptive,profile,n-gram,none,fixed:1,fixed:3,fixed:5,fixed:8"
FIRST_S = 40.0
SCENARIO_HELP = f"Scenario, repeatable; all when absent: {', '.join(SCENARIOS)}."


Job = tuple[str, str, int]  # scenario, policy, seed


class Run(NamedTuple):
    """Goodput in percent of the oracle's: of all steps, of the first 40 seconds, of the rest."""

    scenario: str
    policy: str
    seed: int
    whole: float
    first: float
    later: float


def run(job: Job, seconds: float) -> Run:
    """Play in this process. seconds: of simulated time."""
    name, policy, seed = job
    scenario = SCENARIOS[name]
    worlds = scenario.worlds(seed, seconds)
    score = play(learner_of(policy, scenario, worlds), *worlds, last_is_faulty=scenario.last_is_faulty)
    shares = (score.percent(), score.percent(0.0, FIRST_S), score.percent(FIRST_S))
    return Run(*job, *(round(share, 2) for share in shares))


def learner_of(policy: str, scenario: Scenario, worlds: Worlds) -> Learner:
    """The controller's estimator, or an arm of that name."""
    first = worlds[0]
    if (arm := parse_policy(policy)) is not None:
        return Constant(arm.within(first.limits))
    profile = scenario.profile(first.outputs) if scenario.profile and isinstance(first, OwnH200) else None
    return EstimatorLearner(first.limits, policy, profile, scenario.probe_steps)


def run_all(jobs: Sequence[Job], seconds: float, num_processes: int) -> Iterator[Run]:
    """Runs of all jobs, in their order."""
    play_one = partial(run, seconds=seconds)
    if num_processes == 1:
        yield from map(play_one, jobs)
        return
    # spawn: forking a process that has threads (progress bars do) can deadlock
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        yield from pool.imap(play_one, jobs)


def policy(
    scenario: list[str] = typer.Option([], help=SCENARIO_HELP),
    policies: str = typer.Option(
        COMPARED,
        help="Policies, separated by commas: adaptive, profile, or one arm as above.",
        show_default=COMPARED.replace(",", ", "),
    ),
    seeds: int = typer.Option(8, min=1, max=1000, help="Seeds per scenario."),
    first_seed: int = typer.Option(0, min=0, help="First seed."),
    seconds: float = typer.Option(120.0, min=60.0, max=3600.0, help="Simulated time of a run."),
    processes: int = typer.Option(0, min=0, max=256, help="Processes; 0 for one per core."),
    json_output: bool = typer.Option(False, "--json", help="Print JSON on stdout."),
) -> None:
    """Compare policies in simulated situations: goodput in percent of the oracle's.

    Example: speclen bench policy --scenario acceptance --policies adaptive,profile,fixed:3 --seeds 5
    """
    chosen = scenario or list(SCENARIOS)
    names = [name.strip() for name in policies.split(",") if name.strip()]
    check(chosen, names)
    jobs = list(product(chosen, names, range(first_seed, first_seed + seeds)))
    todo = run_all(jobs, seconds, processes or os.cpu_count() or 1)
    runs = list(track(todo, total=len(jobs), console=Console(stderr=True)))
    if json_output:
        lines = ",\n  ".join(json.dumps(each._asdict()) for each in runs)
        typer.echo(f'{{"seconds": {seconds}, "runs": [\n  {lines}\n]}}')
        return
    for where in chosen:
        Console().print(table_of(where, [each for each in runs if each.scenario == where]))


def check(chosen: list[str], names: list[str]) -> None:
    """Raises UserError naming a scenario or policy that does not exist."""
    for where in chosen:
        if where not in SCENARIOS:
            raise UserError(f"scenario {where!r} is unknown: use one of {', '.join(SCENARIOS)}")
    for name in names:
        with user_errors():
            parse_policy(name)


def table_of(where: str, runs: list[Run]) -> Table:
    """Medians over the seeds of each policy."""
    title = f"{where}: {SCENARIOS[where].title}; goodput, % of the oracle's"
    table = Table("policy", "median", "worst seed", "first 40 s", "after 40 s", title=title)
    for name in dict.fromkeys(each.policy for each in runs):
        mine = [each for each in runs if each.policy == name]
        whole = [each.whole for each in mine]
        parts = (median(each.first for each in mine), median(each.later for each in mine))
        table.add_row(name, *(f"{share:.1f}" for share in (median(whole), min(whole), *parts)))
    return table
