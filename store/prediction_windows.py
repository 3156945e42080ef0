"""Predicted against observed: the estimates on disk beside the usable samples of a commit, summed per minute and arm.

The sums over reports are made here, on the writer's thread: SQLite would sort all reports of the commit for them, which
cost more than inserting them (1.9 us a report against 1.2).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

from speclen.store.connection import Connection
from speclen.store.records import ReportRow

WINDOW_S = 60

_KEY = ("context_id", "batch_size", "speculation_length", "ngram")
_VALUES = ("received_at", "latency_s", "accepted_histogram", "flags")
_OF_REPORT = itemgetter(*map(ReportRow._fields.index, (*_KEY, *_VALUES)))

ADD_PREDICTIONS = """
INSERT INTO prediction_windows
SELECT a.context_id, :window_start, a.batch_min, a.batch_max, a.speculation_length, a.ngram, :num_steps, :sum_step_s,
  :sum_tokens, :num_steps * a.step_s, :num_steps * a.expected_tokens
FROM arm_estimates AS a
WHERE a.context_id = :context_id AND a.speculation_length = :speculation_length AND a.ngram = :ngram
  AND a.batch_max >= :batch_size AND a.batch_min =
    (SELECT max(batch_min) FROM arm_estimates WHERE context_id = :context_id AND batch_min <= :batch_size)
ON CONFLICT DO UPDATE SET
  batch_max = excluded.batch_max,
  num_steps = num_steps + excluded.num_steps,
  sum_step_s = sum_step_s + excluded.sum_step_s,
  sum_tokens = sum_tokens + excluded.sum_tokens,
  sum_predicted_step_s = sum_predicted_step_s + excluded.sum_predicted_step_s,
  sum_predicted_tokens = sum_predicted_tokens + excluded.sum_predicted_tokens
"""


def add_predictions(connection: Connection, reports: Sequence[Sequence[Any]]) -> None:
    """Compare reports, rows in the order of ReportRow, with the estimates that are in the database now."""
    connection.executemany(ADD_PREDICTIONS, sums_by_arm(reports))


def sums_by_arm(reports: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """One row per context, batch size, arm and window, as ADD_PREDICTIONS names them. Flagged steps are left out."""
    sums: defaultdict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for report in reports:
        *key, received_at, latency_s, histogram, flags = _OF_REPORT(report)
        if flags == "":
            total = sums[(*key, int(received_at // WINDOW_S) * WINDOW_S)]
            total[0] += 1
            total[1] += latency_s
            total[2] += tokens_per_sequence(histogram)
    names = (*_KEY, "window_start", "num_steps", "sum_step_s", "sum_tokens")
    return [dict(zip(names, (*key, *total), strict=True)) for key, total in sums.items()]


@lru_cache(maxsize=16_384)  # few histograms differ
def tokens_per_sequence(histogram: str) -> float:
    """Mean of the tokens that the sequences of a histogram generated."""
    counts: list[int] = json.loads(histogram)
    return sum((run + 1) * count for run, count in enumerate(counts)) / max(sum(counts), 1)
