"""The time of a step where steps overlap, and the rules by which it is a usable sample.

vLLM launches step N + 1, then waits for the result of step N. Without the device's clock, the time of step N is that between
the results of N - 1 and N: that of launching N + 1 where the host is slower, that of computing N where the device is, and a
part of each in between. It is usable if all these steps are alike and the queue never ran empty: `overlap_flags`.

With the device's clock, an event is recorded in the stream of the engine's thread whenever a step is scheduled: after the
work of the step before it, and before its own. The time of step N is the interval from its event to the next one, idle time
included. The intervals of steps add up to the wall time, whatever jitter moves an event by. It is usable if N - 1 was alike
(`device_flags`), and unless the device is catching up with a slower host, or falling behind it: then its intervals and the
host's drift apart (`drifts_apart`). Nothing waits for an event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from speclen.records import StepFlag

IN_PROCESS = "uni"  # vLLM's executor that runs the model in the engine's own thread
Event: TypeAlias = Any  # torch.cuda.Event(enable_timing=True), of which record, query and elapsed_time are used

NUM_BEFORE = 2  # steps before N whose lengths the time of N depends on
NEAR = 8  # batch sizes are alike if they differ by at most one in this many
# Intervals of host and device are compared over up to DRIFT_STEPS alike steps, as a share of a step. With these values the
# model of the queue in tests/unit/test_vllm_timing.py keeps mean times within 1%, and most samples, up to a jitter of 10%.
DRIFT_STEPS, MAX_DRIFT = 3, 0.12


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
    """Reasons for which the time between the results of a step and of the one before it is not the step's time.

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
    """Reasons for which the device's interval is not the step's time. Arguments: see `overlap_flags`."""
    if following is None or not before or not step.was_queued:
        return {StepFlag.OVERLAP}
    last, flags = before[-1], set()
    if last.with_prefill:
        flags.add(StepFlag.PREFILL)
    if (last.verified, last.drafted) != (step.verified, step.verified):
        flags.add(StepFlag.CHANGED_ARM)
    return flags


def drifts_apart(drifts: Sequence[float], device_s: float) -> bool:
    """True if the host's intervals differ from the device's, summed over the newest steps, by a good part of a step."""
    return abs(sum(drifts)) > MAX_DRIFT * device_s


class DeviceClock:
    """Marks in the device's stream by `event`, a class or function without arguments."""

    def __init__(self, event: Callable[[], Event]) -> None:
        self._event = event

    def mark(self) -> Event:
        """The point in the device's stream up to which work was launched."""
        event = self._event()
        event.record()
        return event

    @staticmethod
    def seconds(begin: Event, end: Event) -> float | None:
        """Time between two marks; None if the device has not reached the second one yet."""
        return 1e-3 * begin.elapsed_time(end) if end.query() else None


def device_clock(config: Any, platform: Any) -> DeviceClock | None:
    """The clock of this engine's device; None where the model does not run in this thread. config: VllmConfig."""
    overlapped = config.scheduler_config.async_scheduling
    if not (platform.is_cuda() and overlapped and config.parallel_config.distributed_executor_backend == IN_PROCESS):
        return None
    from torch import cuda  # here, since the plugin itself needs none

    return DeviceClock(partial(cuda.Event, enable_timing=True)) if cuda.is_initialized() else None
