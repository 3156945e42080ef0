"""The controller's values as messages."""

from __future__ import annotations

from collections.abc import Iterable

from speclen.records import ArmEstimate, ContextKey, Limits, Probe, Table
from speclen.v1 import control_pb2 as pb


def table_message(table: Table, limits: Limits) -> pb.LengthTable:
    """The table with arms that a worker with these limits can run."""
    return pb.LengthTable(
        decision_version=table.version,
        choices=[
            pb.BucketChoice(
                batch_min=choice.batch_min,
                batch_max=choice.batch_max,
                ms_per_token=choice.ms_per_token,
                **choice.arm.within(limits)._asdict(),
            )
            for choice in table.choices
        ],
    )


def probe_message(probe: Probe, valid_for_s: float) -> pb.Probe:
    return pb.Probe(
        probe_id=probe.probe_id,
        batch_min=probe.batch_min,
        batch_max=probe.batch_max,
        num_steps=probe.num_steps,
        valid_for_s=valid_for_s,
        **probe.arm._asdict(),
    )


def learned_table_message(key: ContextKey, version: int, rows: Iterable[ArmEstimate]) -> pb.LearnedTable:
    context = pb.ContextKey(**key._asdict())
    return pb.LearnedTable(context=context, decision_version=version, rows=map(learned_row_message, rows))


def learned_row_message(row: ArmEstimate) -> pb.LearnedRow:
    return pb.LearnedRow(
        batch_min=row.batch_min,
        batch_max=row.batch_max,
        expected_tokens=row.expected_tokens,
        step_ms=1e3 * row.step_s,
        ms_per_token=row.ms_per_token,
        ms_per_token_low=row.ms_per_token_low,
        ms_per_token_high=row.ms_per_token_high,
        num_steps=row.num_steps,
        source=row.source,
        is_best=row.is_best,
        observed_step_ms=None if row.observed_step_s is None else 1e3 * row.observed_step_s,
        **row.arm._asdict(),
    )
