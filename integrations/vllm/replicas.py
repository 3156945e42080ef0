"""Lengths for several replicas of a dense model, for which vLLM switches its table off.

vLLM fears that replicas which draft different numbers of tokens wait for each other for ever. That is so for a mixture of
experts, whose replicas step together. Those of a dense model are engines without any word between them: each has a
scheduler of its own, and is one worker of the controller.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

SWITCH = "_maybe_disable_dynamic_sd_for_data_parallel"  # of VllmConfig
INDEPENDENT = "reconfigure_for_independent_dp_rank"  # of ParallelConfig; without it they step together, too


def keep_table() -> None:
    """Let vLLM switch its table off for mixtures of experts alone. A version that lacks something stays as it is."""
    found = import_module("vllm.config")
    switch_off = getattr(found.VllmConfig, SWITCH, None)
    if switch_off is None or switch_off.__module__ == __name__ or not hasattr(found.ParallelConfig, INDEPENDENT):
        return

    def switch_off_for_experts(self: Any) -> None:
        if self.model_config is None or self.model_config.is_moe:
            switch_off(self)

    setattr(found.VllmConfig, SWITCH, switch_off_for_experts)


def worker_name(name: str, parallel: Any) -> str:
    """The name that a user gave to the worker, different for every replica. parallel: ParallelConfig."""
    replica = parallel.data_parallel_index
    return f"{name}-{replica}" if replica else name
