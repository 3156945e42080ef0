"""vLLM's schedulers with lengths from a controller. The only module that imports vLLM."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import structlog
import vllm
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler

from speclen.integrations.vllm.logs import set_up_logs
from speclen.integrations.vllm.steering import Steering
from speclen.integrations.vllm.versions import TRIED, check_parts, was_tried
from speclen.integrations.vllm.wiring import steering_for

log = structlog.get_logger()


class Steered:
    """The hooks into vLLM's scheduler. Whatever fails in them ends them, and vLLM serves on with its own lengths."""

    steering: Steering | None = None
    _started = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        set_up_logs()
        worker_id = f"vllm:{socket.gethostname()}:{os.getpid()}"
        self._attempt("to join a controller", lambda: self._join(worker_id))

    def _join(self, worker_id: str) -> None:
        try:
            check_parts(vllm.__version__, self._names())
            self.steering = steering_for(self, os.environ, current_platform, vllm.__version__, worker_id)
        except (ValueError, ImportError, AttributeError) as error:
            log.warning(f"speclen is off, vLLM serves on with its own lengths: {error}")
            return
        if not was_tried(vllm.__version__):
            log.warning(
                f"vLLM {vllm.__version__} was not tried with speclen: it has what speclen needs, but steps may mean "
                f"something else there; tried: {', '.join(TRIED)}"
            )

    def _names(self) -> dict[str, set[str]]:
        """Attributes of the classes that are used. Imports here, where a failure does not end vLLM."""
        from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request

        fields = {each.__name__: set(each.__dataclass_fields__) for each in (SchedulerOutput, CachedRequestData)}
        fields["ModelRunnerOutput"] = set(ModelRunnerOutput.__dataclass_fields__)
        return fields | {"Request": set(dir(Request)), "Scheduler": set(dir(VllmScheduler)) | set(vars(self))}

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._started = time.perf_counter()
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """Called by `schedule` when a step is put together, and before its tokens count as computed."""
        if (steering := self.steering) is not None:
            requests = self.requests  # type: ignore[attr-defined]
            # While all slots are taken, those that wait do not keep probes waiting: prefill may never end.
            is_free = len(self.running) < self.max_num_running_reqs  # type: ignore[attr-defined]
            waiting = is_free and bool(self.waiting)  # type: ignore[attr-defined]
            self._attempt(
                "to choose a length",
                lambda: steering.scheduled(scheduler_output, requests, waiting, self._started),
            )
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        ended = time.perf_counter()
        if (steering := self.steering) is not None:
            requests = self.requests  # type: ignore[attr-defined]
            self._attempt("to time a step", lambda: steering.arrived(scheduler_output, requests, ended))
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if (reporting := self.steering) is not None:
            busy = bool(self.running)  # type: ignore[attr-defined]
            self._attempt("to report a step", lambda: reporting.finished(model_runner_output, busy))
        return outputs

    def shutdown(self) -> None:
        if (steering := self.steering) is not None:
            self._attempt("to end", steering.stop)
        super().shutdown()  # type: ignore[misc]

    def _attempt(self, what: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:
            if (steering := self.steering) is not None:
                steering.abandon()
            self.steering = None
            log.exception(f"speclen is off, vLLM serves on with its own lengths: it failed {what}")


class SyncScheduler(Steered, VllmScheduler):
    """A step is scheduled when the one before has ended: what vLLM does on CPUs, and with n-grams."""


class Scheduler(Steered, AsyncScheduler):
    """The class to name to vLLM. Where its configuration wants the scheduler that does not overlap, it makes that."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        if config.scheduler_config.async_scheduling:
            return super().__new__(cls)
        return SyncScheduler(*args, **kwargs)
