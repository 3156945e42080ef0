"""Step times if steps overlap, and the rules for usable samples.

vLLM launches step N + 1, then waits for the result of step N. Without a device clock, the time of step N is the interval
between the results of N - 1 and N. If the host is slower, that is the time of launching N + 1; if the device is slower, that
of computing N; in between, a part of each. It is usable if all these steps are similar and the queue never ran empty
(`overlap_flags`).

With a device clock, an event is recorded in the stream of the engine's thread whenever a step is scheduled, between the work
of the previous step and its own. The time of step N is the interval from its event to the next one, idle time included. The
intervals add up to the wall time, whatever the jitter of an event. The time is usable if step N - 1 was similar
(`device_flags`), and if the device neither catches up with a slower host nor falls behind it: then its intervals drift apart
from the host's (`drifts_apart`). Nothing waits for an event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from speclen.records import StepFlag

IN_PROCESS = "uni"  # vLLM's executor that runs the model in the engine's own thread
Event: TypeAlias = Any  # torch.cuda.Event(enable_timing=True); record, query and elapsed_time are used

NUM_BEFORE = 2  # steps before N whose lengths the time of N depends on
NEAR = 8  # batch sizes are similar if they differ by at most one in this many
# Intervals of host and device are compared over up to DRIFT_STEPS similar steps, as a share of a step. With these values the
# model of the queue in tests/unit/test_vllm_timing.py keeps mean times within 1%, and most samples, up to a jitter of 10%.
DRIFT_STEPS, MAX_DRIFT = 3, 0.12


@dataclass(slots=True)
class StepShape:
    """Properties of a step that its time depends on.

    verified, drafted: tokens per sequence. is_first: True for the first step of this batch size and these lengths.
    was_queued: True if the step was in flight when the previous result was read.
    """

    num_decoding: int
    verified: int
    drafted: int
    with_prefill: bool
    is_first: bool = False
    was_queued: bool = False


def overlap_flags(before: Sequence[StepShape], step: StepShape, following: StepShape | None) -> set[StepFlag]:
    """Reasons why the interval between a step's result and the previous one is not the step's time.

    before: steps N - 2 and N - 1, as far as they were in flight. following: step N + 1; None if it was not in flight when
    the result was read.
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
    """Reasons why the device's interval is not the step's time. Arguments: see `overlap_flags`."""
    if following is None or not before or not step.was_queued:
        return {StepFlag.OVERLAP}
    last, flags = before[-1], set()
    if last.with_prefill:
        flags.add(StepFlag.PREFILL)
    if (last.verified, last.drafted) != (step.verified, step.verified):
        flags.add(StepFlag.CHANGED_ARM)
    return flags


def drifts_apart(drifts: Sequence[float], device_s: float) -> bool:
    """True if the host's and the device's intervals, summed over the newest steps, differ by a large part of a step."""
    return abs(sum(drifts)) > MAX_DRIFT * device_s


class DeviceClock:
    """Records marks in the device's stream. event: creates one; a class or function without arguments."""

    def __init__(self, event: Callable[[], Event]) -> None:
        self._event = event

    def mark(self) -> Event:
        """Mark the point in the device's stream up to which work was launched."""
        event = self._event()
        event.record()
        return event

    @staticmethod
    def seconds(begin: Event, end: Event) -> float | None:
        """Time between two marks; None if the device has not reached the second one yet."""
        return 1e-3 * begin.elapsed_time(end) if end.query() else None


def device_clock(config: Any, platform: Any) -> DeviceClock | None:
    """Clock of this engine's device; None if the model does not run in this thread. config: VllmConfig."""
    overlapped = config.scheduler_config.async_scheduling
    if not (platform.is_cuda() and overlapped and config.parallel_config.distributed_executor_backend == IN_PROCESS):
        return None
    from torch import cuda  # imported here, since the plugin itself does not need torch

    return DeviceClock(partial(cuda.Event, enable_timing=True)) if cuda.is_initialized() else None
