"""`speclen bench gain`: learned arms with and without the guard, against a baseline, in simulated worlds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table as Printed

from speclen.bench.simulation.learners import EstimatorLearner, Fixed, Guarded, Learner
from speclen.bench.simulation.level import Sweep
from speclen.bench.simulation.machines import Levelled
from speclen.bench.simulation.play import WARM_STEPS, play
from speclen.bench.simulation.policy import in_processes
from speclen.bench.simulation.world import Clock, Scene, World
from speclen.bench.simulation.worlds import WORLDS
from speclen.cli.support.output import UserError
from speclen.controller.baseline.gain import gain_of
from speclen.controller.baseline.guard import range_of
from speclen.controller.estimator import EstimatorSettings
from speclen.records import Arm, Trial, parse_arm

CLOCKS: dict[str, tuple[Clock, float]] = {  # with the share of reports that are lost
    "honest": (Clock(), 0.0),
    "shifted": (Clock(late=1.0), 0.0),
    "30% shifted": (Clock(late=0.3), 0.0),
    "long 10% short": (Clock(long_factor=0.9), 0.0),
    "20% lost": (Clock(), 0.2),
    "stalls": (Clock(stalled=0.005), 0.0),
}
CLOCK_HELP = f"Clock, repeatable; all when absent: {', '.join(CLOCKS)}."
ESTIMATOR = "estimator"
CASES = (("draft 8", "draft 3"), ("draft 1", "draft 3"), (ESTIMATOR, "draft 3"), (ESTIMATOR, "plain"))


class Result(NamedTuple):
    """One run. learned_percent, baseline_percent, guarded_percent: goodput after WARM_STEPS in percent of the oracle's.

    trial_share: of all steps. lost_share, late_lost_share: of the time, and of the time after WARM_STEPS.
    fell_at: step of the first verdict for the baseline, 0 for none. num_verdicts: changes of the side in use.
    covered: ranges whose interval holds the true gain.
    """

    world: str
    clock: str
    learned: str
    baseline: str
    seed: int
    learned_percent: float
    baseline_percent: float
    guarded_percent: float
    num_steps: int
    trial_share: float
    lost_share: float
    late_lost_share: float
    fell_at: int
    num_verdicts: int
    num_trials: int
    gain: float | None
    gain_low: float | None
    gain_high: float | None
    covered: int
    num_intervals: int

    @property
    def shortfall(self) -> float:
        """Percent below the better of the learned arms and the baseline."""
        return 100.0 * (1.0 - self.guarded_percent / max(self.learned_percent, self.baseline_percent))


def learner_of(name: str, scene: Scene) -> Learner:
    """The estimator, or an arm that never changes."""
    world = scene.world
    if name == ESTIMATOR:
        return EstimatorLearner(EstimatorSettings(), world.limits, None, world.probe_steps)
    return Fixed({1: parse_arm(name).within(world.limits)})


def levelled(world: World, learned: Arm, baseline: Arm, load: int, seed: int) -> World:
    """The world with a machine on which two arms without n-grams are equally fast at a load."""
    truth = Scene(world, seed, 1.0).workers[0].truths[0]
    goodput = dict(zip(truth.outputs.arms, truth.at(load, float(truth.outputs.prompts.mean()))[1], strict=True))
    factors = [1.0] * (world.limits.max_speculation_length + 1)
    factors[learned.speculation_length] = goodput[learned] / goodput[baseline]
    machine = world.machines[0]
    return world._replace(machines=(Levelled(machine, tuple(factors), machine.pass_s, machine.context_s),))


def run(job: tuple[str, str, str, str, int], seconds: float | None, load: int, equal: bool) -> Result:
    """Play the learner alone, the baseline alone, and the learner with the guard. job: as the first fields of Result."""
    name, clock, learned, baseline, seed = job
    told, lost = CLOCKS[clock]
    world = WORLDS[name]._replace(clock=told, lost=lost)
    if load:
        world = world._replace(load=Sweep((load,), (1e6, 1e6)))
    if equal:
        mine, its = (parse_arm(each).within(world.limits) for each in (learned, baseline))
        world = levelled(world, mine, its, load, seed)
    scene = Scene(world, seed, seconds)
    transition = 4 if world.transition else 2
    guarded = Guarded(learner_of(learned, scene), parse_arm(baseline).within(world.limits), world.limits, transition)
    score = play(guarded, scene)
    if score.num_steps <= WARM_STEPS:
        raise UserError(f"{name} took {score.num_steps} steps, which ends before the first scored one: raise --seconds")
    sides = () if equal else (learned, baseline)
    alone = [play(learner_of(each, scene), scene) for each in sides] or [score, score]
    found = gain_of([trial for _, trial in guarded.trials], [1.0] * len(guarded.trials)) if guarded.trials else None
    low, high = found.interval() if found is not None and found.freedom >= 1.0 else (None, None)
    covered, num_intervals = coverage(guarded, scene)
    return Result(
        *(name, clock, learned, baseline, seed),
        learned_percent=round(alone[0].late_percent, 3),
        baseline_percent=round(alone[1].late_percent, 3),
        guarded_percent=round(score.late_percent, 3),
        num_steps=score.num_steps,
        trial_share=round(score.num_trial_steps / score.num_steps, 5),
        lost_share=round(score.lost_s / sum(score.spent_s), 6),
        late_lost_share=round(score.late_lost_s / score.late_spent_s, 6),
        fell_at=next((step for step, verdict in guarded.verdicts if verdict.uses_baseline), 0),
        num_verdicts=len(guarded.verdicts),
        num_trials=len(guarded.trials),
        gain=found and round(found.ratio, 4),
        gain_low=low and round(low, 4),
        gain_high=high and round(high, 4),
        covered=covered,
        num_intervals=num_intervals,
    )


def coverage(guarded: Guarded, scene: Scene) -> tuple[int, int]:
    """How many of the ranges' 95% intervals hold the true gain of the arms that were compared, and their number."""
    truth, arms, hits, number = scene.workers[0].truths[0], scene.workers[0].truths[0].outputs.arms, 0, 0
    ranges: dict[int, list[Trial]] = {}
    for _, trial in guarded.trials:
        ranges.setdefault(range_of(trial.batch_size), []).append(trial)
    for trials in ranges.values():
        found = gain_of(trials, [1.0] * len(trials))
        if found.freedom < 1.0:
            continue
        logs = []
        for trial in trials:
            goodput = truth.at(round(trial.batch_size), float(truth.outputs.prompts.mean()))[1]
            logs.append(log(goodput[arms.index(trial.learned)] / goodput[arms.index(trial.baseline)]))
        low, high = found.interval()
        hits, number = hits + (low <= exp(mean(logs)) <= high), number + 1
    return hits, number


def gain(
    world: list[str] = typer.Option(["own-h200"], help="World, repeatable: see bench policy."),
    clock: list[str] = typer.Option([], help=CLOCK_HELP),
    case: list[str] = typer.Option(
        [],
        metavar="LEARNED:BASELINE",
        help="Arms, or 'estimator', against a baseline, repeatable; default: four cases.",
    ),
    load: int = typer.Option(4, min=0, help="Requests at a time; 0 for the world's own load."),
    runs: int = typer.Option(8, min=1, max=1000, help="Runs per case, each with a seed of its own."),
    seconds: float = typer.Option(120.0, min=1.0, help="Simulated time of a run."),
    jobs: int = typer.Option(0, min=0, max=256, help="Processes; 0 for one per core."),
    equal: bool = typer.Option(
        False, "--equal", help="Have both arms of each case equally fast, to count false verdicts."
    ),
    out: Path | None = typer.Option(None, help="Write all runs to a file, as JSON."),
) -> None:
    """Show what the guard saves and costs: learned arms alone, the baseline alone, and both under the guard.

    Goodput is in percent of an oracle's by true time, after the first 3,000 steps of a run. A clock may be wrong in what it
    reports; the score is not. A case is an arm that never changes, or the estimator, against a baseline.

    Example: speclen bench gain --world own-h200 --case "draft 8:draft 3" --clock shifted --runs 4
    """
    cases = [(left, right) for left, _, right in (each.partition(":") for each in case)] or list(CASES)
    if equal:  # the estimator is not one arm, and has no speed to level
        cases = [each for each in cases if ESTIMATOR not in each]
    for given, known, option in ((world, WORLDS, "world"), (clock, CLOCKS, "clock")):
        for name in given:
            if name not in known:
                raise UserError(f"--{option}: {name!r} is unknown: use one of {', '.join(known)}")
    todo = [
        (*place, *arms, seed)
        for place in ((each, told) for each in world for told in clock or CLOCKS)
        for arms in cases
        for seed in range(runs)
    ]
    found = in_processes(todo, partial(run, seconds=seconds, load=load, equal=equal), jobs or os.cpu_count() or 1)
    done = list(track(found, total=len(todo), console=Console(stderr=True)))
    if out is not None:
        lines = ",\n".join(json.dumps(each) for each in done)
        out.write_text(f'{{"fields": {json.dumps(Result._fields)}, "runs": [\n{lines}\n]}}\n')
    print_results(done)


def print_results(results: Iterable[Result]) -> None:
    """One line per case: means over its runs, and the worst of what must not be large."""
    groups: dict[tuple[str, str, str, str], list[Result]] = {}
    for each in results:
        groups.setdefault(each[:4], []).append(each)
    table = Printed()
    for place, runs in groups.items():
        fell = [each.fell_at for each in runs if each.fell_at]
        below = [each.shortfall for each in runs]
        shares = {
            name: f"{100 * mean(column):.2f}%"
            for name, column in {
                "trial steps": [each.trial_share for each in runs],
                "lost": [each.lost_share for each in runs],
                "lost later": [each.late_lost_share for each in runs],
            }.items()
        }
        row = dict(zip(("world", "clock", "learned", "baseline"), place, strict=True)) | {
            "learned %": f"{mean(each.learned_percent for each in runs):.1f}",
            "baseline %": f"{mean(each.baseline_percent for each in runs):.1f}",
            "guarded %": f"{mean(each.guarded_percent for each in runs):.1f}",
            "below the better": f"{mean(below):.2f}%",
            "worst": f"{max(below):.2f}%",
            "fell back": f"{len(fell)}/{len(runs)}",
            "at step": f"{np.median(fell):.0f}" if fell else "",
            "trials": f"{mean(each.num_trials for each in runs):.0f}",
            **shares,
            "covered": f"{sum(each.covered for each in runs)}/{sum(each.num_intervals for each in runs)}",
        }
        if not table.columns:
            for heading in row:
                table.add_column(heading)
        table.add_row(*row.values())
    Console(width=200).print(table)
