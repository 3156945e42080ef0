"""False reports of a worker."""

from __future__ import annotations

import numpy as np

from speclen.records import StepRecord


def lie(kind: str, step: StepRecord, rng: np.random.Generator) -> StepRecord:
    """The false report.

    kind: "times" (long drafts seem to cost nothing, short ones much), "wild" (times of 1 us or an hour), "all" and "nothing"
    (of what was drafted was accepted).
    """
    rows, length = step.batch_size, step.arm.speculation_length
    if kind == "times":
        return step._replace(latency_s=step.latency_s * 4.0 / (1.0 + length) ** 1.5)
    if kind == "wild":
        return step._replace(latency_s=float(rng.choice([1e-6, 3600.0])))
    run = length if kind == "all" else 0
    return step._replace(accepted_histogram=tuple(rows if each == run else 0 for each in range(length + 1)))
