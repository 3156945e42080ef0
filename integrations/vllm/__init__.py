"""vLLM as a worker: a scheduler that takes its speculation lengths from a controller, and reports every step.

    vllm serve TARGET --speculative-config '{…}' --scheduler-cls speclen.integrations.vllm.Scheduler

Only `scheduler` imports vLLM; it is imported when vLLM asks for the class, so that everything else can be tested without.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "Scheduler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from speclen.integrations.vllm.scheduler import Scheduler

    return Scheduler
