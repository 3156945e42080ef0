"""Windows of steps that a worker has added up: checked, and read as if they were reports.

Its sums weigh as much as the steps that they stand for, and are stored in the same table.
"""

from __future__ import annotations

import math
from operator import mul

from speclen.controller.estimator.core import Limits, StepObservation
from speclen.controller.wire.ingest import MOST_RUNS, ByClass, Group, Origin, by_class_of, meaning_of, read_reports
from speclen.controller.wire.validation import (
    MAX_CONTEXT_LENGTH,
    MAX_INTEGER,
    MAX_LATENCY_S,
    MIN_LATENCY_S,
    InvalidMessageError,
    check_range,
)
from speclen.v1 import control_pb2 as pb

MAX_WINDOWS = 16  # in one message
MAX_STEPS = 65_536  # of one window
# By how much a sum of squares may be below what its sum requires: rounding of so many additions.
ROUNDING = 1e-9
SEQ = 3  # place of seq in a row of Group


def read_window(window: pb.ReportWindow, limits: Limits, origin: Origin, group: Group) -> list[InvalidMessageError]:
    """Add a window's steps to the group, in order; its bad reports are refused alone, and the reasons come back.

    Raises InvalidMessageError for a bad sum; nothing is added then. See also check_span.
    """
    steps = Group()
    for each in window.sums:
        _read_sum(each, limits, origin, steps)
    refusals = read_reports(window.reports, limits, origin, steps)
    order = sorted(range(len(steps.rows)), key=lambda at: steps.rows[at][SEQ])  # type: ignore[arg-type, return-value]
    group.observations += [steps.observations[at] for at in order]
    group.rows += [steps.rows[at] for at in order]
    return refusals


def check_span(window: pb.ReportWindow) -> None:
    """Whether it has each of its steps once. Raises InvalidMessageError."""
    first, last, named = window.first_seq, window.last_seq, f"window {window.first_seq} to {window.last_seq}"
    if not 1 <= first <= last <= MAX_INTEGER:
        raise InvalidMessageError("window", f"{named}: it must begin at 1 or later and not end before that")
    seqs = [*(each.first_seq for each in window.sums), *(each.seq for each in window.reports)]
    if len(set(seqs)) < len(seqs) or not all(first <= seq <= last for seq in seqs):
        raise InvalidMessageError("window", f"{named}: its sums and reports must have a seq of their own in it")
    num_steps = sum(each.num_steps for each in window.sums) + len(window.reports)
    if num_steps != last - first + 1 or num_steps > MAX_STEPS:
        raise InvalidMessageError(
            "window", f"{named} holds {num_steps} steps; it must hold {last - first + 1}, at most {MAX_STEPS}"
        )


def _read_sum(each: pb.StepSum, limits: Limits, origin: Origin, group: Group) -> None:
    seq, num_steps, histogram = each.first_seq, each.num_steps, tuple(each.accepted_histogram[:MOST_RUNS])
    mean_s, sd_s = _checked(each, limits, histogram)
    by_class: ByClass = ()
    classes_text: str | None = None
    if each.class_histograms:
        split = by_class_of(each, histogram, seq)
        if isinstance(split, InvalidMessageError):
            raise split
        by_class, classes_text = split
    flags, context = meaning_of(each), each.mean_context_length
    shape = each.batch_size, each.speculation_length
    group.observations.append(
        StepObservation(
            *(*shape, geometric_mean(mean_s, sd_s), histogram, context),
            *(flags.teaches_latency, flags.teaches_acceptance, by_class, num_steps),
            draft_prompt_s=each.draft_prompt_s,
            num_new_rows=each.num_new_rows,
        )
    )
    accepted = sum(map(mul, histogram, range(len(histogram)))) // num_steps
    whose = origin.context_id, origin.worker_key, origin.epoch
    step = (*whose, seq, *shape, mean_s, str(list(histogram)), accepted, context, each.decision_version, 0)
    told = classes_text, num_steps, sd_s, None, each.draft_prompt_s, each.num_new_rows
    group.rows.append((*step, flags.names, origin.received_at, *told))


def _checked(each: pb.StepSum, limits: Limits, histogram: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of the steps' latencies. Raises InvalidMessageError."""
    try:
        check_sum(each, limits, histogram)
    except InvalidMessageError as error:
        raise InvalidMessageError(error.reason, f"sum of steps from {each.first_seq}: {error}") from None
    mean = each.latency_sum_s / each.num_steps
    return mean, math.sqrt(max(each.latency_square_sum_s2 / each.num_steps - mean * mean, 0.0))


def check_sum(each: pb.StepSum, limits: Limits, histogram: tuple[int, ...]) -> None:
    """Whether a sum is plausible. Raises InvalidMessageError."""
    num_steps, length, total_s = each.num_steps, each.speculation_length, each.latency_sum_s
    check_range("num_steps", num_steps, 2, MAX_STEPS)
    check_range("batch_size", each.batch_size, 1, limits.max_batch_size)
    check_range("speculation_length", length, 0, limits.max_speculation_length)
    check_range("latency_sum_s", total_s, num_steps * MIN_LATENCY_S, num_steps * MAX_LATENCY_S)
    # Of positive numbers: at least as if all were alike, at most as if one were everything.
    least, most = total_s * total_s / num_steps * (1.0 - ROUNDING), total_s * total_s * (1.0 + ROUNDING)
    check_range("latency_square_sum_s2", each.latency_square_sum_s2, least, most)
    check_range("mean_context_length", each.mean_context_length, 0, MAX_CONTEXT_LENGTH)
    check_range("draft_prompt_s", each.draft_prompt_s, 0, MAX_LATENCY_S)
    check_range("num_new_rows", each.num_new_rows, 0, num_steps * limits.max_batch_size)
    check_range("decision_version", each.decision_version, 0, MAX_INTEGER)
    if len(histogram) != length + 1 or sum(histogram) != each.batch_size * num_steps:
        sentence = f"accepted_histogram is {list(histogram)}; it must have {length + 1} entries that sum to "
        raise InvalidMessageError("accepted_histogram", f"{sentence}{each.batch_size * num_steps}")


def geometric_mean(mean: float, sd: float) -> float:
    """Of positive numbers that scatter log-normally, by their mean and standard deviation."""
    return mean / math.sqrt(1.0 + (sd / mean) ** 2)
