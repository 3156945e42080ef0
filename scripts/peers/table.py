"""Show the measured rows of scripts/peers/run as a page."""

from __future__ import annotations

import statistics
from collections.abc import Collection
from typing import Any

Rows = list[dict[str, Any]]
LINES = "peers.jsonl"
OURS = ("speclen", "adaptive")


def by_round(rows: Rows, at_once: int, name: tuple[str, str]) -> dict[int, float]:
    """Tokens per second of a program's mode."""
    key = (*name, at_once)
    return {row["round"]: row["tokens_per_s"] for row in rows if (row["program"], row["mode"], row["at_once"]) == key}


def spread(values: Collection[float], digits: int) -> str:
    middle = f"{statistics.fmean(values):.{digits}f}"
    return f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else middle


def ratio_cell(rows: Rows, at_once: int, programs: Collection[str]) -> str:
    """Our throughput over that of the best mode of these programs, in the rounds that have both."""
    others = {(row["program"], row["mode"]): by_round(rows, at_once, (row["program"], row["mode"])) for row in rows}
    means = {name: statistics.fmean(found.values()) for name, found in others.items() if found and name[0] in programs}
    best, ours = max(means, key=lambda name: means[name], default=None), others.get(OURS, {})
    ratios = [ours[number] / rate for number, rate in others[best].items() if number in ours] if best else []
    return f"{spread(ratios, 2)}, {' '.join(best)}" if best and ratios else "–"


def table(title: str, lines: dict[str, list[str]], loads: list[int]) -> str:
    head = [title, *(f"{load} at a time" for load in loads)]
    rows = [head, ["---"] * len(head), *([name, *cells] for name, cells in lines.items())]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def markdown(rows: Rows, facts: dict[str, Any]) -> str:
    """Throughput of each mode, and ours over the best mode of each program."""
    loads = sorted({row["at_once"] for row in rows})
    rates: dict[str, list[str]] = {}
    for name in dict.fromkeys((row["program"], row["mode"]) for row in rows):
        cells = [by_round(rows, load, name).values() for load in loads]
        rates[", ".join(name)] = [spread(found, 0) if found else "–" for found in cells]
    programs = sorted({row["program"] for row in rows} - {OURS[0]})
    ratios = {}
    for who, wanted in (*((program, [program]) for program in programs), ("any of them", programs)):
        ratios[f"adaptive over best mode of {who}"] = [ratio_cell(rows, load, wanted) for load in loads]
    about = ", ".join(f"{name} {value}" for name, value in facts.items())
    return (
        "# Other programs on the same pair, machine and requests\n\n"
        "Tokens per second in closed loop, lowest to highest round. Greedy chat requests over HTTP, held out; "
        "the model ends its answers.\n\n"
        f"{table('tokens per second', rates, loads)}\n{table('throughput', ratios, loads)}\n"
        f"Measured with `scripts/peers/run` on: {about}.\n"
    )
