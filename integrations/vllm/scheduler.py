"""vLLM's schedulers with lengths from a controller. The only module that imports vLLM."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from itertools import chain, count
from typing import Any

import structlog
import vllm
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler

from speclen.integrations.vllm.engine import check_parts, names_of
from speclen.integrations.vllm.settings import set_up_logs
from speclen.integrations.vllm.startup import users_lookup
from speclen.integrations.vllm.steering import Steering, steering_for

log = structlog.get_logger()

OFF = "speclen is off, vLLM serves on with its own lengths"
_names: set[str] = set()  # workers of this process; its engines share the user's settings


class Steered:
    """Hooks into vLLM's scheduler. If one fails, all are turned off, and vLLM continues with its own lengths."""

    steering: Steering | None = None
    _started = 0.0
    _chosen: Any = None  # the output of the newest step whose length is set
    _name = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        set_up_logs()
        self._attempt("to join a controller", self._join)

    def _join(self) -> None:
        config, lookup = self.vllm_config, self.dynamic_sd_lookup  # type: ignore[attr-defined, has-type]
        captured = frozenset(lookup[1:] if lookup else ())
        if lookup is not None and (users := users_lookup(config)):
            # Replicas in this process run steps together, and vLLM drops the table.
            self.dynamic_sd_lookup = users if config.parallel_config.data_parallel_size == 1 else None
        try:
            check_parts(vllm.__version__, self._names_of_parts())
            here = os.environ, current_platform, vllm.__version__
            self.steering = steering_for(self, *here, self._take_name, captured)
        except (ValueError, ImportError, AttributeError) as error:
            log.warning(f"{OFF}: {error}")

    def _names_of_parts(self) -> dict[str, set[str]]:
        """Attribute names of the classes in use. They are imported here, where a failure does not end vLLM."""
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request

        parts = (SchedulerOutput, NewRequestData, CachedRequestData, ModelRunnerOutput, Request)
        return {part.__name__: names_of(part) for part in parts} | {"Scheduler": {*dir(VllmScheduler), *vars(self)}}

    def _take_name(self, given: str) -> str:
        """A unique worker id: containers may share host name and process ids."""
        replica = self.vllm_config.parallel_config.data_parallel_index  # type: ignore[attr-defined]
        name = given or f"vllm:{socket.gethostname()}:{uuid.uuid4().hex[:12]}"
        name = f"{name}-{replica}" if replica else name
        later = (f"{name}.{number}" for number in count(2))
        self._name = next(each for each in chain([name], later) if each not in _names)
        _names.add(self._name)
        return self._name

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._started = time.perf_counter()
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _build_kv_connector_meta(self, connector: Any, scheduler_output: Any) -> Any:
        """Called by `schedule` before connectors see the step."""
        self._choose(scheduler_output)
        return super()._build_kv_connector_meta(connector, scheduler_output)  # type: ignore[misc]

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """Called by `schedule` after a step was assembled, before its tokens count as computed."""
        self._choose(scheduler_output)
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]

    def _choose(self, scheduler_output: Any) -> None:
        if (steering := self.steering) is None or self._chosen is scheduler_output:
            return
        self._chosen = scheduler_output
        requests = self.requests  # type: ignore[attr-defined]
        # While all slots are taken, waiting requests do not delay probes, since prefill may never end.
        is_free = len(self.running) < self.max_num_running_reqs  # type: ignore[attr-defined]
        waiting = is_free and bool(self.waiting)  # type: ignore[attr-defined]
        self._attempt(
            "to choose a length", lambda: steering.scheduled(scheduler_output, requests, waiting, self._started)
        )

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
        _names.discard(self._name)
        super().shutdown()  # type: ignore[misc]

    def _attempt(self, what: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:
            if (steering := self.steering) is not None:
                steering.abandon()
            self.steering = None
            log.exception(f"{OFF}: it failed {what}")


class SyncScheduler(Steered, VllmScheduler):
    """Schedules a step after the previous one has ended, as vLLM does on CPUs and with n-grams."""


class Scheduler(Steered, AsyncScheduler):
    """The class to name in vLLM's flags. Creates a SyncScheduler if the configuration requires steps that do not overlap."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        if config.scheduler_config.async_scheduling:
            return super().__new__(cls)
        return SyncScheduler(*args, **kwargs)
