"""`speclen bench policy`: plays policies against simulated machines and prints how close they come to a clairvoyant."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from speclen.bench.simulation.ablation import SWITCHED_OFF, without
from speclen.bench.simulation.closed_loop import ClosedLoop
from speclen.bench.simulation.players import PolicyPlayer, make_player
from speclen.bench.simulation.scenarios import SCENARIOS
from speclen.bench.simulation.simulator import World
from speclen.console.errors import UserError
from speclen.controller.estimator.policies import ADAPTIVE, POLICIES, is_policy

COMPARED = (
    *("adaptive", "profile", "fixed:1", "fixed:2", "fixed:3", "fixed:4", "fixed:6", "none", "ema", "throughput-aware"),
    *("thompson", "ucb1", "bin-greedy", "ucbspec", "exp3spec"),
)
J = TypeVar("J")
R = TypeVar("R")
REGRET_POINTS = 60
SCENARIO_HELP = f"Scenario, repeatable; all when absent: {', '.join(SCENARIOS)}."
POLICIES_DEFAULT = ",".join(COMPARED)


@dataclass(frozen=True, slots=True)
class Job:
    """Runs of some policies in one seed of a scenario: they meet the same steps."""

    scenario: str
    seed: int
    policies: tuple[str, ...]
    num_steps: int
    without: str = ""  # piece of the estimator that is switched off; see bench/simulation/ablation.py


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it.

    score: percent. Open loop: clairvoyant's time for the same work over the time spent, higher is better. Closed loop:
    latency per token over the clairvoyant's, lower is better. recovery_steps: after each change of the world, until the
    next 50 steps lose at most 2%. regret: lost time in mean steps, at REGRET_POINTS equally spaced moments.
    """

    scenario: str
    policy: str
    seed: int
    score: float
    recovery_steps: tuple[int, ...]
    regret: tuple[float, ...]
    num_probes: int
    num_decisions: int


def play(job: Job) -> list[Outcome]:
    """Run one job in this process."""
    with without(job.without):
        outcomes = _play(job)
    return [replace(each, policy=f"without {job.without}") for each in outcomes] if job.without else outcomes


def _play(job: Job) -> list[Outcome]:
    scenario = SCENARIOS[job.scenario]
    if scenario.closed_loop:
        loop = ClosedLoop(scenario, job.seed, duration_s=240.0 * job.num_steps / 12_000)
        best = loop.play(None).latency_per_token_s
        return [_play_closed(job, policy, loop, best) for policy in job.policies]
    world = World(scenario, job.seed, job.num_steps)
    return [_play_open(job, policy, world) for policy in job.policies]


def _play_open(job: Job, policy: str, world: World) -> Outcome:
    player = make_player(world, policy, job.seed)
    # A table can be scored at once only where a step takes no longer for what was played before it.
    table = player.table() if isinstance(player, PolicyPlayer) and not world.scenario.engine_flags else None
    run = world.play(player) if table is None else world.play_table(table)
    lost = np.cumsum(run.seconds - run.work) / run.seconds.mean()
    points = np.linspace(0, len(lost) - 1, REGRET_POINTS).astype(int)
    return Outcome(
        *(job.scenario, policy, job.seed, run.score, tuple(run.recovery_steps())),
        tuple(round(float(value), 2) for value in lost[points]),
        *(getattr(player, "num_probes", 0), getattr(player, "num_decisions", 0)),
    )


def _play_closed(job: Job, policy: str, loop: ClosedLoop, best: float) -> Outcome:
    player = make_player(loop.world, policy, job.seed)
    score = 100.0 * loop.play(player).latency_per_token_s / best
    probes, decisions = getattr(player, "num_probes", 0), getattr(player, "num_decisions", 0)
    return Outcome(job.scenario, policy, job.seed, score, (), (), probes, decisions)


def run_all(work: Callable[[J], R], jobs: Sequence[J], num_processes: int) -> Iterator[R]:
    """What the work makes of every job, as it comes."""
    if num_processes == 1:
        yield from map(work, jobs)
        return
    # spawn: forking a process that has threads (progress bars do) can deadlock
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        yield from pool.imap_unordered(work, jobs)


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy in one scenario over all seeds. recovery: median and worst over changes and seeds; None without any."""

    scenario: str
    policy: str
    median: float
    worst: float
    recovery_median: float | None
    recovery_worst: float | None
    regret_median: float | None
    num_seeds: int


def summarise(outcomes: Iterable[Outcome]) -> list[Summary]:
    """By scenario and policy, in the order of SCENARIOS and COMPARED."""
    cells: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        cells.setdefault((outcome.scenario, outcome.policy), []).append(outcome)
    scenarios, policies = list(SCENARIOS), list(COMPARED)

    def order(cell: tuple[str, str]) -> tuple[int, int]:
        return scenarios.index(cell[0]), policies.index(cell[1]) if cell[1] in policies else len(policies)

    return [_summary(*cell, cells[cell]) for cell in sorted(cells, key=order)]


def _summary(scenario: str, policy: str, outcomes: list[Outcome]) -> Summary:
    scores = [outcome.score for outcome in outcomes]
    worst = max(scores) if SCENARIOS[scenario].closed_loop else min(scores)
    steps = [count for outcome in outcomes for count in outcome.recovery_steps]
    regrets = [outcome.regret[-1] for outcome in outcomes if outcome.regret]
    return Summary(
        *(scenario, policy, float(np.median(scores)), worst),
        float(np.median(steps)) if steps else None,
        float(max(steps)) if steps else None,
        float(np.median(regrets)) if regrets else None,
        len(scores),
    )


def conditions(seeds: range, num_steps: int) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "seeds": [seeds.start, seeds.stop - 1],
        "steps": num_steps,
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def policy(
    scenario: list[str] = typer.Option([], help=SCENARIO_HELP),
    policies: str = typer.Option(POLICIES_DEFAULT, help="Policies, separated by commas; fixed:K for length K."),
    seeds: int = typer.Option(20, min=1, max=1000, help="Seeds per scenario."),
    first_seed: int = typer.Option(0, min=0, help="First seed; the shipped settings were tuned on 100 and above."),
    steps: int = typer.Option(12_000, min=300, max=1_000_000, help="Steps per run."),
    processes: int = typer.Option(0, min=0, max=256, help="Processes; 0 for one per core."),
    ablate: bool = typer.Option(
        False, "--ablate", help="Play the estimator whole, then with one piece at a time switched off."
    ),
    json_output: bool = typer.Option(False, "--json", help="Print JSON on stdout."),
    plot: Path | None = typer.Option(None, help="Write a picture to this .png or .svg file (needs the extra 'plot')."),
) -> None:
    """Compare policies in simulated situations: goodput as a percentage of a clairvoyant's, recovery and regret.

    Example: speclen bench policy --scenario acceptance --policies adaptive,profile,ema --seeds 5
    """
    chosen = scenario or list(SCENARIOS)
    names = [name.strip() for name in policies.split(",") if name.strip()]
    _check(chosen, names, plot)
    wanted = range(first_seed, first_seed + seeds)
    jobs = [Job(where, seed, tuple(names), steps) for where in chosen for seed in wanted]
    if ablate:
        pieces = ("", *SWITCHED_OFF)
        jobs = [Job(where, seed, (ADAPTIVE,), steps, piece) for where in chosen for seed in wanted for piece in pieces]
    start = time.monotonic()
    console = Console(stderr=True)
    todo = run_all(play, jobs, processes or os.cpu_count() or 1)
    outcomes = [each for some in track(todo, "Simulating", total=len(jobs), console=console) for each in some]
    summaries = summarise(outcomes)
    if ablate and not json_output:
        _print_worth(summaries)
        return
    if plot is not None:
        from speclen.bench.simulation.policy_plot import draw

        draw(outcomes, summaries, plot)
    if json_output:
        document = conditions(wanted, steps) | {"wall_s": round(time.monotonic() - start, 1)}
        document |= {"summary": [asdict(each) for each in summaries], "runs": [asdict(each) for each in outcomes]}
        typer.echo(json.dumps(document))
    else:
        _print(summaries)


def _print_worth(summaries: list[Summary]) -> None:
    """By piece: what the median and the worst seed lose without it where it is worth most, and where it does most harm."""
    whole = {each.scenario: each for each in summaries if each.policy == ADAPTIVE}
    table = Table("piece", "median loses at most", "worst seed loses at most", "gains most without it")
    for piece in SWITCHED_OFF:
        rows = [each for each in summaries if each.policy == f"without {piece}"]
        sign = {each.scenario: -1.0 if SCENARIOS[each.scenario].closed_loop else 1.0 for each in rows}
        median = {each.scenario: sign[each.scenario] * (whole[each.scenario].median - each.median) for each in rows}
        worst = {each.scenario: sign[each.scenario] * (whole[each.scenario].worst - each.worst) for each in rows}
        cells = [max(median, key=median.__getitem__), max(worst, key=worst.__getitem__)]
        least = min(median, key=median.__getitem__)
        table.add_row(
            piece,
            f"{median[cells[0]]:.2f} ({cells[0]})",
            f"{worst[cells[1]]:.2f} ({cells[1]})",
            f"{-median[least]:.2f} ({least})",
        )
    Console(width=150).print(table)


def _check(chosen: list[str], names: list[str], plot: Path | None) -> None:
    for where in chosen:
        if where not in SCENARIOS:
            raise UserError(f"scenario {where!r} is unknown: use one of {', '.join(SCENARIOS)}")
    for name in names:
        if not is_policy(name):
            known = ", ".join([ADAPTIVE, *POLICIES])
            raise UserError(f"policy {name!r} is unknown: use one of {known}, or fixed:K with a number K")
    if plot is not None:
        if plot.suffix not in (".png", ".svg"):
            raise UserError(f"cannot draw {plot}: use a name that ends in .png or .svg")
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise UserError("drawing needs matplotlib: install it with pip install 'speclen[plot]'") from None


def _print(summaries: list[Summary]) -> None:
    """One table per scenario."""
    console = Console()
    for name in dict.fromkeys(summary.scenario for summary in summaries):
        where = SCENARIOS[name]
        unit = "latency per token, % of the clairvoyant's" if where.closed_loop else "goodput, % of a clairvoyant's"
        table = Table(
            "policy", "median", "worst seed", "steps to recover", "regret (steps)", title=f"{where.title}: {unit}"
        )
        for each in summaries:
            if each.scenario != name:
                continue
            recovery = "" if each.recovery_median is None else f"{each.recovery_median:.0f} / {each.recovery_worst:.0f}"
            regret = "" if each.regret_median is None else f"{each.regret_median:.0f}"
            table.add_row(each.policy, f"{each.median:.1f}", f"{each.worst:.1f}", recovery, regret)
        console.print(table)
