"""Times of steps by the device's own clock, where the model runs in the process of vLLM's scheduler.

An event is recorded in the stream of the engine's thread whenever a step is scheduled: behind the work of the step before
it, and before its own. The device's time for a step is the interval from its event to that of the next one, idle time
included. Nothing waits for an event.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

IN_PROCESS = "uni"  # vLLM's executor that runs the model in the engine's own thread
Event: TypeAlias = Any  # torch.cuda.Event(enable_timing=True), of which record, query and elapsed_time are used


class DeviceClock:
    """Events by `event`, a class or function without arguments."""

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
