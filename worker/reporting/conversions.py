"""Messages of the control stream: a worker's registration, and conversions to and from the shared records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from speclen.records import Arm, Choice, Limits, Probe, StepFlag, StepRecord, Table
from speclen.v1 import control_pb2 as pb

_FLAGS: dict[StepFlag, pb.StepFlag.ValueType] = {
    flag: pb.StepFlag.Value(f"STEP_FLAG_{flag.name}") for flag in StepFlag if flag is not StepFlag.UNKNOWN
}


@dataclass(frozen=True, slots=True)
class WorkerCard:
    """Registration of a worker: its identity, context, limits and policy.

    probe_steps, transition_steps: as in pb.WorkerLimits. evaluates: True if this engine can evaluate finished outputs
    off-policy. baseline: arms that would be used without learning; empty if learned arms are not compared with them.
    """

    worker_id: str
    epoch: int
    context: pb.ContextKey
    limits: Limits
    address: str
    policy: str
    run_id: str = ""
    probe_steps: int = 3
    evaluates: bool = True
    transition_steps: int = 4
    baseline: tuple[Choice, ...] = ()

    def identity(self) -> pb.WorkerIdentity:
        return pb.WorkerIdentity(worker_id=self.worker_id, epoch=self.epoch)

    def limits_message(self) -> pb.WorkerLimits:
        return pb.WorkerLimits(
            **self.limits._asdict(), probe_steps=self.probe_steps, transition_steps=self.transition_steps
        )

    def register_request(self) -> pb.RegisterWorkerRequest:
        return pb.RegisterWorkerRequest(
            worker=self.identity(),
            context=self.context,
            limits=self.limits_message(),
            address=self.address,
            policy=self.policy,
            run_id=self.run_id,
            baseline=to_choices(self.baseline),
        )


def to_report(record: StepRecord) -> pb.StepReport:
    """A step's record as a message. Raises ValueError or TypeError for values that no message can hold."""
    values = _flat(record)
    values["flags"] = [_FLAGS[flag] for flag in record.flags]
    values["class_histograms"] = [
        pb.ClassHistogram(request_class=pb.RequestClass.ValueType(kind + 1), accepted_histogram=runs)
        for kind, runs in record.class_histograms
    ]
    values["evaluations"] = [
        pb.OutputEvaluation(**one._asdict() | {"request_class": one.request_class + 1}) for one in record.evaluations
    ]
    return pb.StepReport(**values)


def _flat(record: StepRecord | Choice) -> dict[str, Any]:
    """Fields of a record as keyword arguments for its message, in which the arm's fields are not nested."""
    values = record._asdict()
    return values | values.pop("arm")._asdict()


def table_message(version: int, choices: tuple[Choice, ...]) -> pb.Table:
    """A table of arms as a message."""
    return pb.Table(decision_version=version, choices=to_choices(choices))


def to_choices(choices: Iterable[Choice]) -> list[pb.Choice]:
    """Batch ranges with their arms, as messages."""
    return [pb.Choice(**_flat(choice)) for choice in choices]


def read_table(message: pb.Table) -> Table:
    """The table of arms in a message of the controller."""
    choices = (Choice(one.batch_min, one.batch_max, Arm(one.speculation_length, one.ngram)) for one in message.choices)
    return Table(message.decision_version, tuple(choices))


def read_probe(message: pb.Probe) -> Probe:
    """The probe in a message of the controller."""
    arm = Arm(message.speculation_length, message.ngram)
    num_steps = max(1, message.num_steps)
    return Probe(message.probe_id, message.batch_min, message.batch_max, arm, num_steps, message.is_trial)
