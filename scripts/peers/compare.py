"""Compare speclen with other programs on one pair: the same chat requests over HTTP, in closed loops.

Every mode of every program runs as its own server, one after the other, round after round. Later rounds leave out modes
that were far behind in the first one. Prompts are the held-out ones of the workload `chat`, another set each round.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import torch
import typer
from closed_loop import SET, closed_loop
from program import HERE, Mode, Server, modes

from speclen.bench.figures import as_table
from speclen.bench.serving.prompts import ChatPrompts
from speclen.cli.support.machine import machine, provenance
from speclen.cli.support.output import write_whole
from speclen.cli.support.processes import end_as_by_ctrl_c
from speclen.worker.models.loading import load_tokenizer

ROUND_SEEDS, LOAD_SEEDS = 1_000_000, 10_000  # apart, so that prompts do not repeat
FAR_BEHIND = 0.75  # of the throughput of the program's best mode
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Comparison:
    """Settings of a run. sets: sets of requests counted at each load up to 4 at a time; more at larger loads.

    learn_sets: the same, that `adaptive` serves at each load before it is measured there.
    """

    work: Path
    target: str
    draft: str
    loads: list[int]
    sets: int
    learn_sets: int
    prompts: ChatPrompts

    def measure(self, mode: Mode, number: int) -> Rows:
        """A row for each load. Raises RuntimeError or OpenAIError."""
        rows = []
        with Server(mode, self.work, self.target, self.draft) as server:
            for at_once in self.loads:
                seed = ROUND_SEEDS * number + LOAD_SEEDS * at_once
                a_set = SET * max(1, at_once // 4)
                if mode.kind == "adaptive" and self.learn_sets:
                    closed_loop(server, self.prompts, at_once, seed + LOAD_SEEDS // 2, self.learn_sets * a_set)
                found = closed_loop(server, self.prompts, at_once, seed, self.sets * a_set)
                rows.append({"round": number, "program": mode.program, "mode": mode.name, "at_once": at_once, **found})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        return rows


def worth_repeating(mode: Mode, rows: Rows) -> bool:
    """True for speclen's modes, and for others that were near their program's best at any load."""
    rates = rates_of([row for row in rows if row["program"] == mode.program])
    mine = rates.get(f"{mode.program}, {mode.name}", {})
    best = {load: max(each.get(load, 0.0) for each in rates.values()) for load in mine}
    return mode.program == "speclen" or any(rate >= FAR_BEHIND * best[load] for load, rate in mine.items())


def rates_of(rows: Rows) -> dict[str, dict[str, float]]:
    """Mean tokens per second over the rounds, by program and mode, and by requests at a time."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[f"{row['program']}, {row['mode']}"][str(row["at_once"])].append(row["tokens_per_s"])
    return {name: {load: statistics.fmean(rates) for load, rates in mine.items()} for name, mine in found.items()}


def main(
    work: Path,
    target: str = typer.Option(...),
    draft: str = typer.Option(""),
    rounds: int = typer.Option(3, min=1),
    sets: int = typer.Option(
        1, min=1, help=f"Sets of {SET} requests counted at each load up to 4; at 16 four times as many."
    ),
    learn_sets: int = typer.Option(1, min=0, help="The same, before adaptive is measured at a load."),
    load: list[int] = typer.Option([1, 4, 16], help="Requests at a time; repeat it."),
    only: str = typer.Option("", help="Programs, separated by commas; speclen always takes part."),
    out: Path = typer.Option(Path("docs/results/peers.json"), help="File for the results."),
) -> None:
    """Measure, write after every mode, and print a table. Exits 1 where a program failed."""
    end_as_by_ctrl_c()  # which ends the servers, too
    wanted = {"speclen", *(name.strip() for name in only.split(","))}
    chosen = [mode for mode in modes(bool(draft)) if not only or mode.program in wanted]
    comparison = Comparison(work, target, draft, load, sets, learn_sets, ChatPrompts(load_tokenizer(target)))
    what = provenance("scripts/peers/run") | {"machine": machine(torch.device("cpu")), "target": target, "draft": draft}
    what["requirements"] = [
        line for file in HERE.glob("*.txt") for line in file.read_text().splitlines() if "==" in line
    ]
    rows, failed = Rows(), list[str]()
    for number in range(1, rounds + 1):
        for mode in [mode for mode in chosen if number == 1 or worth_repeating(mode, rows)]:
            print(f"round {number}: {mode.program}, {mode.name}", file=sys.stderr, flush=True)
            try:
                rows += comparison.measure(mode, number)
            except (RuntimeError, openai.OpenAIError) as error:
                failed.append(f"{mode.program}, {mode.name}: {error}")
            write_whole(out, json.dumps(what | {"tokens_per_s": rates_of(rows), "rows": rows}, indent=1))
    print(as_table("peers", rates_of(rows)))
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    typer.run(main)
