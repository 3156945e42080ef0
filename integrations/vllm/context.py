"""Context of a vLLM engine and the lengths that it was configured with, read from its configuration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import version
from itertools import groupby
from typing import Any

from speclen.integrations.vllm.settings import VllmSettings
from speclen.integrations.vllm.steps import Traits
from speclen.integrations.vllm.v2_runner import is_registered
from speclen.records import MAX_BATCH_SIZE, MAX_SPECULATION_LENGTH, Arm, Choice, Limits
from speclen.v1 import control_pb2 as pb
from speclen.worker.config import parse_policy
from speclen.worker.models.devices import processor_name
from speclen.worker.models.naming import digest, model_label
from speclen.worker.reporting.table import ArmTable

NGRAM = ("ngram", "ngram_gpu")
# Methods that draft as many tokens as a step asks for. Others assert their one length (medusa, suffix, V1's ngram_gpu), or
# have none. V1's are the list of vLLM 0.33 (config/vllm.py); V2 cuts the drafts of all its methods to the length.
V1_METHODS = ("draft_model", "eagle", "eagle3", "mtp", "dflash", "ngram")
V2_METHODS = (*V1_METHODS, "ngram_gpu", "dspark")


def check_config(config: Any) -> None:
    """Raises ValueError for a configuration of vLLM whose lengths cannot be chosen. config: VllmConfig."""
    speculative = config.speculative_config
    if speculative is None:
        raise ValueError(
            "vLLM has no speculative config, so there are no lengths to choose: give --speculative-config with a method, "
            "num_speculative_tokens and num_speculative_tokens_per_batch_size"
        )
    check_method(config)
    check_parallel(config.parallel_config)
    if (longest := speculative.num_speculative_tokens) > MAX_SPECULATION_LENGTH:
        raise ValueError(f"num_speculative_tokens is {longest}, over speclen's {MAX_SPECULATION_LENGTH}: give less")
    if not speculative.num_speculative_tokens_per_batch_size:
        length, rows = speculative.num_speculative_tokens, config.scheduler_config.max_num_seqs
        raise ValueError(
            "num_speculative_tokens_per_batch_size is not given, or vLLM's log says that it is not used; without it vLLM "
            "keeps one length: add "
            f'"num_speculative_tokens_per_batch_size": [[1, {rows}, {length}]] to --speculative-config'
        )


def check_method(config: Any) -> None:
    """Raises ValueError for a method that cannot draft fewer tokens than its largest number."""
    is_v2, speculative = config.use_v2_model_runner, config.speculative_config
    methods = V2_METHODS if is_v2 else V1_METHODS
    if speculative.method not in methods:
        raise ValueError(
            f"the method {speculative.method!r} drafts one number of tokens under vLLM's model runner "
            f"{'V2' if is_v2 else 'V1'}, so there are no lengths to choose: use one of {', '.join(methods)}"
        )
    if getattr(speculative, "enable_adaptive_verification", False):
        raise ValueError(
            "enable_adaptive_verification has vLLM choose how many draft tokens it verifies: leave it out, or leave the "
            "choice to vLLM"
        )


def check_parallel(parallel: Any) -> None:
    """Raises ValueError for replicas that step together, or pipeline stages. Dense models' replicas see one replica each."""
    if (replicas := parallel.data_parallel_size) > 1:
        raise ValueError(
            f"data_parallel_size is {replicas} for a mixture of experts, whose replicas step together and have to draft "
            f"alike: start {replicas} servers of one replica each, which are one worker each"
        )
    if (stages := parallel.pipeline_parallel_size) > 1:
        raise ValueError(
            f"pipeline_parallel_size is {stages}, and steps of several micro-batches at once are not told apart: use "
            "tensor_parallel_size instead"
        )


def context_key(config: Any, settings: VllmSettings, platform: Any, vllm_version: str) -> pb.ContextKey:
    """The context whose step times this engine measures. platform: vllm.platforms.current_platform."""
    model, speculative = config.model_config, config.speculative_config
    return pb.ContextKey(
        target=model_label(settings.target or model.model, model.hf_config.to_dict()),
        draft=draft_label(speculative, settings.draft),
        device=device_label(platform, config.parallel_config.world_size),
        dtype=str(model.dtype).removeprefix("torch."),
        engine_fingerprint=fingerprint(config, vllm_version),
    )


def draft_label(speculative: Any, name: str) -> str:
    """Name of what drafts: a model, or the method and its settings."""
    if speculative.method in NGRAM:
        return name or f"{speculative.method} {speculative.prompt_lookup_min}-{speculative.prompt_lookup_max}"
    draft = speculative.draft_model_config
    if draft is None:
        return name or speculative.method
    return model_label(name or speculative.model or speculative.method, draft.hf_config.to_dict())


def device_label(platform: Any, world_size: int) -> str:
    """As our workers name it; several devices of one engine with their number."""
    if platform.is_cpu():
        return f"cpu:{processor_name()} x{os.cpu_count()}"
    several = f" x{world_size}" if world_size > 1 else ""
    return f"{platform.device_type}:{platform.get_device_name()}{several}"


def fingerprint(config: Any, vllm_version: str) -> str:
    """Engine, version and method in words, and a digest of whatever else of vLLM's settings changes step times."""
    parallel, compilation, cache = config.parallel_config, config.compilation_config, config.cache_config
    rest = (
        f"torch {version('torch')} eager {config.model_config.enforce_eager} "
        f"quantization {config.model_config.quantization} kv {cache.cache_dtype} "
        f"graphs {compilation.cudagraph_mode} compilation {compilation.mode} "
        f"async {config.scheduler_config.async_scheduling} threads {os.environ.get('OMP_NUM_THREADS')} "
        f"batched {config.scheduler_config.max_num_batched_tokens} v2 {config.use_v2_model_runner} "
        f"draft tp {config.speculative_config.draft_tensor_parallel_size}"
    )
    sizes = f"tp={parallel.tensor_parallel_size},pp={parallel.pipeline_parallel_size}"
    return f"vllm {vllm_version},{config.speculative_config.method},{sizes},{digest(rest)}"


def traits_of(config: Any) -> Traits:
    """Properties of the engine that its reports depend on."""
    is_v2, method = config.use_v2_model_runner, config.speculative_config.method
    return Traits(
        ragged=method in NGRAM,
        overlapped=config.scheduler_config.async_scheduling,
        late_drafts=is_v2,
        longest_context=None if is_v2 else longest_context(config),
    )


def longest_context(config: Any) -> int:
    """Tokens of the longest sequence for which V1 drafts; beyond it the drafts of the whole batch are zeros."""
    speculative = config.speculative_config
    draft = speculative.draft_model_config
    limit: int = (draft and draft.max_model_len) or config.model_config.max_model_len
    return limit - speculative.num_speculative_tokens - (speculative.method == "dflash")


def fast_lengths(config: Any, lookup: Sequence[int]) -> frozenset[int]:
    """Lengths that run in captured full graphs, where others do not: those of the configured table. Empty: all alike."""
    full_graphs = config.use_v2_model_runner and "FULL" in str(config.compilation_config.cudagraph_mode)
    if full_graphs and not is_registered():
        return frozenset(lookup[1:])
    return frozenset()


def limits_of(lookup: Sequence[int], max_length: int) -> Limits:
    """Batch sizes and lengths that vLLM was configured for. lookup[b]: its length at batch size b."""
    return Limits(min(len(lookup) - 1, MAX_BATCH_SIZE), max_length)


def configured_table(lookup: Sequence[int], policy: str, limits: Limits) -> ArmTable:
    """The lengths to use until a controller says others, by policy. Raises ValueError for a fixed length over the limit."""
    arm = parse_policy(policy)
    if arm is not None:
        if arm.speculation_length > limits.max_speculation_length:
            raise ValueError(
                f"--policy {policy} is over num_speculative_tokens, which is {limits.max_speculation_length}: raise that, "
                "or use less"
            )
        return ArmTable.constant(arm, limits, "policy")
    choices = []
    for value, sizes in groupby(range(1, limits.max_batch_size + 1), key=lambda size: lookup[size]):
        run = list(sizes)
        choices.append(Choice(run[0], run[-1], Arm(value)))
    return ArmTable.of(choices, limits, "configured")
