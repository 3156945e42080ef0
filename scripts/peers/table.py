"""Show the measured rows of scripts/peers/run as a page."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

Rows = list[dict[str, Any]]
LINES = "peers.jsonl"
OURS = "speclen"


def by_round(rows: Rows, program: str, mode: str, at_once: int, figure: str = "tokens_per_s") -> dict[int, float]:
    key = (program, mode, at_once)
    return {row["round"]: row[figure] for row in rows if (row["program"], row["mode"], row["at_once"]) == key}


def best_mode(rows: Rows, at_once: int, wanted: Callable[[str, str], bool]) -> tuple[str, str] | None:
    """Program and mode with the highest mean throughput among those wanted."""
    names = {(row["program"], row["mode"]) for row in rows if row["at_once"] == at_once}
    named = [name for name in sorted(names) if wanted(*name)]
    return max(named, key=lambda name: statistics.fmean(by_round(rows, *name, at_once).values()), default=None)


def over(rows: Rows, mode: str, other: tuple[str, str], at_once: int) -> list[float]:
    """Our mode's throughput over the other's, in each round that has both."""
    ours, theirs = by_round(rows, OURS, mode, at_once), by_round(rows, *other, at_once)
    return [ours[number] / theirs[number] for number in ours.keys() & theirs.keys()]


def spread(values: list[float], digits: int) -> str:
    middle = f"{statistics.fmean(values):.{digits}f}"
    return f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else middle


def ratio_cell(rows: Rows, mode: str, at_once: int, wanted: Callable[[str, str], bool]) -> str:
    other = best_mode(rows, at_once, wanted)
    if other is None or not (ratios := over(rows, mode, other, at_once)):
        return "–"
    return f"{spread(ratios, 2)}, {other[0]} {other[1]}"


def table(title: str, lines: dict[str, list[str]], loads: list[int]) -> str:
    head = [title, *(f"{load} at a time" for load in loads)]
    rows = [head, ["---"] * len(head), *([name, *cells] for name, cells in lines.items())]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def markdown(rows: Rows, facts: dict[str, Any]) -> str:
    """Throughput of each mode, and ours over the best mode of each program."""
    loads = sorted({row["at_once"] for row in rows})
    rates: dict[str, list[str]] = {}
    for name in dict.fromkeys((row["program"], row["mode"]) for row in rows):
        cells = [list(by_round(rows, *name, load).values()) for load in loads]
        rates[", ".join(name)] = [spread(found, 0) if found else "–" for found in cells]
    programs = sorted({row["program"] for row in rows} - {OURS})
    ratios: dict[str, list[str]] = {}
    for mode, modes in (("adaptive", "best mode"), ("none", "plain decoding")):
        wanted = [[program] for program in programs] + [programs]
        for names in wanted:
            who = names[0] if len(names) == 1 else "any of them"
            ratios[f"{mode} over {modes} of {who}"] = [
                ratio_cell(rows, mode, load, lambda p, m, n=names, k=mode: p in n and (k == "adaptive" or m == "none"))
                for load in loads
            ]
    about = ", ".join(f"{name} {value}" for name, value in facts.items())
    return (
        "# Other programs on the same pair, machine and requests\n\n"
        "Tokens per second in closed loop, lowest to highest round. Chat requests over HTTP, held out, temperatures 0, 0.7 "
        "and 1; the model ends its answers.\n\n"
        f"{table('tokens per second', rates, loads)}\n{table('throughput', ratios, loads)}\n"
        f"Measured with `scripts/peers/run` on: {about}.\n"
    )
