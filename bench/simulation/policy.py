"""`speclen bench policy`: the estimator and its variants in simulated worlds, in percent of an oracle's goodput."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import sqrt
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, NamedTuple, TypeVar

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from speclen.bench.simulation.learners import EstimatorLearner, Fixed, Learner, PlugIn
from speclen.bench.simulation.play import play
from speclen.bench.simulation.world import Scene
from speclen.bench.simulation.worlds import WORLDS
from speclen.cli.support.output import UserError
from speclen.controller.estimator import EstimatorSettings

Job = TypeVar("Job")
Played = TypeVar("Played")
DEFAULT = "default"
RULES = ("plug-in", "table", "constant")
# Settings that switch a mechanism of the estimator off.
ABLATIONS: dict[str, dict[str, Any]] = {
    "probes": {"explored": 1e-9},
    "optimism": {"optimism": 1e-9},
    "hysteresis": {"hysteresis": 1e-9},
    "residuals": {"residual": 1e-3},
    "change-detection": {"change": 1e9},
    "isolation": {"worker_difference": 10.0},
    "near-sizes": {"near": 1.0},
    "profile": {"profile_sd": 1e3},
}
WORLD_HELP = f"World, repeatable; all when absent: {', '.join(WORLDS)}."
ABLATE_HELP = f"Mechanism to switch off, repeatable: {', '.join(ABLATIONS)}."
HEADINGS = ("mean", "median", "worst", "first third", "middle", "last", "worst last", "probes", "changes")


class Run(NamedTuple):
    """Goodput of one run in percent of the oracle's: of all steps, and by thirds of the time."""

    world: str
    seed: int
    variant: str
    percent: float
    first_third: float
    middle_third: float
    last_third: float
    steps: int
    probe_steps: int
    drift_events: int = 0


class Variant(NamedTuple):
    """A learner to compare: the estimator with some settings, or a rule. name: as in the tables."""

    name: str
    settings: EstimatorSettings | None

    def learner(self, scene: Scene) -> Learner:
        """A new learner for a scene, which knows its limits and profile. Rules of Fixed also know the truth."""
        world = scene.world
        if self.settings is not None:
            return EstimatorLearner(self.settings, world.limits, scene.profile(), world.probe_steps)
        if self.name == "plug-in":
            return PlugIn(world.limits, world.probe_steps)
        if self.name == "table":
            return Fixed.best_of(scene.profile_of(1.0))
        return Fixed({1: scene.best_constant()})


def changed(assignments: str) -> EstimatorSettings:
    """Settings with some values changed. assignments: NAME=VALUE, separated by commas. Raises UserError."""
    values = dict(assignment.strip().partition("=")[::2] for assignment in assignments.split(","))
    if unknown := values.keys() - EstimatorSettings.model_fields.keys():
        known = ", ".join(EstimatorSettings.model_fields)
        raise UserError(f"--set: {min(unknown)!r} is not a setting of the estimator: use one of {known}")
    try:
        return EstimatorSettings.model_validate(values)
    except ValueError as error:
        raise UserError(f"--set {assignments}: {error}") from error


def run(job: tuple[str, int], variants: Sequence[Variant], seconds: float | None) -> list[Run]:
    """Run every variant in one scene. job: world and seed; seconds: of simulated time, None for the world's own."""
    name, seed = job
    scene, runs = Scene(WORLDS[name], seed, seconds), []
    for variant in variants:
        learner = variant.learner(scene)
        try:
            score = play(learner, scene)
        except Exception as error:
            error.add_note(f"World {name}, seed {seed}, variant {variant.name}.")
            raise
        whole, first, middle, last = (round(share, 2) for share in (score.percent, *score.thirds))
        counts = score.num_steps, score.num_probe_steps, learner.num_drift_events
        runs.append(Run(name, seed, variant.name, whole, first, middle, last, *counts))
    return runs


def in_processes(jobs: Sequence[Job], play_one: Callable[[Job], Played], num_processes: int) -> Iterator[Played]:
    """Results of a function for all jobs, in order."""
    if num_processes == 1:
        yield from map(play_one, jobs)
        return
    # spawn: forking a process that has threads (progress bars do) can deadlock
    with multiprocessing.get_context("spawn").Pool(
        num_processes, signal.signal, (signal.SIGINT, signal.SIG_IGN)
    ) as pool:
        yield from pool.imap(play_one, jobs)


def policy(
    world: list[str] = typer.Option([], help=WORLD_HELP),
    ablate: list[str] = typer.Option([], help=ABLATE_HELP),
    set_: list[str] = typer.Option(
        [], "--set", metavar="NAME=VALUE,...", help="Settings of the estimator to change, repeatable: a variant each."
    ),
    rule: list[str] = typer.Option([], help="Simple rule to compare with, repeatable: plug-in, table or constant."),
    runs: int = typer.Option(24, min=2, max=1000, help="Runs per world and variant, each with a seed of its own."),
    first_seed: int = typer.Option(0, min=0, help="First seed."),
    seconds: float = typer.Option(0.0, min=0.0, max=3600.0, help="Simulated time of a run; 0 for the world's own."),
    jobs: int = typer.Option(0, min=0, max=256, help="Processes; 0 for one per core."),
    against: Path | None = typer.Option(None, help="Compare with the default settings' runs in a file of --out."),
    out: Path | None = typer.Option(None, help="Write all runs to a file, as JSON."),
) -> None:
    """Compare the estimator with variants of itself and with simple rules, in percent of an oracle's goodput.

    The oracle knows every expected step time and acceptance rate. For a given seed, every variant gets the same requests,
    loads and noise, so that differences to the default settings have a standard error over the seeds, by world and over
    all. Scores use expected times, so noise affects what a variant observes but not its score. On one core, 24 runs of every
    world take about ten minutes per variant. Ctrl-C reports the runs that have finished.

    Tables have the mean, median and worst run, thirds of the time, the share of steps that were probes, and detected changes
    per 1,000 steps. Rules: `plug-in` learns discounted means and explores in 2% of the steps, `table` uses the best length
    of the true offline profile, `constant` is the best single arm in hindsight.

    Example: speclen bench policy --world own-h200 --world repeats --ablate probes --set optimism=2 --rule plug-in
    """
    for given, known, option in ((world, WORLDS, "world"), (ablate, ABLATIONS, "ablate"), (rule, RULES, "rule")):
        for name in given:
            if name not in known:
                raise UserError(f"--{option}: {name!r} is unknown: use one of {', '.join(known)}")
    variants = [
        Variant(DEFAULT, EstimatorSettings()),
        *(Variant(f"no {name}", EstimatorSettings(**ABLATIONS[name])) for name in dict.fromkeys(ablate)),
        *(Variant(assignments, changed(assignments)) for assignments in dict.fromkeys(set_)),
        *(Variant(name, None) for name in dict.fromkeys(rule)),
    ]
    before = read_runs(against) if against else []
    todo = [(name, seed) for seed in range(first_seed, first_seed + runs) for name in dict.fromkeys(world or WORLDS)]
    play_one = partial(run, variants=variants, seconds=seconds or None)
    found = in_processes(todo, play_one, jobs or os.cpu_count() or 1)
    done: list[Run] = []
    with contextlib.suppress(KeyboardInterrupt):  # the finished runs are reported
        for group in track(found, total=len(todo), console=Console(stderr=True)):
            done += group
    if not done:
        raise UserError("no run had ended")
    if out is not None:
        write_runs(out, done)
    print_board(done, before, DEFAULT)


def write_runs(path: Path, runs: Iterable[Run]) -> None:
    """Write runs as JSON lines."""
    lines = ",\n".join(json.dumps(each) for each in runs)
    path.write_text(f'{{"fields": {json.dumps(Run._fields)}, "runs": [\n{lines}\n]}}\n')


def read_runs(path: Path) -> list[Run]:
    """Runs of the default settings in a file. Raises UserError if there are none."""
    try:
        found = [
            each for each in (Run(*row) for row in json.loads(path.read_text())["runs"]) if each.variant == DEFAULT
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"--against {path}: not a file that --out wrote ({error})") from error
    if not found:
        raise UserError(f"--against {path}: it has no runs of the default settings")
    return found


class Difference(NamedTuple):
    """Mean difference of paired runs, and its standard error."""

    mean: float
    stderr: float

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ± {self.stderr:.2f}"


def difference(runs: Iterable[Run], baseline: Iterable[Run]) -> Difference | None:
    """Difference over the runs with the same world and seed, with equal weight for all worlds; None without such runs.

    The standard error is that of the seeds within each world, since worlds are chosen, not sampled.
    """
    before = {(each.world, each.seed): each.percent for each in baseline}
    by_world = defaultdict(list)
    for each in runs:
        if (each.world, each.seed) in before:
            by_world[each.world].append(each.percent - before[each.world, each.seed])
    if not by_world:
        return None
    variances = [stdev(each) ** 2 / len(each) if len(each) > 1 else float("nan") for each in by_world.values()]
    return Difference(mean(map(mean, by_world.values())), sqrt(sum(variances)) / len(by_world))


def print_board(runs: Sequence[Run], before: Sequence[Run], default: str) -> None:
    """Print a table for each variant, and one of all. before: runs to compare with instead of the default."""
    console, by_variant = Console(), defaultdict(list)
    for each in runs:
        by_variant[each.variant].append(each)
    baseline = before or by_variant[default]
    summary = Table("variant", *HEADINGS, "difference", title="All worlds; goodput, % of the oracle's")
    for variant, mine in by_variant.items():
        compared = [] if baseline is mine else baseline
        headings = (*HEADINGS, "difference") if compared else HEADINGS
        table = Table("world", *headings, title=f"{variant}; goodput, % of the oracle's")
        for world in dict.fromkeys(each.world for each in mine):
            table.add_row(world, *row([each for each in mine if each.world == world], compared))
        console.print(table)
        summary.add_row(variant, *row(mine, compared))
    console.print(summary)


def row(runs: Sequence[Run], baseline: Sequence[Run]) -> list[str]:
    """Cells of one row."""
    percents, last = [each.percent for each in runs], [each.last_third for each in runs]
    thirds = mean(each.first_third for each in runs), mean(each.middle_third for each in runs), mean(last)
    cells = [f"{value:.2f}" for value in (mean(percents), median(percents), min(percents), *thirds, min(last))]
    num_steps = sum(each.steps for each in runs)
    cells.append(f"{100 * sum(each.probe_steps for each in runs) / num_steps:.1f}%")
    cells.append(f"{1000 * sum(each.drift_events for each in runs) / num_steps:.2f}")
    if baseline:
        cells.append(str(difference(runs, baseline) or ""))
    return cells
