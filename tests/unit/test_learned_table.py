"""The learned table fits the terminal, and no figure of it is cut."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from store_rows import cell, context, store_now

from speclen.console.learned.table import print_learned
from speclen.store.database import Store
from speclen.store.records import Commit


def lines_of(path, num_lengths: int, width: int) -> list[str]:
    """A table with the widest figures that occur, at batch sizes 17 to 32."""
    cells = [
        cell(
            *(length, 17, 32),
            step_s=0.000123 * (1.0 + length),
            expected_tokens=1.0 + length,
            is_best=length == 3,
            num_steps=0 if length else 123_456,
            **({} if length else {"observed_step_s": 0.000123, "num_reports_since": 20_000}),
        )
        for length in range(num_lengths)
    ]
    store = Store.open(path)
    store_now(store, Commit(contexts=[context()], latency_cells=cells))
    store.close()
    console = Console(file=io.StringIO(), width=width)
    print_learned(console, path, "")
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(("num_lengths", "width"), [(9, 80), (17, 80), (65, 80), (9, 40), (65, 160)])
def test_no_line_is_wider_than_the_terminal_and_no_figure_is_cut(tmp_path, num_lengths, width):
    lines = lines_of(tmp_path / "s.db", num_lengths, width)
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    headings = [line.split() for line in lines if line.split()[:1] == ["batch"]]
    told = [word for heading in headings for word in heading[1:]]
    assert told == [*map(str, range(num_lengths)), "vs", "0", "seen", "steps"]
    figures = [word for line in lines if line.startswith("17-32") for word in line.split()[1:]]
    assert figures.count("0.123?") == num_lengths - 2
    assert figures[3] == "*0.123?"
    assert figures[-1] == "123,456"


def test_what_fits_is_one_table(tmp_path):
    assert sum(line.startswith("17-32") for line in lines_of(tmp_path / "s.db", 7, 80)) == 1
