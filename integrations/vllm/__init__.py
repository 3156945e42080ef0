"""vLLM as a worker: a scheduler that takes its speculation lengths from a controller, and reports every step.

    vllm serve TARGET --speculative-config '{…}' --scheduler-cls speclen.integrations.vllm.Scheduler

This module imports nothing else of speclen, since vLLM loads it in each of its processes wherever speclen is installed.
Only `scheduler` imports vLLM, when vLLM asks for the class, so all other modules can be tested without vLLM.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

ARGUMENTS = "vllm.engine.arg_utils"  # vLLM has imported it by the time it reads its configuration


def register() -> None:
    """vLLM's entry point: prepare configurations that name our scheduler, and do not change others."""
    arguments = getattr(sys.modules.get(ARGUMENTS), "EngineArgs", None)
    create = getattr(arguments, "create_engine_config", None)
    if arguments is None or create is None or create.__module__ == __name__:
        return

    @wraps(create, assigned=("__name__", "__qualname__", "__doc__"))
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(getattr(self, "scheduler_cls", None)):
            return create(self, *args, **kwargs)
        from speclen.integrations.vllm.startup import create_prepared

        return create_prepared(lambda arguments: create(arguments, *args, **kwargs), self)

    arguments.create_engine_config = create_engine_config


def is_ours(scheduler: Any) -> bool:
    """True for the scheduler of this package, by its class or the class's name."""
    name = scheduler if isinstance(scheduler, str) else getattr(scheduler, "__module__", "")
    return name.startswith(__name__)


def __getattr__(name: str) -> Any:
    if name == "Scheduler":
        from speclen.integrations.vllm.scheduler import Scheduler

        return Scheduler
    if name == "DraftsChosenLength":
        from speclen.integrations.vllm.startup import DraftsChosenLength, follow_lengths

        follow_lengths()
        return DraftsChosenLength
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
