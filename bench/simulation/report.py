"""Tables of the scoreboard: scores of the variants, and their differences to a baseline in the same runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import mean, median, stdev
from typing import NamedTuple

from rich.console import Console
from rich.table import Table


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


HEADINGS = ("mean", "median", "worst", "first third", "middle", "last", "worst last", "probes", "changes")


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
