"""Step records as rows of the database, and back: exactly, so that a replay makes the same calls."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING

from speclen.records import Arm, OutputEvaluation, RequestClass, StepFlag, StepRecord

if TYPE_CHECKING:
    from speclen.store.schema import ReportRow

_CLASSES = [each.name.lower() for each in RequestClass]


def row_of(
    step: StepRecord, group_id: int, context_id: int, worker_key: int, epoch: int, received_at: float
) -> tuple[object, ...]:
    """Values of a step in the order of speclen.store.schema.ReportRow."""
    (length, ngram), flags = step.arm, " ".join(sorted(flag.value for flag in step.flags)) if step.flags else ""
    return (
        group_id,
        context_id,
        worker_key,
        epoch,
        step.seq,
        step.batch_size,
        length,
        ngram,
        step.latency_s,
        _list_text(step.accepted_histogram),
        step.num_tokens - sum(step.accepted_histogram),
        step.mean_context_length,
        step.decision_version,
        flags,
        step.probe_id,
        _text({_CLASSES[kind]: runs for kind, runs in step.class_histograms}) if step.class_histograms else None,
        step.num_drafted_sequences,
        step.num_verified_tokens,
        step.draft_prefill_s,
        step.num_new_sequences,
        step.num_unobserved_sequences,
        _text(step.evaluations) if step.evaluations else None,
        received_at,
    )


def record_of(row: ReportRow) -> StepRecord:
    """The step in a stored row. Raises ValueError, KeyError or TypeError if `row_of` did not write it."""
    classes = json.loads(row.class_histograms) if row.class_histograms else {}
    evaluations = json.loads(row.evaluations) if row.evaluations else ()
    return StepRecord(
        row.seq,
        row.batch_size,
        Arm(row.speculation_length, bool(row.ngram)),
        row.latency_s,
        tuple(json.loads(row.accepted_histogram)),
        row.mean_context_length,
        row.decision_version,
        frozenset(map(StepFlag, row.flags.split())),
        row.probe_id,
        tuple((_CLASSES.index(name), tuple(runs)) for name, runs in classes.items()),
        row.num_drafted_sequences,
        row.num_verified_tokens,
        row.draft_prefill_s,
        row.num_new_sequences,
        tuple(OutputEvaluation(*each[:3], *map(tuple, each[3:])) for each in evaluations),
    )


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


_list_text = lru_cache(maxsize=16_384)(_text)  # few histograms differ
