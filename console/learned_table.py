"""The learned table as a matrix of buckets and lengths."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from speclen.console.database import reading
from speclen.console.errors import UserError
from speclen.store.queries import view_rows

Row = dict[str, Any]


def learned_rows(db: Path, context: str) -> list[Row]:
    """Rows of learned_table whose context contains the text. Raises UserError if there are contexts, but no such."""
    with reading(db) as connection:
        rows = view_rows(connection, "learned_table")
    found = [row for row in rows if context in row["context"]]
    if rows and not found:
        names = "; ".join(sorted({row["context"] for row in rows}))
        raise UserError(f"no context contains {context!r}; known are: {names}")
    return found


def matrices(rows: list[Row]) -> RenderableType:
    """One matrix per context, in the order of the view."""
    if not rows:
        return Text("Nothing is learned yet: start a worker, or import a profile with `speclen profile import`.")
    parts = [titled(name, list(group)) for name, group in groupby(rows, key=lambda row: row["context"])]
    return Group(*(line for part in parts for line in part))


def titled(context: str, rows: list[Row]) -> list[RenderableType]:
    """A matrix between lines of its own, which wrap at the terminal's width and not at the table's."""
    return [
        Text(context, style="bold"),
        Text("ms per token by batch size and length; * in use, ? never measured here"),
        matrix(rows),
        Text(f"updated {max(row['updated_at'] for row in rows)[:19]} UTC", style="dim"),
    ]


def matrix(rows: list[Row]) -> Table:
    """Buckets down, lengths across; ms per token of one row of the batch."""
    lengths = sorted({row["speculation_length"] for row in rows})
    table = Table(
        box=None,  # nine lengths have to fit into 80 columns
        padding=(0, 0, 0, 1),
    )
    table.add_column("batch", justify="right")
    for length in lengths:
        table.add_column(str(length), justify="right")
    table.add_column("vs 0", justify="right")
    table.add_column("steps", justify="right")
    for bucket, group in groupby(rows, key=lambda row: row["batch_bucket"]):
        cells = {row["speculation_length"]: row for row in group}
        table.add_row(
            bucket,
            *(matrix_cell(cells.get(length)) for length in lengths),
            gain(cells),
            f"{sum(row['num_steps'] for row in cells.values()):,}",
        )
    return table


def matrix_cell(row: Row | None) -> Text:
    """ms per token, marked when it is in use, and with ? when no step at this length was measured in the bucket."""
    if row is None:
        return Text("")
    number = f"{row['ms_per_token']:.3g}" if row["ms_per_token"] < 100 else f"{row['ms_per_token']:.0f}"
    if row["num_steps"] == 0 and row["source"] != "profile":
        number += "?"
    if row["is_best"]:
        return Text(f"*{number}", style="bold green")
    return Text(number, style="dim" if row["num_steps"] == 0 else "")


def gain(cells: dict[int, Row]) -> str:
    """How much faster the length in use is than plain decoding, by the estimates."""
    best = next((row for row in cells.values() if row["is_best"]), None)
    if best is None or 0 not in cells:
        return ""
    return f"{cells[0]['ms_per_token'] / best['ms_per_token']:.2f}x"
