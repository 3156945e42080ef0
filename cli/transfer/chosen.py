"""The lengths in use in one context, and the cost of another engine's table in their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from speclen.cli.learned.table import Row, rows_of
from speclen.cli.support.errors import UserError
from speclen.cli.transfer.formats import READERS, Range, length_at, ranges_of, read_table


@dataclass(frozen=True, slots=True)
class ChosenTable:
    """context: its name in learned_table. ranges: merged, from 1. ngram: batch sizes where the arm in use has n-grams."""

    context: str
    ranges: list[Range]
    ngram: list[str]


def lengths_of(db: Path, context: str) -> tuple[str, list[dict[int, Row]], list[str]]:
    """The one context whose name contains the text; for each range its rows without n-grams by length, and its n-grams.

    Raises UserError for no such context, and for several.
    """
    rows = rows_of(db, "learned_table", context)
    names = sorted({row["context"] for row in rows})
    if not names:
        raise UserError(f"{db} holds no learned table yet: let a worker decode a few steps first")
    if len(names) > 1:
        raise UserError(f"a table is of one context, and these fit: {'; '.join(names)}: give part of one by --context")
    ranges: dict[int, dict[int, Row]] = {}
    for row in rows:
        if not row["ngram"]:
            ranges.setdefault(row["batch_min"], {})[row["speculation_length"]] = row
    return names[0], list(ranges.values()), [row["batch_bucket"] for row in rows if row["ngram"] and row["is_best"]]


def best_of(cells: dict[int, Row]) -> Row:
    """The length in use, or the best one where the arm in use has n-grams."""
    return min(cells.values(), key=lambda row: (not row["is_best"], row["ms_per_token"]))


def chosen_table(db: Path, context: str) -> ChosenTable:
    """The best lengths in the one context whose name contains the text. Raises UserError."""
    name, cells, ngram = lengths_of(db, context)
    try:
        return ChosenTable(name, ranges_of(map(best_of, cells)), ngram)
    except ValueError as error:
        raise UserError(f"{db}: the lengths of {name} make no table: {error}") from error


@dataclass(frozen=True, slots=True)
class Difference:
    """Length in a table and in use at a range of batch sizes. ms_per_token: learned; None for a length without estimate."""

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
    """The context's name, and range by range a table beside the lengths in use. Raises UserError as `chosen_table`."""
    name, cells, _ = lengths_of(db, context)
    found = []
    for rows in cells:
        best = best_of(rows)
        theirs = length_at(ranges, best["batch_min"])
        cost = rows[theirs]["ms_per_token"] if theirs in rows else None
        found.append(
            Difference(
                *(best["batch_min"], best["batch_max"], theirs, best["speculation_length"], cost, best["ms_per_token"])
            )
        )
    return name, found


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
