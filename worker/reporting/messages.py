"""Between the shared records and the messages of the control stream."""

from __future__ import annotations

from speclen.records import Arm, Choice, OutputEvaluation, Probe, StepFlag, StepRecord, Table
from speclen.v1 import control_pb2 as pb

_CLASSES = (pb.REQUEST_CLASS_GREEDY, pb.REQUEST_CLASS_LOW_TEMPERATURE, pb.REQUEST_CLASS_HIGH_TEMPERATURE)
_FLAGS: dict[StepFlag, pb.StepFlag.ValueType] = {
    flag: pb.StepFlag.Value(f"STEP_FLAG_{flag.name}") for flag in StepFlag if flag is not StepFlag.UNKNOWN
}


def to_report(record: StepRecord) -> pb.StepReport:
    """Raises ValueError or TypeError for values that no message can hold."""
    return pb.StepReport(
        seq=record.seq,
        batch_size=record.batch_size,
        speculation_length=record.arm.speculation_length,
        ngram=record.arm.ngram,
        latency_s=record.latency_s,
        accepted_histogram=record.accepted_histogram,
        mean_context_length=record.mean_context_length,
        decision_version=record.decision_version,
        flags=[_FLAGS[flag] for flag in record.flags],
        probe_id=record.probe_id,
        class_histograms=[
            pb.ClassHistogram(request_class=_CLASSES[kind], accepted_histogram=runs)
            for kind, runs in record.class_histograms
        ],
        num_drafted_sequences=record.num_drafted_sequences,
        num_verified_tokens=record.num_verified_tokens,
        draft_prefill_s=record.draft_prefill_s,
        num_new_sequences=record.num_new_sequences,
        evaluations=[_to_evaluation(evaluation) for evaluation in record.evaluations],
        num_unobserved_sequences=record.num_unobserved_sequences,
    )


def _to_evaluation(evaluation: OutputEvaluation) -> pb.OutputEvaluation:
    values = evaluation._asdict()
    return pb.OutputEvaluation(request_class=_CLASSES[values.pop("request_class")], **values)


def to_table(version: int, choices: tuple[Choice, ...]) -> pb.LengthTable:
    """The table that a worker uses."""
    return pb.LengthTable(
        decision_version=version,
        choices=[
            pb.BucketChoice(
                batch_min=choice.batch_min,
                batch_max=choice.batch_max,
                speculation_length=choice.arm.speculation_length,
                ngram=choice.arm.ngram,
                ms_per_token=choice.ms_per_token,
            )
            for choice in choices
        ],
    )


def table_of(message: pb.LengthTable) -> Table:
    """The controller's table."""
    choices = (Choice(one.batch_min, one.batch_max, Arm(one.speculation_length, one.ngram)) for one in message.choices)
    return Table(message.decision_version, tuple(choices))


def probe_of(message: pb.Probe) -> Probe:
    """The controller's probe."""
    arm = Arm(message.speculation_length, message.ngram)
    return Probe(message.probe_id, message.batch_min, message.batch_max, arm, max(1, message.num_steps))
