"""The command, and the file that it keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from speclen.bench.simulation.policy import run_all
from speclen.bench.simulation.scoreboard.cost import costs
from speclen.bench.simulation.scoreboard.parts import SEED_0, SEEDS, Job, parts, rows_of, run


class Board:
    """The file of scores."""

    def __init__(self, path: Path, conditions: dict[str, Any]) -> None:
        """conditions: the same in all rows of a file."""
        self.path = path
        self.content: dict[str, Any] = {**conditions, "rows": [], "cost_us": {}}
        if path.exists():
            self.content = json.loads(path.read_text())
            if found := {key: self.content[key] for key in conditions if self.content[key] != conditions[key]}:
                raise typer.BadParameter(f"{path} was made with {found}: give another --out")

    def has(self, job: Job) -> bool:
        return any((row["part"], row["name"]) == (job.part, job.name) for row in self.content["rows"])

    def write(self, **values: Any) -> None:
        """Take over values, and write the file: a line for each row."""
        self.content |= values
        rows = ",\n  ".join(json.dumps(row) for row in self.content["rows"])
        rest = {key: value for key, value in self.content.items() if key != "rows"}
        self.path.write_text(f'{json.dumps(rest)[:-1]}, "rows": [\n  {rows}\n]}}\n')

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Rows of a part that was played."""
        self.write(rows=self.content["rows"] + rows)

    def print(self) -> None:
        """Everything in the file, as a table."""
        table = Table("", "segment", "seeds", "median", "mean", "worst", "of best constant", "worst of it")
        for row in self.content["rows"]:
            keys = ("median", "mean", "worst", "against_constant", "worst_against_constant")
            table.add_row(row["name"], row["segment"], str(row["num_seeds"]), *(f"{row[key]:.1f}" for key in keys))
        console = Console(width=130)
        console.print(table)
        for name, cost in self.content["cost_us"].items():
            console.print(f"{name}: {cost:.1f} us a report")


def main(
    out: Path = typer.Option(Path("docs/results/scoreboard.json"), help="File of scores; what it has is kept."),
    only: str = typer.Option("", help="Parts whose kind (h200, policy) or name contains this."),
    seeds: int = typer.Option(0, min=0, help="Seeds of a part; 0: 20 of a recorded world, 8 of a scenario."),
    seconds: float = typer.Option(120.0, min=60.0, max=3600.0, help="Simulated time of a recorded world."),
    processes: int = typer.Option(1, min=1, max=2, help="Processes."),
    cost: bool = typer.Option(False, "--cost", help="Measure only the cost of a report."),
) -> None:
    """Play the parts that the file lacks, and print it."""
    board = Board(out, {"seconds": seconds})
    if cost:
        board.write(cost_us=costs())
    for part, name in [] if cost else [each for each in parts() if only in f"{each[0]} {each[1]}"]:
        wanted = range(SEED_0, SEED_0 + (seeds or SEEDS[part]))
        jobs = [Job(part, name, seed, seconds) for seed in wanted]
        if not board.has(jobs[0]):
            board.add(rows_of(jobs[0], list(run_all(run, jobs, processes))))
    board.print()


if __name__ == "__main__":
    typer.run(main)
