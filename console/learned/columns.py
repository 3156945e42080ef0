"""Tables with any number of columns, at the width that there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from rich.table import Table
from rich.text import Text

Column: TypeAlias = list[Text]  # heading first


def column(heading: str, cells: Sequence[str | Text]) -> Column:
    return [Text(heading, style="bold"), *(Text(cell) if isinstance(cell, str) else cell for cell in cells)]


def folded(columns: list[Column], width: int) -> list[Table]:
    """Tables that fit the width, one below the other, each of which begins with the first column."""
    label, *others = columns
    found: list[list[Column]] = [[label]]
    for each in others:
        if len(found[-1]) > 1 and num_characters([*found[-1], each]) > width:
            found.append([label])
        found[-1].append(each)
    return [table_of(part) for part in found]


def num_characters(columns: list[Column]) -> int:
    """Characters that a line of the table takes."""
    return sum(1 + max(cell.cell_len for cell in each) for each in columns) - 1


def table_of(columns: list[Column]) -> Table:
    table = Table(box=None, padding=(0, 0, 0, 1), pad_edge=False)  # nine lengths mostly fit into 80 characters
    for heading, *_ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for cells in list(zip(*columns, strict=True))[1:]:
        table.add_row(*cells)
    return table
