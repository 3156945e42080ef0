"""`speclen bench plans`: how near the estimator comes to a clairvoyant's plans, in made-up and in recorded texts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from speclen.bench.simulation.copying.score import Play
from speclen.bench.simulation.copying.world import SCENARIOS, CopyWorld
from speclen.bench.simulation.policy import conditions, run_all
from speclen.console.errors import UserError
from speclen.controller.estimator.plans.plan import Plan

NAMES = {scenario.name: scenario for scenario in SCENARIOS}
COPY = Plan(0, 3, 8)  # what `--policy copy` plays


@dataclass(frozen=True, slots=True)
class Job:
    """One seed of a scenario. reads, reviews: as of `Play`."""

    scenario: str
    seed: int
    num_steps: int
    reads: bool = True
    reviews: bool = True


@dataclass(frozen=True, slots=True)
class Run:
    """What came of it, in percent of the clairvoyant: the estimator over all steps and over the later half; the best single
    plan and the best single length of all batch sizes, known beforehand; copying alone.
    """

    scenario: str
    seed: int
    adaptive: float
    later_half: float
    best_plan: float
    best_length: float
    copy: float


def play(job: Job) -> Run:
    """Run one job in this process."""
    world = CopyWorld(NAMES[job.scenario], job.seed, job.num_steps)
    run = Play(world, job.seed, job.reads, job.reviews)
    adaptive, later_half = run.score()
    alone = {plan: run.score_of(plan) for plan in run.worth[0].tokens}
    lengths = [score for plan, score in alone.items() if not plan.copy_min_match]
    scores = adaptive, later_half, max(alone.values()), max(lengths), alone[COPY]
    return Run(job.scenario, job.seed, *(round(score, 2) for score in scores))


def plans(
    scenario: str = typer.Option("", help=f"Only scenarios whose name contains this: {'; '.join(NAMES)}."),
    seeds: int = typer.Option(20, min=1, max=1000, help="Seeds per scenario."),
    first_seed: int = typer.Option(0, min=0, help="First seed."),
    steps: int = typer.Option(6000, min=300, max=1_000_000, help="Steps per run."),
    processes: int = typer.Option(0, min=0, max=256, help="Processes; 0 for one per core."),
    unread: bool = typer.Option(False, "--unread", help="Workers do not tell what they read, only what they copied."),
    unreviewed: bool = typer.Option(False, "--unreviewed", help="Workers review no outputs."),
    json_output: bool = typer.Option(False, "--json", help="Print JSON on stdout."),
) -> None:
    """Play plans (copy, draft or neither) in simulated texts: goodput as a percentage of a clairvoyant's.

    Example: speclen bench plans --scenario mixed --seeds 5 --steps 3000
    """
    chosen = [name for name in NAMES if scenario in name]
    if not chosen:
        raise UserError(f"scenario {scenario!r} is part of no name: use a part of one of {'; '.join(NAMES)}")
    wanted, start = range(first_seed, first_seed + seeds), time.monotonic()
    jobs = [Job(name, seed, steps, not unread, not unreviewed) for name in chosen for seed in wanted]
    todo = run_all(play, jobs, processes or os.cpu_count() or 1)
    runs = list(track(todo, "Simulating", total=len(jobs), console=Console(stderr=True)))
    runs.sort(key=lambda run: (chosen.index(run.scenario), run.seed))
    if json_output:
        document = conditions(wanted, steps) | {"reads": not unread, "reviews": not unreviewed}
        document |= {"wall_s": round(time.monotonic() - start, 1), "runs": [asdict(run) for run in runs]}
        typer.echo(json.dumps(document))
        return
    table = Table(*HEADINGS, title="goodput, % of a clairvoyant's: median, worst seed")
    for name in chosen:
        table.add_row(*cells(name, [run for run in runs if run.scenario == name]))
    Console(width=130).print(table)


HEADINGS = ("texts", "adaptive", "its later half", "best single plan", "best single length", "copying alone")


def cells(name: str, runs: Sequence[Run]) -> list[str]:
    """A row of the table: medians, and worst seeds of the estimator."""
    shown = [name]
    for each in ("adaptive", "later_half"):
        scores = [getattr(run, each) for run in runs]
        shown.append(f"{median(scores):.1f}, {min(scores):.1f}")
    return shown + [
        f"{median([getattr(run, each) for run in runs]):.1f}" for each in ("best_plan", "best_length", "copy")
    ]
