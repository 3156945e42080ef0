"""What the estimates on disk said of the reports of a commit, beside what these took; summed per minute and cell.

The sums over reports are made here, on the writer's thread: SQLite would sort all reports of the commit for them, which
cost more than inserting them (1.9 us a report against 1.2).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np

from speclen.store.connection import Connection
from speclen.store.records import ReportRow

WINDOW_S = 60.0

_KEY = itemgetter(*(ReportRow._fields.index(name) for name in ("context_id", "batch_size", "speculation_length")))
_TIMES = itemgetter(*(ReportRow._fields.index(name) for name in ("received_at", "latency_s", "num_accepted_tokens")))
_FLAGS = ReportRow._fields.index("flags")
_NUM_STEPS, _HISTOGRAM = ReportRow._fields.index("num_steps"), ReportRow._fields.index("accepted_histogram")

# Rows of sums that one statement takes, largest first.
BLOCKS = (64, 16, 4, 1)

ADD_PREDICTIONS = """
WITH n(context_id, batch_size, speculation_length, window_start, num_steps, sum_step_s, sum_tokens) AS (VALUES {rows})
INSERT INTO prediction_windows
SELECT c.context_id, n.window_start, c.batch_min, max(c.batch_max), c.speculation_length, sum(n.num_steps),
  sum(n.sum_step_s), sum(n.sum_tokens), sum(n.num_steps * coalesce(c.bare_step_s, c.step_s)),
  sum(n.num_steps * c.expected_tokens)
FROM n JOIN latency_cells AS c ON c.context_id = n.context_id AND n.batch_size BETWEEN c.batch_min AND c.batch_max
  AND c.speculation_length = n.speculation_length
GROUP BY n.window_start, c.context_id, c.batch_min, c.speculation_length
ON CONFLICT DO UPDATE SET
  batch_max = excluded.batch_max,
  num_steps = num_steps + excluded.num_steps,
  sum_step_s = sum_step_s + excluded.sum_step_s,
  sum_tokens = sum_tokens + excluded.sum_tokens,
  sum_predicted_step_s = sum_predicted_step_s + excluded.sum_predicted_step_s,
  sum_predicted_tokens = sum_predicted_tokens + excluded.sum_predicted_tokens
"""
STATEMENTS = {size: ADD_PREDICTIONS.format(rows=", ".join(["(?, ?, ?, ?, ?, ?, ?)"] * size)) for size in BLOCKS}


def add_predictions(connection: Connection, reports: Sequence[Sequence[Any]]) -> None:
    """Compare reports, rows in the order of ReportRow, with the estimates that are in the database now."""
    ordinary = [row for row in reports if row[_FLAGS] == ""]
    sums, start = sums_by_cell(ordinary) if ordinary else [], 0
    for size in BLOCKS:
        while len(sums) - start >= size:
            connection.execute(STATEMENTS[size], list(chain.from_iterable(sums[start : start + size])))
            start += size


def sums_by_cell(reports: Sequence[Sequence[Any]]) -> list[list[float]]:
    """One row per context, batch size, length and window, as ADD_PREDICTIONS names them. reports: not empty."""
    cells: dict[tuple[int, ...], int] = {}
    place = np.array([cells.setdefault(_KEY(row), len(cells)) for row in reports])
    received_at, latency_s, num_accepted = np.array([_TIMES(row) for row in reports], dtype=float).T
    batch_size = np.array([key[1] for key in cells])[place]
    num_steps = np.array([row[_NUM_STEPS] for row in reports], dtype=float)
    for at in (num_steps > 1.0).nonzero()[0].tolist():  # per step, which the column has in whole tokens alone
        num_accepted[at] = _accepted_in(reports[at][_HISTOGRAM]) / num_steps[at]
    window = received_at // WINDOW_S
    sums = []
    for start in np.unique(window):
        mine = window == start
        steps, seconds, tokens = (
            np.bincount(place[mine], values, len(cells)).tolist()
            for values in (
                num_steps[mine],
                (num_steps * latency_s)[mine],
                (num_steps * (1.0 + num_accepted / batch_size))[mine],
            )
        )
        sums += [
            [*key, int(WINDOW_S * start), int(steps[index]), seconds[index], tokens[index]]
            for key, index in cells.items()
            if steps[index]
        ]
    return sums


def _accepted_in(histogram: str) -> int:
    """Accepted tokens of a stored histogram."""
    return sum(run * rows for run, rows in enumerate(json.loads(histogram)))
