"""The vLLM engine that the plugin runs in: requirements, refused configurations, context, and configured lengths."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from importlib.metadata import version
from itertools import groupby
from typing import Any

from speclen.integrations.vllm.settings import VllmSettings
from speclen.integrations.vllm.steps import Traits
from speclen.records import MAX_BATCH_SIZE, MAX_SPECULATION_LENGTH, Arm, Choice, Limits
from speclen.v1 import control_pb2 as pb
from speclen.worker.arms import ArmTable
from speclen.worker.config import parse_policy
from speclen.worker.models.machine import processor_name
from speclen.worker.models.naming import digest, model_label

LEAST = (0, 32)  # earlier V2 runners ignore chosen lengths, and hybrid models give wrong outputs where lengths change
TRIED = ("0.32", "0.33")  # see docs/guides/vllm.md

# Attributes of vLLM that the hooks use at every step. Its scheduler is not a public interface, so new versions are checked.
NEEDED = {
    "Scheduler": "schedule _update_after_schedule update_from_output shutdown vllm_config requests running waiting "
    "max_num_running_reqs num_spec_tokens dynamic_sd_lookup connector ec_connector _build_kv_connector_meta",
    "SchedulerOutput": "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens scheduled_spec_decode_tokens "
    "num_spec_tokens_to_schedule num_invalid_spec_tokens",
    "NewRequestData": "req_id",
    "CachedRequestData": "resumed_req_ids num_computed_tokens",
    "ModelRunnerOutput": "sampled_token_ids req_id_to_index",
    "Request": "num_tokens num_computed_tokens num_output_placeholders is_finished",
}

NGRAM = ("ngram", "ngram_gpu")
# Methods that draft as many tokens as a step asks for. Others assert one fixed length (medusa, suffix, V1's ngram_gpu), or
# have none. V1's are the list of vLLM 0.33 (config/vllm.py); V2 cuts the drafts of all its methods to the length.
V1_METHODS = ("draft_model", "eagle", "eagle3", "mtp", "dflash", "ngram")
V2_METHODS = (*V1_METHODS, "ngram_gpu", "dspark")
ONE_PASS = ("draft_model", "eagle", "eagle3", "mtp")  # methods that follow lengths on V2, except length 0


def names_of(kind: type) -> set[str]:
    """Attribute names of a class's objects: the class's own, dataclass fields, and names that `__init__` uses."""
    code = getattr(vars(kind).get("__init__"), "__code__", None)
    return {*dir(kind), *getattr(kind, "__dataclass_fields__", ()), *(code.co_names if code else ())}


def check_parts(vllm_version: str, names: Mapping[str, Iterable[str]]) -> None:
    """Raises ValueError if vLLM is too old or lacks something. names: of the classes in NEEDED."""
    numbers = tuple(int(part) for part in vllm_version.split(".")[:2] if part.isdecimal())
    if len(numbers) == len(LEAST) and (0, 0) < numbers < LEAST:  # a build of a checkout calls itself 0.0 or "dev"
        raise ValueError(f"vLLM is {vllm_version}: upgrade it to {TRIED[-1]}, or at least to {TRIED[0]}")
    found = {part: set(names[part]) for part in NEEDED}
    missing = [
        f"{part}.{name}" for part, wanted in NEEDED.items() for name in wanted.split() if name not in found[part]
    ]
    if missing:
        raise ValueError(f"vLLM {vllm_version} has no {', '.join(missing)}: install one of {', '.join(TRIED)}")


def check_config(config: Any, is_whole: bool = False) -> None:
    """Raise ValueError if lengths cannot be chosen in this configuration of vLLM.

    config: VllmConfig. is_whole: True before vLLM has split it into one for each replica.
    """
    if config.speculative_config is None:
        raise ValueError(
            "vLLM has no speculative config, so there are no lengths to choose: give --speculative-config with a method "
            "and num_speculative_tokens"
        )
    for is_wrong, sentence in refusals(config, is_whole):
        if is_wrong:
            raise ValueError(sentence)


def refusals(config: Any, is_whole: bool) -> Iterator[tuple[bool, str]]:
    """Conditions under which lengths cannot be chosen, each with the sentence of its error."""
    speculative, parallel, is_v2 = config.speculative_config, config.parallel_config, config.use_v2_model_runner
    method, runner = speculative.method, "V2" if is_v2 else "V1"
    methods = V2_METHODS if is_v2 else V1_METHODS
    yield (
        method not in methods,
        f"the method {method!r} drafts one number of tokens under vLLM's model runner {runner}, so there are no lengths to "
        f"choose: use one of {', '.join(methods)}",
    )
    yield (
        speculative.parallel_drafting and not is_v2 and method != "dflash",  # whose query has the requested width
        f"parallel_drafting is true (PARD, P-EAGLE), where vLLM's model runner V1 fails with {method} at any length but the "
        "largest: use a draft without it, or leave out --scheduler-cls",
    )
    yield (
        speculative.enable_adaptive_verification,
        "enable_adaptive_verification is true, where the device trims drafts and vLLM's scheduler never gets the number that"
        " was verified, so a rejected token looks like one that was left out: leave it out, or leave out --scheduler-cls",
    )
    longest = speculative.num_speculative_tokens
    yield (
        longest > MAX_SPECULATION_LENGTH,
        f"num_speculative_tokens is {longest}, over speclen's {MAX_SPECULATION_LENGTH}: give less",
    )
    replicas, stages = parallel.data_parallel_size, parallel.pipeline_parallel_size
    ranks = parallel.world_size * replicas
    yield (
        parallel.distributed_executor_backend == "external_launcher" and ranks > 1,
        f"distributed_executor_backend is external_launcher with {ranks} ranks, each with a scheduler of its own that has to"
        " choose like the others: use mp, or leave out --scheduler-cls",
    )
    yield (
        replicas > 1 and not (is_whole and are_independent(config)),
        f"data_parallel_size is {replicas} for replicas that step together and have to draft alike: start {replicas} servers"
        " of one replica each, which are one worker each",
    )
    yield (
        stages > 1,
        f"pipeline_parallel_size is {stages}, and steps of several micro-batches cannot be distinguished: use "
        "tensor_parallel_size instead",
    )


def are_independent(config: Any) -> bool:
    """True for replicas of a dense model: vLLM will run each as an engine of its own, in its own process."""
    parallel = config.parallel_config
    return not config.model_config.is_moe and hasattr(parallel, "reconfigure_for_independent_dp_rank")


def is_recurrent(config: Any) -> bool:
    """True for models with a recurrent state (Mamba, GDN, KDA), which steps without drafts may leave out of date.

    vLLM 0.32 fixed this for GDN; it is not known for the others. Some builders capture graphs for the largest length only.
    """
    return bool(config.model_config.is_hybrid or config.model_config.has_inner_state)


def has_full_graphs(config: Any) -> bool:
    """True if each length has its own CUDA graphs, which only V2 captures."""
    return bool(config.use_v2_model_runner and "FULL" in str(config.compilation_config.cudagraph_mode))


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
    """Name of the drafter: a model, or the method with its settings."""
    if speculative.method in NGRAM:
        return name or f"{speculative.method} {speculative.prompt_lookup_min}-{speculative.prompt_lookup_max}"
    draft = speculative.draft_model_config
    if draft is None:
        return name or speculative.method
    return model_label(name or speculative.model or speculative.method, draft.hf_config.to_dict())


def device_label(platform: Any, world_size: int) -> str:
    """Device name as in our workers, with a count if the engine uses several."""
    if platform.is_cpu():
        return f"cpu:{processor_name()} x{os.cpu_count()}"
    several = f" x{world_size}" if world_size > 1 else ""
    return f"{platform.device_type}:{platform.get_device_name()}{several}"


def fingerprint(config: Any, vllm_version: str) -> str:
    """Name of engine, version and method, and a digest of all other vLLM settings that change step times."""
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


def traits_of(config: Any, keeps_ended: bool = False) -> Traits:
    """Properties of the engine that its reports depend on. keeps_ended: see Traits."""
    is_v2, method = config.use_v2_model_runner, config.speculative_config.method
    return Traits(
        ragged=method in NGRAM,
        overlapped=config.scheduler_config.async_scheduling,
        late_drafts=is_v2,
        keeps_ended=keeps_ended,
        longest_context=None if is_v2 else longest_context(config),
    )


def longest_context(config: Any) -> int:
    """Longest sequence, in tokens, for which V1 drafts. With a longer one the drafts of the whole batch are zeros."""
    speculative = config.speculative_config
    draft = speculative.draft_model_config
    limit: int = (draft and draft.max_model_len) or config.model_config.max_model_len
    return limit - speculative.num_speculative_tokens - (speculative.method == "dflash")


def choice_limits(config: Any, captured: Set[int]) -> dict[str, Any]:
    """Arguments of CautiousLengths besides the configured table. captured: lengths that vLLM's table names."""
    found: dict[str, Any] = {"least": 1 if is_recurrent(config) else 0}
    if has_full_graphs(config):
        found |= {"captured": captured, "max_captured": config.compilation_config.max_cudagraph_capture_size}
    return found


def remarks(config: Any, captured: Set[int], lookup: Sequence[int], follows: bool) -> Iterator[str]:
    """Sentences about limits and costs of this engine with chosen lengths.

    captured: lengths in vLLM's table. lookup: the user's lengths. follows: V2's draft model drafts the chosen length.
    """
    method, runner = config.speculative_config.method, "vLLM's V2 model runner"
    if not config.use_v2_model_runner:
        if "PIECEWISE" in str(config.compilation_config.cudagraph_mode):
            yield f"vLLM's V1 model runner has no full graphs where lengths change, {runner} has"
    elif method not in ONE_PASS or (method == "draft_model" and not follows):
        yield f"{runner} drafts the largest length with the method {method} here: choices only shorten verification"
    else:
        yield f"length 0 costs one pass of the draft on {runner} with the method {method}"
    if has_full_graphs(config):
        shapes, lengths = graph_shapes(config, captured), ", ".join(map(str, sorted(captured)))
        further = sum(length not in lookup[1:] for _, length in shapes)
        yield (
            f"vLLM captures {len(shapes)} full graphs for decoding at lengths {lengths}, which alone may be chosen; "
            f"{further} graphs are for lengths outside the configured table; its line 'Graph capturing finished' has time "
            "and memory"
        )


def graph_shapes(config: Any, lengths: Iterable[int]) -> set[tuple[int, int]]:
    """Tokens and length of each full graph of a decoding step, as vLLM captures them. config: VllmConfig, complete."""
    compilation, rows = config.compilation_config, config.scheduler_config.max_num_seqs
    most = min(rows * (1 + config.speculative_config.num_speculative_tokens), compilation.max_cudagraph_capture_size)
    rounded = ((-(-size // (k + 1)) * (k + 1), k) for k in lengths for size in compilation.cudagraph_capture_sizes)
    return {(tokens, k) for tokens, k in rounded if tokens <= most and tokens // (k + 1) <= rows}


def ranges_of(lookup: Sequence[int], make: Callable[[int, int, int], Any]) -> list[Any]:
    """Ranges of batch sizes with equal length, made by `make(first, last, length)`. lookup[b]: length at batch size b."""
    runs = (list(run) for _, run in groupby(range(1, len(lookup)), key=lookup.__getitem__))
    return [make(run[0], run[-1], lookup[run[0]]) for run in runs]


def limits_of(lookup: Sequence[int], max_length: int) -> Limits:
    """Batch sizes and lengths that vLLM was configured for. lookup[b]: its length at batch size b."""
    return Limits(min(len(lookup) - 1, MAX_BATCH_SIZE), max_length)


def configured_table(lookup: Sequence[int], policy: str, limits: Limits) -> ArmTable:
    """Lengths to use until a controller sends others, by policy. Raises ValueError if a fixed length exceeds the limit."""
    arm = parse_policy(policy)
    if arm is None:
        choices = ranges_of(lookup[: limits.max_batch_size + 1], lambda low, high, k: Choice(low, high, Arm(k)))
        return ArmTable.of(choices, limits, "configured")
    if arm.speculation_length > limits.max_speculation_length:
        raise ValueError(
            f"--policy {policy} is over num_speculative_tokens, which is {limits.max_speculation_length}: raise that, "
            "or use less"
        )
    return ArmTable.constant(arm, limits, "policy")
