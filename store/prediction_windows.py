"""Predicted against observed: the estimates on disk beside the usable samples of a commit, summed per minute and arm.

The sums over reports are made here, on the writer's thread: SQLite would sort all reports of the commit for them, which
cost more than inserting them (1.9 us a report against 1.2).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from speclen.store.connection import Connection
from speclen.store.records import ReportRow

WINDOW_S = 60

_KEY = ("context_id", "batch_size", "speculation_length", "ngram")
_VALUES = ("received_at", "latency_s", "num_accepted_tokens", "flags")
_OF_REPORT = itemgetter(*map(ReportRow._fields.index, (*_KEY, *_VALUES)))

# Rows of sums that one statement takes, largest first.
BLOCKS = (64, 16, 4, 1)

ADD_PREDICTIONS = """
WITH n(context_id, batch_size, speculation_length, ngram, window_start, num_steps, sum_step_s, sum_tokens)
  AS (VALUES {rows})
INSERT INTO prediction_windows
SELECT a.context_id, n.window_start, a.batch_min, max(a.batch_max), a.speculation_length, a.ngram, sum(n.num_steps),
  sum(n.sum_step_s), sum(n.sum_tokens), sum(n.num_steps * a.step_s), sum(n.num_steps * a.expected_tokens)
FROM n JOIN arm_estimates AS a ON a.context_id = n.context_id AND n.batch_size BETWEEN a.batch_min AND a.batch_max
  AND a.speculation_length = n.speculation_length AND a.ngram = n.ngram
GROUP BY n.window_start, a.context_id, a.batch_min, a.speculation_length, a.ngram
ON CONFLICT DO UPDATE SET
  batch_max = excluded.batch_max,
  num_steps = num_steps + excluded.num_steps,
  sum_step_s = sum_step_s + excluded.sum_step_s,
  sum_tokens = sum_tokens + excluded.sum_tokens,
  sum_predicted_step_s = sum_predicted_step_s + excluded.sum_predicted_step_s,
  sum_predicted_tokens = sum_predicted_tokens + excluded.sum_predicted_tokens
"""
STATEMENTS = {size: ADD_PREDICTIONS.format(rows=", ".join(["(?, ?, ?, ?, ?, ?, ?, ?)"] * size)) for size in BLOCKS}


def add_predictions(connection: Connection, reports: Sequence[Sequence[Any]]) -> None:
    """Compare reports, rows in the order of ReportRow, with the estimates that are in the database now."""
    sums, start = sums_by_arm(reports), 0
    for size in BLOCKS:
        while len(sums) - start >= size:
            connection.execute(STATEMENTS[size], list(chain.from_iterable(sums[start : start + size])))
            start += size


def sums_by_arm(reports: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """One row per context, batch size, arm and window, as ADD_PREDICTIONS names them. Flagged steps are left out."""
    sums: defaultdict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for report in reports:
        *key, received_at, latency_s, num_accepted, flags = _OF_REPORT(report)
        if flags == "":
            total = sums[(*key, int(received_at // WINDOW_S) * WINDOW_S)]
            total[0] += 1
            total[1] += latency_s
            total[2] += 1.0 + num_accepted / key[1]
    return [(*key, *total) for key, total in sums.items()]
