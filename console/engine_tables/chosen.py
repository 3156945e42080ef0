"""The lengths in use in one context, and what another engine's table would cost in their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from speclen.console.database import reading
from speclen.console.engine_tables.formats import (
    READERS,
    Range,
    length_at,
    ranges_of,
    read_table,
    stretches,
)
from speclen.console.errors import UserError
from speclen.console.learned.table import Row, learned_rows, plan_rows
from speclen.store.queries import view_rows


@dataclass(frozen=True, slots=True)
class ChosenTable:
    """context: its name in learned_table. ranges: merged, from 1. copying: where rows copy, and no length is in use."""

    context: str
    ranges: list[Range]
    copying: list[Range]


def chosen_table(db: Path, context: str) -> ChosenTable:
    """The best lengths in the one context whose name contains the text: those in use, but where rows copy.

    A plan that copies has a draft length as well, which says nothing to an engine that does not copy. Raises UserError for
    no such context, and for several.
    """
    with reading(db) as connection:
        rows = [row for row in view_rows(connection, "learned_table") if row["is_best"] and context in row["context"]]
        copying = [row for row in plan_rows(connection) if row["is_best"] and context in row["context"]]
    names = sorted({row["context"] for row in rows})
    if not names:
        raise UserError(
            f"{db} holds no learned lengths{f' of a context with {context!r}' if context else ''}: serve first"
        )
    if len(names) > 1:
        raise UserError(f"a table is of one context, and these fit: {'; '.join(names)}: give part of one by --context")
    try:
        return ChosenTable(names[0], ranges_of(rows), stretches(copying))
    except ValueError as error:
        raise UserError(f"{db}: the lengths of {names[0]} make no table: {error}") from error


@dataclass(frozen=True, slots=True)
class Difference:
    """A bucket's length in a table and in use. ms_per_token by what was learned; None where nothing was of that length."""

    batch_min: int
    batch_max: int
    table_length: int
    length_in_use: int
    table_ms_per_token: float | None
    ms_per_token: float


def table_from(path: Path, table_format: str) -> list[Range]:
    """Raises UserError naming the file, and what is wrong with it."""
    if table_format not in READERS:
        raise UserError(f"--format {table_format!r} is unknown: use speclen, {', '.join(READERS)}")
    try:
        return read_table(path.read_text("utf-8"), table_format)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def differences(ranges: Sequence[Range], db: Path, context: str) -> tuple[str, list[Difference]]:
    """The context's name, and bucket by bucket a table beside the lengths in use. Raises UserError as `chosen_table`."""
    chosen = chosen_table(db, context)
    cells: dict[tuple[int, int], dict[int, Row]] = {}
    for row in learned_rows(db, chosen.context):
        cells.setdefault((row["batch_min"], row["batch_max"]), {})[row["speculation_length"]] = row
    found = []
    for (low, high), rows in sorted(cells.items()):
        best = next(row for row in rows.values() if row["is_best"])
        theirs = length_at(ranges, low)
        cost = rows[theirs]["ms_per_token"] if theirs in rows else None
        found.append(Difference(low, high, theirs, best["speculation_length"], cost, best["ms_per_token"]))
    return chosen.context, found


def as_json(context: str, found: Sequence[Difference]) -> dict[str, Any]:
    return {"context": context, "buckets": [asdict(each) for each in found]}


def as_matrix(context: str, found: Sequence[Difference]) -> RenderableType:
    table = Table(box=None, padding=(0, 1, 0, 1))
    for heading in ("batch", "table", "in use", "ms per token: table", "in use", "table costs"):
        table.add_column(heading, justify="right")
    for each in found:
        theirs = each.table_ms_per_token
        sizes = str(each.batch_min) if each.batch_min == each.batch_max else f"{each.batch_min}-{each.batch_max}"
        table.add_row(
            sizes,
            str(each.table_length),
            str(each.length_in_use),
            "?" if theirs is None else f"{theirs:.3g}",
            f"{each.ms_per_token:.3g}",
            "?" if theirs is None else f"{theirs / each.ms_per_token:.2f}x",
        )
    return Group(
        Text(context, style="bold"), table, Text("by what was learned; a table holds no times, so none was stored")
    )
