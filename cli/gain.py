"""`speclen gain`: tokens per second of the learned arms relative to the baseline, measured on live traffic."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from speclen.cli.support.database import DB_OPTION, reading
from speclen.cli.support.output import UserError
from speclen.controller.baseline.gain import gain_of
from speclen.controller.baseline.guard import bounds_of, range_of
from speclen.records import Trial
from speclen.store import queries

UNITS = {"m": 60.0, "h": 3600.0, "d": 86_400.0}
NOTHING = (
    "No trial has ended in this time. Trials run where the baseline differs from the learned arm, in workers whose "
    "--baseline (SPECLEN_WORKER_BASELINE) is not off."
)


def gain(
    since: str = typer.Option("24h", help="How far to look back: 30m, 24h, 7d."),
    db: Path = DB_OPTION,
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show what learning earned: tokens per second over those of the baseline.

    Trials run a block of steps on the other arms now and then, between blocks of
    those in use. The figures are wall time, not estimates. The interval is 95%.

    Example: speclen gain --since 7d
    """
    with reading(db) as connection:
        trials = [row.trial for row in queries.trials(connection, time.time() - seconds_of(since))]
    found = document_of(trials)
    if as_json:
        print(json.dumps({"since": since} | found))
        return
    console = Console()
    if not trials:
        console.print(f"The last {since}: {NOTHING}", markup=False)
        return
    console.print(sentence_of(since, found), markup=False)
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("batch", "gain", "95% interval", "trials", "lost s", "learned", "baseline", "in use"):
        table.add_column(heading, justify="left" if heading in ("learned", "baseline", "in use") else "right")
    for row in found["by_batch_size"]:
        low, high = row["batch_min"], row["batch_max"]
        table.add_row(
            f"{low}" if low == high else f"{low}-{high}",
            *(f"{row['gain']:.3f}", interval_text(row), str(row["num_trials"]), f"{row['lost_s']:.1f}"),
            *(row["learned"], row["baseline"], row["in_use"]),
        )
    console.print(table)


def seconds_of(text: str) -> float:
    """Seconds of a time such as 24h. Raises UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhd])", text.strip())
    if match is None:
        raise UserError(f"--since {text!r} is not a time: write 30m, 24h or 7d")
    return float(match[1]) * UNITS[match[2]]


def document_of(trials: Sequence[Trial]) -> dict[str, Any]:
    """The gain over all trials and by range of batch sizes."""
    ranges: dict[int, list[Trial]] = {}
    for trial in trials:
        ranges.setdefault(range_of(trial.batch_size), []).append(trial)
    rows = []
    for number, members in sorted(ranges.items()):
        low, high = bounds_of(number)
        newest = members[-1]
        rows.append(
            {"batch_min": low, "batch_max": high}
            | figures_of(members)
            | {
                "learned": str(newest.learned),
                "baseline": str(newest.baseline),
                "in_use": "baseline" if newest.is_baseline_used else "learned",
            }
        )
    return figures_of(trials) | {"by_batch_size": rows}


def figures_of(trials: Sequence[Trial]) -> dict[str, Any]:
    """Gain with a 95% interval, number of trials, and seconds they are expected to have cost; None while unknown."""
    # Trials are due by steps, so there are more where more is served: all weigh the same.
    found = gain_of(trials, [1.0] * len(trials)) if trials else None
    low, high = (None, None) if found is None or found.freedom < 1.0 else found.interval()
    return {
        "gain": None if found is None else found.ratio,
        "gain_low": low,
        "gain_high": high,
        "num_trials": len(trials),
        "lost_s": sum(trial.lost_s for trial in trials),
    }


def interval_text(row: dict[str, Any]) -> str:
    """The interval in words."""
    return "unknown" if row["gain_low"] is None else f"{row['gain_low']:.3f} to {row['gain_high']:.3f}"


def sentence_of(since: str, found: dict[str, Any]) -> str:
    """The result in one sentence."""
    interval = "" if found["gain_low"] is None else f" ({interval_text(found)})"
    return (
        f"Over the last {since} the learned arms made {found['gain']:.3f}{interval} times the tokens per second of the "
        f"baseline, from {found['num_trials']} trials, which cost {found['lost_s']:.1f} s."
    )
