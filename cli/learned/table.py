"""The learned table for a terminal: one line per range of batch sizes with the arm in use."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from speclen.cli.support.database import reading
from speclen.cli.support.errors import UserError
from speclen.store.queries import view_rows

Row = dict[str, Any]

NOTHING = (
    "Nothing is learned yet: start a worker (one that has just begun shows within two seconds), or import a profile with "
    "`speclen profile import`."
)


def rows_of(db: Path, view: str, context: str) -> list[Row]:
    """Rows of a view whose context contains the text. Raises UserError if there are contexts, but no such."""
    with reading(db) as connection:
        rows = view_rows(connection, view)
    found = [row for row in rows if context in row["context"]]
    if rows and not found:
        names = "; ".join(sorted({row["context"] for row in rows}))
        raise UserError(f"no context contains {context!r}; known are: {names}")
    return found


def learned_parts(db: Path, context: str) -> list[RenderableType]:
    """For each context its name and a table of the view choices; a sentence if nothing is learned yet."""
    found: list[RenderableType] = []
    for name, group in groupby(rows_of(db, "choices", context), key=lambda row: row["context"]):
        rows = list(group)
        updated = max(row["updated_at"] for row in rows)[:19]
        found += [Text(name, style="bold"), table_of(rows), Text(f"updated {updated} UTC", style="dim")]
    return found or [Text(NOTHING)]


def table_of(rows: list[Row]) -> Table:
    """Rows of the view choices of one context."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading, justify in (("batch", "right"), ("arm", "left")):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for heading in ("ms/token", "95% interval", "vs plain", "steps"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        interval = f"{short(row['ms_per_token_low'])} to {short(row['ms_per_token_high'])}"
        speedup = "" if row["speedup"] is None else f"{row['speedup']:.2f}x"
        table.add_row(
            *(row["batch_bucket"], row["arm"], short(row["ms_per_token"]), interval, speedup, f"{row['num_steps']:,}")
        )
    return table


def short(ms: float) -> str:
    return f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"
