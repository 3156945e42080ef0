"""A report is read whole or refused with a sentence that names the field."""

import math

import pytest

from speclen.controller.wire.ingest import read_step
from speclen.controller.wire.messages import MAX_INTEGER, InvalidMessageError
from speclen.records import Arm, Limits, StepFlag, StepRecord
from speclen.v1 import control_pb2 as pb
from tests.support.control_fakes import report

LIMITS = Limits(32, 4, ngram=True)


def read(**changes) -> StepRecord:
    return read_step(report(**{"seq": 1, **changes}), LIMITS)


def classes(*histograms: tuple[int, list[int]]) -> list[pb.ClassHistogram]:
    return [pb.ClassHistogram(request_class=kind, accepted_histogram=runs) for kind, runs in histograms]


def evaluation(**changes) -> pb.OutputEvaluation:
    fields = {"request_class": 1, "num_output_tokens": 20, "num_tokens": 12}
    lists = {"num_steps": [12] + [6] * 9, "num_drafted_steps": [0] + [6] * 9, "num_verified_tokens": [12] * 10}
    return pb.OutputEvaluation(**{**fields, **lists, **changes})


def test_absent_fields_default_to_an_ordinary_step():
    plain = read(speculation_length=0, accepted_histogram=[4])
    assert (plain.num_drafted_sequences, plain.num_verified_tokens) == (0, 4)
    told = read(num_drafted_sequences=0, num_verified_tokens=7, ngram=True)
    assert (told.arm, told.num_drafted_sequences, told.num_verified_tokens) == (Arm(2, True), 0, 7)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("seq", [0, MAX_INTEGER + 1]),
        ("batch_size", [0, 33, 2**32 - 1]),
        ("speculation_length", [5, 64, 2**32 - 1]),
        ("latency_s", [math.nan, math.inf, -math.inf, 0.0, 9.9e-7, -1e-9, 3600.1]),
        ("accepted_histogram", [[], [4], [1, 2], [1, 2, 2], [1, 2, 1, 0], [0, 0, 0], [0] * 1000, [2**32 - 1, 5, 0]]),
        ("mean_context_length", [math.nan, math.inf, -1.0, 1e9]),
        ("draft_prefill_s", [math.nan, math.inf, -1e-9, 3600.1]),
        ("num_new_sequences", [33, 2**32 - 1]),
        ("num_unobserved_sequences", [1, 4, 2**32 - 1]),
        ("decision_version", [MAX_INTEGER + 1]),
        ("probe_id", [2**64 - 1]),
        ("num_drafted_sequences", [5]),
        ("num_verified_tokens", [3, 4 * 65 + 1]),
        (
            "class_histograms",
            [
                classes((1, [1, 2, 1]), (1, [0, 0, 0])),
                classes((4, [1, 2, 1])),
                classes((0, [1, 2, 1])),
                classes((1, [1, 1, 1])),
                classes((1, [1, 2])),
                classes((1, [])),
                classes(*[(1, [0])] * 1000),
            ],
        ),
        (
            "evaluations",
            [
                [evaluation()] * 17,
                [evaluation(request_class=0)],
                [evaluation(num_tokens=21)],
                [evaluation(num_tokens=0)],
                [evaluation(num_steps=[12])],
                [evaluation(num_steps=[12, 6])],
                [evaluation(num_steps=[13] + [6] * 9)],
                [evaluation(num_steps=[0] * 10)],
                [evaluation(num_steps=[11] + [6] * 9)],  # plain decoding takes a step per token
                [evaluation(num_steps=[12, 5] + [6] * 8)],  # draft 1 puts at most 2 tokens into a step
                [evaluation(num_drafted_steps=[7] * 10)],
                [evaluation(num_verified_tokens=[5] * 10)],
                [evaluation(num_verified_tokens=[2**32 - 1] * 10)],
            ],
        ),
    ],
)
def test_implausible_values_are_refused_by_name(field, values):
    for value in values:
        with pytest.raises(InvalidMessageError, match=rf"report 1?\d*: .*{field}.* must ") as refusal:
            read(**{field: value})
        assert len(str(refusal.value)) < 1000


def test_n_grams_are_refused_unless_the_worker_registered_with_them():
    with pytest.raises(InvalidMessageError, match="ngram"):
        read_step(report(1, ngram=True), Limits(32, 4))
    alone = evaluation(num_steps=[12, 6], num_drafted_steps=[0, 0], num_verified_tokens=[12, 24])
    assert read(evaluations=[alone]).evaluations[0].num_steps == (12, 6)
    with pytest.raises(InvalidMessageError, match="evaluations"):
        read_step(report(1, evaluations=[alone]), Limits(32, 4))


def test_flags_are_read_and_unknown_ones_are_a_reason_too():
    step = read(flags=[pb.STEP_FLAG_PREFILL, pb.STEP_FLAG_PREFILL, pb.STEP_FLAG_CHANGED_ARM, 99])
    assert step.flags == {StepFlag.PREFILL, StepFlag.CHANGED_ARM, StepFlag.UNKNOWN}
    assert read(flags=[pb.STEP_FLAG_UNSPECIFIED]).flags == {StepFlag.UNKNOWN}
    assert {flag.name for flag in StepFlag} - {"UNKNOWN"} == {
        name.removeprefix("STEP_FLAG_")
        for name in pb.StepFlag.DESCRIPTOR.values_by_name
        if name != "STEP_FLAG_UNSPECIFIED"
    }
