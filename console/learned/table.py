"""The learned table as a matrix of buckets and lengths."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from speclen.console.database import reading
from speclen.console.errors import UserError
from speclen.console.learned.columns import Column, column, folded
from speclen.store.connection import Connection
from speclen.store.queries import view_rows
from speclen.store.schema.seen import LATELY

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


def print_learned(console: Console, db: Path, context: str) -> None:
    """Matrices and plans, at the console's width."""
    for part in learned_parts(db, context, console.width):
        console.print(part)


def learned_parts(db: Path, context: str, width: int) -> list[RenderableType]:
    """One matrix per context, in the order of the view, and a line for each plan. width: in columns of text."""
    rows = learned_rows(db, context)
    if not rows:
        return [
            Text(
                "Nothing is learned yet: start a worker (one that has just begun shows within two seconds), or import a "
                "profile with `speclen profile import`."
            )
        ]
    found: list[RenderableType] = []
    for name, group in groupby(rows, key=lambda row: row["context"]):
        found += titled(name, list(group), width)
    return [*found, *plan_lines(db, context)]


def plan_lines(db: Path, context: str) -> list[Text]:
    """A line per range of batch sizes in which rows copy; none where lengths are all."""
    with reading(db) as connection:
        rows = plan_rows(connection)
    found = []
    for members in neighbours([row for row in rows if row["is_best"] and context in row["context"]]):
        low, high = members[0]["batch_min"], members[-1]["batch_max"]
        sizes = str(low) if low == high else f"{low}-{high}"
        costs = [row["ms_per_token"] for row in members]
        ms = " to ".join(dict.fromkeys([short(min(costs)), short(max(costs))]))
        plan, name = members[0]["plan"], members[0]["context"]
        found.append(Text(f"batch {sizes} plays {plan!r} instead: {ms} ms per token ({name})"))
    return found


def neighbours(used: list[Row]) -> list[list[Row]]:
    """Buckets side by side, ascending, in which one plan is in use; where a length is used between two, they are apart."""
    found: list[list[Row]] = []
    for row in used:
        last = found[-1][-1] if found else None
        alike = last is not None and all(last[name] == row[name] for name in ("context", "plan"))
        if last is not None and alike and row["batch_min"] == last["batch_max"] + 1:
            found[-1].append(row)
        else:
            found.append([row])
    return found


def plan_rows(connection: Connection) -> list[Row]:
    """Rows of plan_table; none of a file that no newer controller has opened yet."""
    known = connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'plan_table'").fetchone()
    return view_rows(connection, "plan_table") if known else []


def titled(context: str, rows: list[Row], width: int) -> list[RenderableType]:
    """A matrix between lines of its own, which wrap at the terminal's width and not at the table's."""
    return [
        Text(context, style="bold"),
        Text(
            "ms per token by batch size and length; * in use, ? never measured here. vs 0: times faster than length 0, "
            "? where that was not played lately. seen: ms per token of the steps at the length in use"
        ),
        *folded(matrix(rows), width),
        Text(f"updated {max(row['updated_at'] for row in rows)[:19]} UTC", style="dim"),
    ]


def matrix(rows: list[Row]) -> list[Column]:
    """Batch sizes down, those with one length in use together; lengths across; ms per token of one row of the batch."""
    lengths = sorted({row["speculation_length"] for row in rows})
    found = ranges(rows)
    sizes = [str(low) if low == high else f"{low}-{high}" for low, high, _ in found]
    together = [cells for _, _, cells in found]
    return [
        column("batch", sizes),
        *(column(str(length), [matrix_cell(cells.get(length)) for cells in together]) for length in lengths),
        column("vs 0", [gain(cells) for cells in together]),
        column("seen", [seen(cells) for cells in together]),
        column("steps", [f"{sum(row['num_steps'] for row in cells.values()):,}" for cells in together]),
    ]


def ranges(rows: list[Row]) -> list[tuple[int, int, dict[int, Row]]]:
    """Neighbouring buckets with one length in use, as one: their ends, and their cells by length."""
    buckets = [list(group) for _, group in groupby(rows, key=lambda row: row["batch_min"])]
    found = []
    for _, members in groupby(buckets, key=length_in_use):
        together = [row for bucket in members for row in bucket]
        together.sort(key=lambda row: (row["speculation_length"], row["batch_min"]))
        cells = {s: combined(list(group)) for s, group in groupby(together, key=lambda row: row["speculation_length"])}
        ends = [row[name] for row in together for name in ("batch_min", "batch_max")]
        found.append((min(ends), max(ends), cells))
    return found


def length_in_use(bucket: list[Row]) -> int | None:
    return next((row["speculation_length"] for row in bucket if row["is_best"]), None)


def combined(cells: list[Row]) -> Row:
    """One length at several batch sizes: means, each as often as it was played."""
    weights = [row["num_steps"] + 1 for row in cells]

    def mean(name: str) -> float:
        return sum(weight * row[name] for weight, row in zip(weights, cells, strict=True)) / sum(weights)

    observed = [row for row in cells if row.get("observed_step_ms") is not None]
    num_steps = sum(row["num_steps"] for row in cells)
    since = [row["num_reports_since"] for row in observed]
    seen_ms = sum(row["num_steps"] * row["observed_step_ms"] / row["expected_tokens"] for row in observed)
    return cells[0] | {
        "ms_per_token": mean("ms_per_token"),
        "num_steps": num_steps,
        "source": "profile" if all(row["source"] == "profile" for row in cells) else cells[0]["source"],
        "seen_ms_per_token": seen_ms / num_steps if observed and num_steps else None,
        "num_reports_since": min(since, default=None),
    }


def short(ms: float) -> str:
    return f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"


def matrix_cell(row: Row | None) -> Text:
    """ms per token, marked when it is in use, and with ? when no step at this length was measured in the bucket."""
    if row is None:
        return Text("")
    number = short(row["ms_per_token"])
    if row["num_steps"] == 0 and row["source"] != "profile":
        number += "?"
    if row["is_best"]:
        return Text(f"*{number}", style="bold green")
    return Text(number, style="dim" if row["num_steps"] == 0 else "")


def gain(cells: dict[int, Row]) -> str:
    """How much faster the length in use is than plain decoding, by the estimates; ? where that was not played lately."""
    best = next((row for row in cells.values() if row["is_best"]), None)
    if best is None or 0 not in cells:
        return ""
    since = cells[0]["num_reports_since"]
    lately = best is cells[0] or (since is not None and since < LATELY)
    return f"{cells[0]['ms_per_token'] / best['ms_per_token']:.2f}x{'' if lately else '?'}"


def seen(cells: dict[int, Row]) -> str:
    """What a token took at the length in use, by the mean of what was seen."""
    best = next((row for row in cells.values() if row["is_best"]), None)
    return "" if best is None or best["seen_ms_per_token"] is None else short(best["seen_ms_per_token"])
