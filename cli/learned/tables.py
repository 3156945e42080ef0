"""`speclen tables`: the learned table, one line per range of batch sizes with the arm in use."""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live

from speclen.cli.learned.table import Row, learned_parts, rows_of
from speclen.cli.support.database import DB_OPTION
from speclen.cli.support.errors import UserError


def tables(
    db: Path = DB_OPTION,
    context: str = typer.Option("", help="Only contexts whose name contains this."),
    watch: bool = typer.Option(False, "--watch", help="Refresh in place until Ctrl-C."),
    interval_s: float = typer.Option(1.0, min=0.1, help="Seconds between two looks with --watch."),
    as_json: bool = typer.Option(False, "--json", help="Print the rows of the view learned_table as JSON."),
    as_csv: bool = typer.Option(False, "--csv", help="Print the rows of the view learned_table as CSV."),
) -> None:
    """Show the arm in use by batch size: ms per token with its interval, times faster than plain decoding, steps seen.

    --json and --csv hold every arm at every batch size; `speclen explain` shows those of one batch size.

    Example: speclen tables --db .speclen/speclen.db --watch
    """
    if sum((watch, as_json, as_csv)) > 1:
        raise UserError("--watch, --json and --csv exclude each other: give one of them")
    if watch:
        keep_showing(lambda: Group(*learned_parts(db, context)), interval_s)
        return
    if as_json:
        print(json.dumps(rows_of(db, "learned_table", context), indent=2))
    elif as_csv:
        print_csv(rows_of(db, "learned_table", context))
    else:
        Console().print(*learned_parts(db, context), sep="\n")


def keep_showing(draw: Callable[[], RenderableType], interval_s: float) -> None:
    with Live(draw(), auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval_s)
                live.update(draw(), refresh=True)
        except KeyboardInterrupt:
            return


def print_csv(rows: list[Row]) -> None:
    if rows:
        writer = csv.DictWriter(sys.stdout, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
