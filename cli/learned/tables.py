"""`speclen tables`: the learned table of a database."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live

from speclen.cli.learned.table import learned_parts, rows_of
from speclen.cli.support.database import DB_OPTION
from speclen.cli.support.errors import UserError


def tables(
    db: Path = DB_OPTION,
    context: str = typer.Option("", help="Only contexts whose name contains this."),
    watch: bool = typer.Option(False, "--watch", help="Refresh in place until Ctrl-C."),
    interval_s: float = typer.Option(1.0, min=0.1, help="Seconds between two updates with --watch."),
    as_json: bool = typer.Option(False, "--json", help="Print the same as JSON: the rows of the view choices."),
) -> None:
    """Show the arm in use by batch size: ms per token, times faster than plain decoding, samples and their age.

    Arms that the evidence cannot tell apart are equal, as in `draft 3 = 4`;
    `(+2)` are two more. From 120 columns on, the neighbours of the arm are
    shown: one draft token less, one more. The view learned_table has every arm
    and batch size.

    Example: speclen tables --db .speclen/speclen.db --watch
    """
    if watch and as_json:
        raise UserError("--watch and --json exclude each other: give one of them")
    if watch:
        keep_showing(lambda: Group(*learned_parts(db, context)), interval_s)
        return
    if as_json:
        print(json.dumps(rows_of(db, "choices", context), indent=2))
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
