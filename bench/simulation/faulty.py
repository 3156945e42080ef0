"""Reports of faulty workers."""

from __future__ import annotations

import numpy as np

from speclen.records import StepRecord


def distorted(kind: str, record: StepRecord, rng: np.random.Generator) -> StepRecord:
    """The false report of a step.

    kind: "times" (long drafts seem to cost nothing, short ones much), "wild" (times of 1 us or an hour), "all" and "nothing"
    (of what was drafted was accepted).
    """
    sequences, length = record.batch_size, record.arm.speculation_length
    if kind == "times":
        return record._replace(latency_s=record.latency_s * 4.0 / (1.0 + length) ** 1.5)
    if kind == "wild":
        return record._replace(latency_s=float(rng.choice([1e-6, 3600.0])))
    run = length if kind == "all" else 0
    return record._replace(accepted_histogram=tuple(sequences if each == run else 0 for each in range(length + 1)))
