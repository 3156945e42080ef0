"""A vLLM engine in this process that serves a bundled pair, with weights made in memory instead of read from disk."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speclen.worker.models.loading import load_pair, load_tokenizer, locate
from speclen.worker.models.widen import widened_config

ROWS, CONTEXT_TOKENS = 32, 1024


@dataclass(frozen=True, slots=True)
class Models:
    """A pair with its device and dtype. lengths: speculation lengths to compare."""

    target: str
    draft: str
    device: str
    dtype: str
    lengths: tuple[int, ...]


FULL = Models("bundled:target-6.7b", "bundled:draft-125m", "cuda", "bfloat16", (0, 1, 3, 5, 8))
DRY = Models("bundled:target", "bundled:draft", "cpu", "float32", (0, 1, 3, 5))


def set_environment(models: Models, runner: str, controller: str) -> None:
    """Set variables before vLLM is imported. controller: its address."""
    os.environ.update(
        VLLM_USE_V2_MODEL_RUNNER="1" if runner == "v2" else "0",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_USE_FLASHINFER_SAMPLER="0",  # vLLM 0.32 takes FlashInfer for granted on CUDA
        VLLM_USE_DEEP_GEMM="0",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        SPECLEN_CONTROLLER=controller,
        SPECLEN_WORKER_TARGET=models.target,
        SPECLEN_WORKER_DRAFT=models.draft,
    )
    if models.device == "cpu":
        os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")


def make_engine(
    models: Models,
    folder: Path,
    table: Sequence[Sequence[int]],
    speculative: dict[str, Any],
    plugin: bool = True,
    **changes: Any,
) -> Any:
    """A vllm.LLMEngine for the target, as a user starts it, with the arguments of `engine_arguments`."""
    from vllm import EngineArgs, LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(**engine_arguments(models, folder, table, speculative, plugin, **changes))
    )


def engine_arguments(
    models: Models,
    folder: Path,
    table: Sequence[Sequence[int]],
    speculative: dict[str, Any],
    plugin: bool = True,
    **changes: Any,
) -> dict[str, Any]:
    """Arguments of vLLM for the target, which it can load from now on.

    folder: for configurations and tokenizers, read from files. table: lengths by batch size. speculative, changes: further
    settings of vLLM. A method other than draft_model brings a draft of its own.
    """
    if plugin:
        from speclen.integrations.vllm import register

        register()  # vLLM calls it by the package's entry point, but only if speclen is installed
    register_loader(models)
    write_config(models.target, models.dtype, folder_of(folder, models.target))
    settings = {"method": "draft_model", "num_speculative_tokens_per_batch_size": table, **speculative}
    settings.setdefault("num_speculative_tokens", models.lengths[-1])
    if settings["method"] == "draft_model":
        write_config(models.draft, models.dtype, folder_of(folder, models.draft))
        settings["model"] = str(folder_of(folder, models.draft))
    arguments: dict[str, Any] = {
        "model": str(folder_of(folder, models.target)),
        "load_format": "speclen",
        "dtype": models.dtype,
        "seed": 0,
        "max_num_seqs": ROWS,
        "max_model_len": CONTEXT_TOKENS,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "generation_config": "vllm",
        "scheduler_cls": "speclen.integrations.vllm.Scheduler" if plugin else None,
        "speculative_config": settings,
        "enforce_eager": models.device == "cpu",
    }
    return arguments | changes


class Loop:
    """Requests on one engine, and the lengths that it drafts. engine: a vllm.LLMEngine in this process."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.core = engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.steering: Any = getattr(self.scheduler, "steering", None)
        self.configured = list(self.scheduler.dynamic_sd_lookup or ())
        self.names = itertools.count()
        self.length: int | None = None

    def use(self, length: int | None) -> None:
        """Draft this many tokens at every batch size; None: as the plugin chooses."""
        self.length = length
        if self.steering is not None:
            self.scheduler.steering = self.steering if length is None else None
        lookup = self.configured if length is None else [length] * len(self.configured)
        self.scheduler.dynamic_sd_lookup[:] = lookup

    def add(self, prompt: Sequence[int], num_tokens: int, **sampling: Any) -> str:
        """Submit a request; returns its name."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        settings = {"temperature": 0.0, "ignore_eos": True, "detokenize": False} | sampling
        name, kind = f"r{next(self.names)}", RequestOutputKind.DELTA
        params = SamplingParams(max_tokens=num_tokens, output_kind=kind, **settings)
        self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        return name

    def outputs(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, before: Callable[[int], None] = lambda step: None
    ) -> list[list[int]]:
        """Greedy outputs of requests that run together. before: called with each step's number."""
        found: dict[str, list[int]] = {self.add(prompt, num_tokens): [] for prompt in prompts}
        for step in itertools.count():
            if all(len(tokens) == num_tokens for tokens in found.values()):
                break
            before(step)
            for output in self.engine.step():
                found[output.request_id] += output.outputs[0].token_ids
        self.drain()
        return list(found.values())

    def drain(self) -> None:
        """Finish what is under way."""
        while self.engine.has_unfinished_requests() or self.core.batch_queue:
            self.engine.step()


def folder_of(folder: Path, name: str) -> Path:
    return folder / name.removeprefix("bundled:")


def write_config(name: str, dtype: str, folder: Path) -> None:
    source = locate(name)
    config = source.config if source.shape is None else widened_config(source.config, source.shape)
    config.architectures, config.dtype = ["LlamaForCausalLM"], dtype
    config.save_pretrained(folder)
    load_tokenizer(name).save_pretrained(folder)


def register_loader(models: Models) -> None:
    """Make the load format "speclen": a bundled model by the name of its folder, widened in the device's memory."""
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader("speclen")
    class Widened(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            """There is nothing to download."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            name = f"bundled:{Path(model_config.model).name}"
            pair = load_pair(name, None, models.device, models.dtype)
            model.load_weights((key, value.detach()) for key, value in pair.target.named_parameters())
            del pair
            if models.device == "cuda":
                torch.cuda.empty_cache()
