"""Reports of steps, read into records and validated, once.

This runs for every step of every worker, and takes some microseconds per report.
"""

from __future__ import annotations

from functools import lru_cache

from speclen.controller.wire.messages import (
    MAX_INTEGER,
    MAX_LATENCY_S,
    MAX_TOKENS,
    MIN_LATENCY_S,
    InvalidMessageError,
    check_range,
    out_of_range,
)
from speclen.records import (
    MAX_EVALUATIONS,
    MAX_SPECULATION_LENGTH,
    NUM_CLASSES,
    Arm,
    Limits,
    OutputEvaluation,
    StepFlag,
    StepRecord,
)
from speclen.v1 import control_pb2 as pb

MAX_REPORTS = 1024  # in one message
# Entries of a repeated field that are read: one more than allowed, so that a longer one is refused at no cost.
MOST_RUNS = MAX_SPECULATION_LENGTH + 2
MOST_FLAGS = 64

_FLAGS = {getattr(pb, f"STEP_FLAG_{flag.name}"): flag for flag in StepFlag if flag is not StepFlag.UNKNOWN}
_NO_FLAGS: frozenset[StepFlag] = frozenset()


def read_step(report: pb.StepReport, limits: Limits) -> StepRecord:
    """A reported step, validated. Raises InvalidMessageError naming the field and its range."""
    rows, length = report.batch_size, report.speculation_length
    step = StepRecord(
        report.seq,
        rows,
        Arm(length, report.ngram),
        report.latency_s,
        tuple(report.accepted_histogram[:MOST_RUNS]),
        report.mean_context_length,
        report.decision_version,
        _flags(report) if report.flags else _NO_FLAGS,
        report.probe_id,
        (),
        report.num_drafted_sequences if report.HasField("num_drafted_sequences") else rows * (length > 0),
        report.num_verified_tokens if report.HasField("num_verified_tokens") else rows * (length + 1),
        report.draft_prefill_s,
        report.num_new_sequences,
        elapsed_s=report.elapsed_s,
    )
    try:
        _check(step, limits, report.num_unobserved_sequences)
        if report.class_histograms:
            step = step._replace(class_histograms=_class_histograms(report, step))
        if report.evaluations:
            step = step._replace(evaluations=_evaluations(report, limits))
    except InvalidMessageError as error:
        raise InvalidMessageError(error.reason, f"report {report.seq}: {error}") from None
    return step


def _check(step: StepRecord, limits: Limits, num_unobserved: int) -> None:
    rows, (length, ngram), histogram = step.batch_size, step.arm, step.accepted_histogram
    for name, value, least, most in (
        ("seq", step.seq, 1, MAX_INTEGER),
        ("batch_size", rows, 1, limits.max_batch_size),
        ("speculation_length", length, 0, limits.max_speculation_length),
        ("ngram", ngram, False, limits.ngram),
        ("latency_s", step.latency_s, MIN_LATENCY_S, MAX_LATENCY_S),
        ("mean_context_length", step.mean_context_length, 0, MAX_TOKENS),
        ("decision_version", step.decision_version, 0, MAX_INTEGER),
        ("probe_id", step.probe_id, 0, MAX_INTEGER),
        ("num_drafted_sequences", step.num_drafted_sequences, 0, rows if length else 0),
        ("num_verified_tokens", step.num_verified_tokens, rows, rows * (MAX_SPECULATION_LENGTH + 1)),
        ("draft_prefill_s", step.draft_prefill_s, 0.0, MAX_LATENCY_S),
        ("elapsed_s", step.elapsed_s, 0.0, MAX_LATENCY_S),
        ("num_new_sequences", step.num_new_sequences, 0, limits.max_batch_size),
    ):
        if not least <= value <= most:
            raise out_of_range(name, value, least, most)
    most = step.arm.max_tokens + 1
    if not (1 if ngram else most) <= len(histogram) <= most:
        number = len(histogram) if len(histogram) < MOST_RUNS else "too many"
        sentence = f"accepted_histogram has {number} entries; it must have {most} for the arm `{step.arm}`"
        raise InvalidMessageError("accepted_histogram", sentence)
    observed = rows - num_unobserved
    if sum(histogram) != observed or observed < 1:
        sentence = (
            f"accepted_histogram sums to {sum(histogram)}; with num_unobserved_sequences, {num_unobserved}, it must sum to "
            f"batch_size, {rows}, and at least 1 sequence must be in it"
        )
        raise InvalidMessageError("accepted_histogram", sentence)


def _flags(report: pb.StepReport) -> frozenset[StepFlag]:
    return frozenset(_FLAGS.get(flag, StepFlag.UNKNOWN) for flag in report.flags[:MOST_FLAGS])


def _class_histograms(report: pb.StepReport, step: StepRecord) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The histograms by request class, which must add up to that of all."""
    check_range("the number of entries of class_histograms", len(report.class_histograms), 0, NUM_CLASSES)
    split = tuple(
        (each.request_class - 1, tuple(each.accepted_histogram[:MOST_RUNS])) for each in report.class_histograms
    )
    classes = [kind for kind, _ in split]
    if len(set(classes)) < len(classes) or not 0 <= min(classes) <= max(classes) < NUM_CLASSES:
        raise InvalidMessageError("class_histograms", "class_histograms must have each known class once at most")
    histogram = step.accepted_histogram
    if any(len(runs) != len(histogram) for _, runs in split) or histogram != tuple(
        map(sum, zip(*(runs for _, runs in split), strict=True))
    ):
        sentence = f"class_histograms must add up to accepted_histogram, {list(histogram)}"
        raise InvalidMessageError("class_histograms", sentence)
    return split


def _evaluations(report: pb.StepReport, limits: Limits) -> tuple[OutputEvaluation, ...]:
    check_range("the number of evaluations", len(report.evaluations), 0, MAX_EVALUATIONS)
    return tuple(_evaluation(each, _evaluated_arms(limits)) for each in report.evaluations)


@lru_cache
def _evaluated_arms(limits: Limits) -> dict[int, list[Arm]]:
    """Arms that an output may be evaluated for, by length of the list: all of the worker, or plain and `n-gram`."""
    alone = {2: Limits(1, 0, ngram=True).arms()} if limits.ngram else {}
    return alone | {len(limits.arms()): limits.arms()}


def _evaluation(message: pb.OutputEvaluation, known_arms: dict[int, list[Arm]]) -> OutputEvaluation:
    """The steps of every arm, checked to be possible for this number of tokens."""
    tokens = message.num_tokens
    check_range("evaluations.request_class", message.request_class, 1, NUM_CLASSES)
    check_range("evaluations.num_output_tokens", message.num_output_tokens, 1, MAX_TOKENS)
    check_range("evaluations.num_tokens", tokens, 1, message.num_output_tokens)
    lists = message.num_steps, message.num_drafted_steps, message.num_verified_tokens
    arms = known_arms.get(len(lists[0]))
    if arms is None or len({*map(len, lists)}) > 1:
        expected = " or ".join(map(str, sorted(known_arms, reverse=True)))
        sentence = (
            f"evaluations has lists of {[*map(len, lists)]} entries; each must have one for every arm, {expected}"
        )
        raise InvalidMessageError("evaluations", sentence)
    steps, drafted, verified = map(tuple, lists)
    for arm, taken, with_draft, checked in zip(arms, steps, drafted, verified, strict=True):
        most = arm.max_tokens + 1  # tokens of a step
        check_range("evaluations.num_steps", taken, -(-tokens // most), tokens)
        check_range("evaluations.num_drafted_steps", with_draft, 0, taken)
        check_range("evaluations.num_verified_tokens", checked, taken, taken * most)
    return OutputEvaluation(message.request_class - 1, message.num_output_tokens, tokens, steps, drafted, verified)
