"""The rules by which the time of a step is a usable sample where steps overlap.

vLLM launches step N + 1, then waits for the result of step N. The time between the results of N - 1 and N is that of
launching N + 1 where the host is slower, that of computing N where the device is, and a part of each in between. It is
a step's time if all these steps are alike and the queue never ran empty: `overlap_flags`.

With the device's clock the time of step N is the longer of two: the device's, and the time between scheduling N and N + 1.
A device that catches up with the host shows the first too short, one that falls behind the second. It is a step's time if
N - 1 was alike: `device_flags`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from speclen.records import StepFlag

NUM_BEFORE = 2  # steps before N whose lengths the time of N depends on
NEAR = 8  # batch sizes are alike if they differ by at most one in so many


@dataclass(slots=True)
class StepShape:
    """Properties of a step that its time depends on.

    verified, drafted: tokens per sequence. is_first: True for the first step of this batch size and these lengths.
    was_queued: True if the step was in flight when the result of the one before it was taken.
    """

    num_decoding: int
    verified: int
    drafted: int
    with_prefill: bool
    is_first: bool = False
    was_queued: bool = False


def overlap_flags(before: Sequence[StepShape], step: StepShape, following: StepShape | None) -> set[StepFlag]:
    """Reasons for which the time between the results of a step and of the one before it is no step's time.

    before: steps N - 2 and N - 1, fewer where none were in flight. following: step N + 1, None if it was not in flight
    when the result was taken.
    """
    if following is None or len(before) < NUM_BEFORE or not step.was_queued:
        return {StepFlag.OVERLAP}
    flags = set()
    if following.with_prefill:
        flags.add(StepFlag.PREFILL)
    if following.is_first:
        flags.add(StepFlag.FIRST_USE)
    if {(each.verified, each.drafted) for each in (*before, following)} != {(step.verified, step.verified)}:
        flags.add(StepFlag.CHANGED_ARM)
    sizes = before[-1].num_decoding, step.num_decoding, following.num_decoding
    if max(sizes) - min(sizes) > max(1, step.num_decoding // NEAR):
        flags.add(StepFlag.OVERLAP)
    return flags


def device_flags(before: Sequence[StepShape], step: StepShape, following: StepShape | None) -> set[StepFlag]:
    """Reasons for which the longer of the host's and the device's time is no step's time. Arguments: see `overlap_flags`."""
    if following is None or not before or not step.was_queued:
        return {StepFlag.OVERLAP}
    last, flags = before[-1], set()
    if last.with_prefill:
        flags.add(StepFlag.PREFILL)
    if (last.verified, last.drafted) != (step.verified, step.verified):
        flags.add(StepFlag.CHANGED_ARM)
    return flags
