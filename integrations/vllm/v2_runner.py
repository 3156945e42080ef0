"""Changes to vLLM's V2 model runner, which does not follow every choice of lengths by itself.

A draft model drafts the largest length at every step there, whatever is chosen, and full graphs are captured for the
lengths of the configured table alone. `register` is vLLM's entry point: it is called in the engine's process and in every
worker's, perhaps more than once, which changes nothing.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import structlog

from speclen.integrations.vllm.logs import set_up_logs
from speclen.integrations.vllm.replicas import keep_table
from speclen.integrations.vllm.settings import CONTROLLER, WORKER

log = structlog.get_logger()

RUNNER = "vllm.v1.worker.gpu"
DRAFTING = f"{RUNNER}.spec_decode.standalone_ar.speculator"
# They capture graphs for every length in what this builds of the configured table.
CAPTURING = (f"{RUNNER}.cudagraph_utils", f"{RUNNER}.spec_decode.target_dependent_ar.cudagraph_utils")
LOOKUP = "build_dynamic_sd_schedule_lookup"
ONE_PASS = ("draft_model", "eagle", "eagle3", "mtp")  # methods that follow lengths there, but for length 0
Propose = Callable[..., Any]
Lookup = Callable[..., list[int]]


def register() -> None:
    """Change vLLM where a controller is configured. A version that lacks something stays as it is."""
    if is_registered() or not (os.environ.get(CONTROLLER) or os.environ.get(f"{WORKER}CONTROLLER")):
        return
    set_up_logs()
    try:
        keep_table()
        speculator = import_module(DRAFTING).StandaloneARSpeculator
        if "num_speculative_tokens" not in inspect.signature(speculator.propose).parameters:
            raise AttributeError("its draft models are not told a length")
        modules = [import_module(name) for name in CAPTURING]
        lookups = [with_all_lengths(getattr(module, LOOKUP)) for module in modules]
    except Exception as error:  # whatever it is, vLLM would end: it calls this without a net
        log.warning(
            f"vLLM's V2 model runner stays as it is, and may draft more than the chosen length: {error}; "
            "VLLM_USE_V2_MODEL_RUNNER=0 selects V1, which follows it"
        )
        return
    speculator.propose = following(speculator.propose)
    for module, lookup in zip(modules, lookups, strict=True):
        setattr(module, LOOKUP, lookup)


def following(propose: Propose) -> Propose:
    """A `propose` that ends after as many tokens as it is asked for, and after one at least: the draft's keys and values
    need that pass. Its result is as wide as the largest length, which vLLM's runner counts on.
    """

    def propose_chosen(self: Any, *args: Any, **kwargs: Any) -> Any:
        chosen, largest = kwargs.get("num_speculative_tokens"), self.num_speculative_steps
        if chosen is None:
            return propose(self, *args, **kwargs)
        self.num_speculative_steps = max(1, min(chosen, largest))
        try:
            drafts = propose(self, *args, **kwargs)
        finally:
            self.num_speculative_steps = largest
        return self.draft_tokens[: drafts.shape[0]]

    return propose_chosen


def with_all_lengths(build: Lookup) -> Lookup:
    """The lengths by batch size, and behind them every length up to the largest: for who asks which lengths there are."""

    def build_all(table: Any, vllm_max_batch_size: int, vllm_num_speculative_tokens: int) -> list[int]:
        listed = build(table, vllm_max_batch_size, vllm_num_speculative_tokens)
        return [*listed, *range(vllm_num_speculative_tokens + 1)]

    return build_all


def remark(config: Any) -> str:
    """A limit of this engine at chosen lengths, in a sentence; "" for none. config: VllmConfig."""
    method, runner = config.speculative_config.method, "vLLM's V2 model runner"
    if not config.use_v2_model_runner:
        piecewise = "PIECEWISE" in str(config.compilation_config.cudagraph_mode)
        return f"vLLM's V1 model runner has no full graphs where lengths change, {runner} has" if piecewise else ""
    if method == "draft_model" and not is_registered():
        return f"{runner} drafts the largest length at every step: install speclen here, and name it in VLLM_PLUGINS if set"
    if method in ONE_PASS:
        return f"length 0 costs one pass of the draft on {runner} with the method {method}"
    return f"{runner} drafts the largest length with the method {method}: choices only shorten verification"


def is_registered() -> bool:
    """True if draft models follow the chosen length in this process."""
    speculator = getattr(sys.modules.get(DRAFTING), "StandaloneARSpeculator", None)
    return getattr(getattr(speculator, "propose", None), "__module__", None) == __name__
