"""The controller's values as messages."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from speclen.records import ArmEstimate, ContextKey, Limits, Probe, Table
from speclen.v1 import control_pb2 as pb


def table_message(table: Table, limits: Limits) -> pb.LengthTable:
    """The table with arms that a worker with these limits can run. Joined ranges of one arm have no expected time."""
    choices = []
    for arm, members in groupby(table.choices, lambda choice: choice.arm.within(limits)):
        first, *others = members
        choices.append(
            pb.BucketChoice(
                batch_min=first.batch_min,
                batch_max=others[-1].batch_max if others else first.batch_max,
                ms_per_token=None if others else first.ms_per_token,
                **arm._asdict(),
            )
        )
    return pb.LengthTable(decision_version=table.version, choices=choices)


def probe_message(probe: Probe, valid_for_s: float) -> pb.Probe:
    values = probe._asdict()
    return pb.Probe(**values.pop("arm")._asdict(), **values, valid_for_s=valid_for_s)


def learned_table_message(key: ContextKey, version: int, rows: Iterable[ArmEstimate]) -> pb.LearnedTable:
    context = pb.ContextKey(**key._asdict())
    return pb.LearnedTable(context=context, decision_version=version, rows=map(learned_row_message, rows))


def learned_row_message(row: ArmEstimate) -> pb.LearnedRow:
    values = row._asdict()
    arm, step_s, observed_s = (values.pop(name) for name in ("arm", "step_s", "observed_step_s"))
    observed_ms = None if observed_s is None else 1e3 * observed_s
    return pb.LearnedRow(**arm._asdict(), **values, step_ms=1e3 * step_s, observed_step_ms=observed_ms)
