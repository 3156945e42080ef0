"""An engine of vLLM in this process, with a bundled pair as its models. Nothing of the weights passes through a disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speclen.worker.models.loading import load_pair, load_tokenizer
from speclen.worker.models.source import locate
from speclen.worker.models.widen import widened_config

ROWS, CONTEXT_TOKENS = 32, 1024
GRAPH_ROWS = (1, 4, 16, 32)  # of the steps that graphs are captured for; more take longer than they save here


@dataclass(frozen=True, slots=True)
class Models:
    """The pair, and where and how it is computed. block_s: of a measured closed loop, which has to end some requests."""

    target: str
    draft: str
    device: str
    dtype: str
    lengths: tuple[int, ...]
    block_s: float


FULL = Models("bundled:target-6.7b", "bundled:draft-125m", "cuda", "bfloat16", (0, 1, 3, 5, 8), 1.2)
DRY = Models("bundled:target", "bundled:draft", "cpu", "float32", (0, 1, 3, 5), 4.0)


def set_environment(models: Models, runner: str, controller: str) -> None:
    """To be called before vLLM is imported. controller: its address."""
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


def make_engine(models: Models, folder: Path) -> Any:
    """A vllm.LLMEngine. folder: for configurations and tokenizers, which vLLM reads from files."""
    from vllm import EngineArgs, LLMEngine

    from speclen.integrations.vllm import register

    register()  # the package's entry point, which is not found where the package is not installed
    register_loader(models)
    for name in (models.target, models.draft):
        write_config(name, models.dtype, folder_of(folder, name))
    arguments = EngineArgs(
        model=str(folder_of(folder, models.target)),
        load_format="speclen",
        dtype=models.dtype,
        seed=0,
        max_num_seqs=ROWS,
        max_model_len=CONTEXT_TOKENS,
        max_num_batched_tokens=2560,
        enable_prefix_caching=False,
        disable_log_stats=True,
        generation_config="vllm",
        scheduler_cls="speclen.integrations.vllm.Scheduler",
        speculative_config={
            "method": "draft_model",
            "model": str(folder_of(folder, models.draft)),
            "num_speculative_tokens": models.lengths[-1],
            "num_speculative_tokens_per_batch_size": table_of(models.lengths),
        },
        **(of_a_gpu(models.lengths[-1]) if models.device == "cuda" else {"enforce_eager": True}),
    )
    return LLMEngine.from_engine_args(arguments)


def table_of(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Length 5, then 3. The others stand at sizes just below the largest, so that V2 captures graphs for all of them."""
    others = [length for length in lengths if length not in (3, 5)]
    first = ROWS - len(others)
    named = [(size, size, length) for size, length in enumerate(others, first)]
    return [(1, 4, 5), (5, first - 1, 3), *named, (ROWS, ROWS, 3)]


def of_a_gpu(longest: int) -> dict[str, Any]:
    """Memory, and graphs for the tokens of every length's verification and, one more a row, of the draft's first pass."""
    sizes = sorted({rows * queries for rows in GRAPH_ROWS for queries in range(1, longest + 3)} | {128, 512})
    graphs = {"cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": max(sizes)}
    return {"kv_cache_memory_bytes": 20 << 30, "compilation_config": graphs}


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
