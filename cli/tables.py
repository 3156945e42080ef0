"""`speclen tables`: the arm in use and its figures, one line per batch range."""

from __future__ import annotations

import json
import re
import time
from calendar import timegm
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from speclen.cli.gain import figures_of
from speclen.cli.support.database import DB_OPTION, reading
from speclen.cli.support.output import UserError
from speclen.store import queries
from speclen.store.queries import view_rows
from speclen.store.schema import HoldsRow

Row = dict[str, Any]

NOTHING = (
    "Nothing is learned yet: start a worker, send it a request and wait two seconds, or import a profile with "
    "`speclen profile import`."
)
CONTEXT = typer.Option("", help="Number of a context, or part of names; default: all.")
WEEK_S = 7 * 86_400.0
WIDE = 120  # terminal width from which the arm's neighbours are shown
ARM_WIDTH, WIDE_ARM_WIDTH = 25, 36
DETAILS = re.compile(r"#\w+|\(R\)| \[.*\]")  # parts of a context's name: model fingerprints, trademarks, the engine


def tables(
    db: Path = DB_OPTION,
    context: str = CONTEXT,
    watch: bool = typer.Option(False, "--watch", help="Refresh in place until Ctrl-C."),
    interval_s: float = typer.Option(1.0, min=0.1, help="Seconds between updates with --watch."),
    as_json: bool = typer.Option(False, "--json", help="Print the rows of the view choices, with the gain, as JSON."),
) -> None:
    """Show the arm in use by batch size: ms per token, gain, samples and their age.

    With a baseline, the gain over it is measured. Without one, the estimated
    ratio to plain decoding is shown. `held` marks arms of `speclen hold`, and
    `baseline` those that are in use because learned ones are slower.

    Arms that the data cannot tell apart are equal, as in `draft 3 = 4`; `(+2)`
    stands for two more. Terminals of 120 columns also show the arms with one
    draft token less and one more. The view learned_table has every arm and
    batch size.

    Example: speclen tables --db .speclen/speclen.db --watch
    """
    if watch and as_json:
        raise UserError("--watch and --json exclude each other: give one of them")
    if watch:
        keep_showing(lambda: Group(*learned_parts(db, context)), interval_s)
        return
    if as_json:
        print(json.dumps(with_gain(db, rows_of(db, "choices", context)), indent=2))
    else:
        Console().print(*learned_parts(db, context), sep="\n")


def keep_showing(draw: Callable[[], RenderableType], interval_s: float) -> None:
    with suppress(KeyboardInterrupt), Live(draw(), auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(draw(), refresh=True)


def rows_of(db: Path, view: str, context: str) -> list[Row]:
    """Rows of a view for the contexts that match. Raises UserError if there are contexts but none matches."""
    with reading(db) as connection:
        rows = view_rows(connection, view)
    found = [row for row in rows if is_meant(context, row["context_id"], row["context"])]
    if rows and not found:
        names = "; ".join(dict.fromkeys(f"{row['context_id']}: {row['context']}" for row in rows))
        raise UserError(f"no context is called {context!r}; known are {names}")
    return found


def with_gain(db: Path, rows: list[Row]) -> list[Row]:
    """Add the gain over the baseline from the trials of the last week, None without trials, and the reason of the arm.

    used: "held" for `speclen hold`, "baseline" where learned arms are slower, else "learned".
    """
    with reading(db) as connection:
        trials = queries.trials(connection, time.time() - WEEK_S)
        holds = queries.holds(connection)
    for row in rows:
        own = [
            each.trial
            for each in trials
            if each.context_id == row["context_id"] and row["batch_min"] <= round(each.batch_size) <= row["batch_max"]
        ]
        row |= {name: value for name, value in figures_of(own).items() if name.startswith("gain")}
        held = held_at(holds, row["context_id"], row["batch_min"], row["batch_max"])
        row["used"] = "held" if held else "baseline" if own and own[-1].is_baseline_used else "learned"
    return rows


def held_at(holds: Sequence[HoldsRow], context_id: int, batch_min: int, batch_max: int) -> str | None:
    """The newest hold at some of these batch sizes: an arm, or "baseline"; None if nothing is held."""
    found = None
    for row in holds:
        for low, high, arm in json.loads(row.holds) if row.context_id == context_id else ():
            if low <= batch_max and batch_min <= high:
                found = arm or "baseline"
    return found


def gain_text(gain: float | None) -> str:
    """The measured gain, empty if unknown."""
    return "" if gain is None else f"{gain:.2f}x"


def is_meant(text: str, context_id: int, name: str) -> bool:
    """True if the text is the context's number or part of its name. Digits alone are a number: names contain hashes."""
    return text == str(context_id) if text.isdecimal() else text in name


def learned_parts(db: Path, context: str) -> list[RenderableType]:
    """Name and table of each context, or a sentence if nothing has been learned."""
    width, found = Console().width, list[RenderableType]()
    rows = with_gain(db, rows_of(db, "choices", context))
    titles = titles_of({row["context"] for row in rows}, width)
    for name, group in groupby(rows, key=lambda row: row["context"]):
        found += [Text(titles[name], style="bold"), table_of(list(group), width)]
    return found or [Text(NOTHING)]


def titles_of(contexts: Collection[str], width: int) -> dict[str, str]:
    """Names of the contexts, shortened to the width by dropping details if they stay distinct."""
    titles = {name: name if len(name) <= width else DETAILS.sub("", name)[:width] for name in contexts}
    return titles if len(set(titles.values())) == len(titles) else {name: name for name in contexts}


def table_without_lines(width: int) -> Table:
    return Table(box=None, padding=(0, 2 if width > 90 else 1, 0, 0))


def table_of(rows: Sequence[Row], width: int) -> Table:
    """The table of one context, without empty columns. width: of the terminal, in characters.

    rows: of the view choices; a worker knows only some of their fields.
    """
    is_measured = any(row.get("gain") is not None for row in rows)
    cells = [cells_of(row, width >= WIDE, is_measured) for row in rows]
    table = table_without_lines(width)
    used = [heading for heading in cells[0] if any(row[heading] for row in cells)]
    for heading in used:
        table.add_column(heading, justify="left" if heading == "arm" else "right", no_wrap=True)
    for row in cells:
        table.add_row(*(row[heading] for heading in used))
    return table


def cells_of(row: Row, wide: bool, is_measured: bool) -> dict[str, str]:
    """Texts of a batch range by heading, empty if unknown. is_measured: omit the estimated speedup over plain."""
    known, low, high = (row.get(f"ms_per_token{end}") for end in ("", "_low", "_high"))
    speedup, num_steps = row.get("speedup"), row.get("num_steps")
    cells = {
        "batch": row["batch_bucket"],
        "arm": arm_and_equals(row["arm"], row.get("equal_arms"), WIDE_ARM_WIDTH if wide else ARM_WIDTH),
        "ms/token": "" if known is None else short(known),
        "95% interval": "" if low is None or high is None else f"{short(low)} to {short(high)}",
        "vs plain": "" if speedup is None or is_measured else f"{speedup:.2f}x",
        "gain": gain_text(row.get("gain")),
        "used": used if (used := row.get("used", "")) != "learned" else "",
        "steps": "" if num_steps is None else count(num_steps),
        "age": age_of(row.get("last_step_at")),
    }
    for side in ("shorter", "longer") if wide and known is not None else ():
        ms = row.get(f"{side}_ms_per_token")
        cells[f"1 {side}"] = "" if ms is None else f"{short(ms)} ({round(100 * (ms / known - 1)):+d}%)"
    return cells


def arm_and_equals(arm: str, equal_arms: str | None, width: int) -> str:
    """The arm, then as many equal arms as fit, then the number of the others: `draft 3 = 4 (+2)`."""
    text, others = arm, equal_arms.split(" = ") if equal_arms else []
    kind = arm.rstrip("0123456789")
    names = [other[len(kind) :] if kind[-1] == " " and other.startswith(kind) else other for other in others]
    names.sort(key=lambda name: not name.isdigit())
    while names and len(f"{text} = {names[0]}") + 5 * (len(names) > 1) <= width:
        text = f"{text} = {names.pop(0)}"
    return f"{text} (+{len(names)})" if names else text


def short(ms: float) -> str:
    return f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"


def count(number: int) -> str:
    """A number in at most six characters."""
    if number < 100_000:
        return f"{number:,}"
    return f"{number / 1e3:.0f}k" if number < 1_000_000 else f"{number / 1e6:.3g}M"


def age_of(minute: str | None) -> str:
    """Time since a UTC minute such as `2026-01-31 12:00`, in the largest fitting unit."""
    if minute is None:
        return ""
    minutes = max(60.0, time.time() - timegm(time.strptime(minute, "%Y-%m-%d %H:%M"))) / 60
    for limit, size, unit in ((90, 1, "m"), (36 * 60, 60, "h")):
        if minutes < limit:
            return f"{minutes / size:.0f}{unit}"
    return f"{minutes / 1440:.0f}d"
