"""Between the shared records and the messages of the control stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from speclen.records import Arm, Choice, Probe, StepFlag, StepRecord, Table
from speclen.v1 import control_pb2 as pb

_CLASSES = (pb.REQUEST_CLASS_GREEDY, pb.REQUEST_CLASS_LOW_TEMPERATURE, pb.REQUEST_CLASS_HIGH_TEMPERATURE)
_FLAGS: dict[StepFlag, pb.StepFlag.ValueType] = {
    flag: pb.StepFlag.Value(f"STEP_FLAG_{flag.name}") for flag in StepFlag if flag is not StepFlag.UNKNOWN
}


def to_report(record: StepRecord) -> pb.StepReport:
    """Raises ValueError or TypeError for values that no message can hold."""
    values = _flat(record)
    values["flags"] = [_FLAGS[flag] for flag in record.flags]
    values["class_histograms"] = [
        pb.ClassHistogram(request_class=_CLASSES[kind], accepted_histogram=runs)
        for kind, runs in record.class_histograms
    ]
    values["evaluations"] = [
        pb.OutputEvaluation(**one._asdict() | {"request_class": _CLASSES[one.request_class]})
        for one in record.evaluations
    ]
    return pb.StepReport(**values)


def _flat(record: StepRecord | Choice) -> dict[str, Any]:
    """The values of a record, with those of its arm beside the others."""
    values = record._asdict()
    return values | values.pop("arm")._asdict()


def to_table(version: int, choices: tuple[Choice, ...]) -> pb.LengthTable:
    """The table that a worker uses."""
    return pb.LengthTable(decision_version=version, choices=to_choices(choices))


def to_choices(choices: Iterable[Choice]) -> list[pb.BucketChoice]:
    """Ranges of batch sizes with their arms."""
    return [pb.BucketChoice(**_flat(choice)) for choice in choices]


def table_of(message: pb.LengthTable) -> Table:
    """The controller's table."""
    choices = (Choice(one.batch_min, one.batch_max, Arm(one.speculation_length, one.ngram)) for one in message.choices)
    return Table(message.decision_version, tuple(choices))


def probe_of(message: pb.Probe) -> Probe:
    """The controller's probe."""
    arm = Arm(message.speculation_length, message.ngram)
    num_steps = max(1, message.num_steps)
    return Probe(message.probe_id, message.batch_min, message.batch_max, arm, num_steps, message.is_trial)
