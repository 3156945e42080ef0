"""Loading of a target and a draft that fit together.

Only safetensors are read, and no code of a checkpoint runs. The engine checks later that it runs a family exactly; only
models that can never work are refused here.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from speclen.worker.models.naming import ModelError, check_settings
from speclen.worker.models.source import (
    ModelSource,
    file_of,
    locate,
    out_of_memory,
    read_generation_config,
    reading,
    refuse_unsuitable,
)
from speclen.worker.models.widen import widen

log = logging.getLogger(__name__)

# Below this many parameters a CPU runs float32 as fast as bfloat16: the weights stay in the cache either way.
CPU_FLOAT32_PARAMETERS = 20_000_000
# Text on which tokenizers of one vocabulary are compared: words, code, digits, other scripts.
TOKENIZER_PROBE = "def f(x):\n    return  x + 1234.5  # naïve café, 北京 и Москва 🙂\tEND"
# Tensors of older checkpoints that hold no weights: angles of rotary embeddings and causal masks.
NO_WEIGHTS = re.compile(r"(^|\.)(rotary_emb\.\w+|(attn|attention)\.(bias|masked_bias))$")
# Values of generation_config.json that hold where a request leaves them out, as in vLLM.
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Types of weights, as safetensors names them.
FLOATS = ("F64", "F32", "F16", "BF16")
NUM_NAMED = 3  # of many tensors in an error


@dataclass(slots=True)
class ModelPair:
    """A target and its draft model, in eval mode on one device and in one dtype.

    draft: None when no speculation is possible. vocab_size: entries of the logits of both models.
    max_context_length: prompt and output together, by the target's limit. draft_context_length: tokens up to which the draft
    proposes; None: all.
    eos_token_ids: ascending; any of them ends a sequence. sampling_defaults: as read from
    generation_config.json, for requests that leave them out.
    """

    target: Any
    draft: Any | None
    tokenizer: Any
    target_name: str
    draft_name: str
    device: torch.device
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    max_context_length: int
    vocab_size: int
    draft_context_length: int | None = None
    sampling_defaults: dict[str, Any] = field(default_factory=dict)


def load_pair(target: str, draft: str | None, device: str = "auto", dtype: str = "auto") -> ModelPair:
    """Load both models; `draft` None, "" or "none" loads the target alone.

    device: "auto" (CUDA when there is one), "cpu", "cuda" or "cuda:N". dtype: "auto", "float32", "bfloat16", "float16".
    Raises ModelError when a model cannot be read or served, or the two do not fit.
    """
    check_settings(device, dtype)
    draft = None if draft in (None, "", "none") else draft
    sources = [locate(name) for name in (target, draft) if name is not None]
    for source in sources:
        refuse_unsuitable(source)
    tokenizers = [_load_tokenizer(source) for source in sources]
    if len(sources) == 2:
        _check_same_tokenizer(sources, tokenizers)
    torch_device = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, torch_device, sources[0].num_parameters)
    generation_config = read_generation_config(sources[0])
    models = [_load_model(source, torch_device, torch_dtype) for source in sources]
    vocab_size = models[0].get_output_embeddings().weight.shape[0]
    if len(models) == 2:
        _match_vocabulary(models[1], vocab_size)
    return ModelPair(
        target=models[0],
        draft=models[1] if len(models) == 2 else None,
        tokenizer=tokenizers[0],
        target_name=target,
        draft_name=draft or "",
        device=torch_device,
        dtype=torch_dtype,
        eos_token_ids=_end_ids(sources[0].name, generation_config, tokenizers[0], vocab_size),
        max_context_length=sources[0].max_context_length,
        vocab_size=vocab_size,
        draft_context_length=_draft_context(*sources) if len(sources) == 2 else None,
        sampling_defaults={
            name: value for name in SAMPLING_DEFAULTS if (value := getattr(generation_config, name, None)) is not None
        },
    )


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model, by any name for load_pair. Raises ModelError."""
    return _load_tokenizer(locate(name))


def resolve_device(device: str) -> torch.device:
    """The device that "auto", "cpu", "cuda" or "cuda:N" stands for on this machine."""
    if device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    resolved = torch.device(device)
    if resolved.type == "cuda":
        resolved = torch.device("cuda", resolved.index or 0)
        if not torch.cuda.is_available():
            raise ModelError(f"device {device!r} was asked for, but torch sees no CUDA device; use --device cpu")
        if resolved.index >= torch.cuda.device_count():
            raise ModelError(f"device {device!r} does not exist; this machine has {torch.cuda.device_count()}")
    return resolved


def resolve_dtype(dtype: str, device: torch.device, num_parameters: int) -> torch.dtype:
    """The dtype of both models. "auto": the fastest one that keeps the model's quality.

    CUDA: bfloat16 where the GPU computes in it, else float16. CPU: bfloat16 for targets of 20 million parameters and
    more where the CPU has bfloat16 dot products (decoding then reads half the bytes), else float32.
    """
    if dtype != "auto":
        return getattr(torch, dtype)
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    large = num_parameters >= CPU_FLOAT32_PARAMETERS
    return torch.bfloat16 if large and cpu_has_bfloat16() else torch.float32


def cpu_has_bfloat16() -> bool:
    """True if matrix products in bfloat16 have instructions of their own: AVX-512 BF16, AMX, or ARM's BF16."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _load_tokenizer(source: ModelSource) -> Any:
    problem = "its tokenizer (tokenizer.json, tokenizer_config.json) cannot be read"
    folder = Path(source.place)
    if (folder / "tekken.json").is_file() and not (folder / "tokenizer.json").is_file():
        problem = "its tekken.json cannot be read as a tokenizer; put the model's tokenizer.json beside it"
    with reading(source.name, problem):
        tokenizer = AutoTokenizer.from_pretrained(source.place, trust_remote_code=False)
        tokenizer.decode(tokenizer.encode(TOKENIZER_PROBE))  # parts of another version fail only in use
        return tokenizer


def _check_same_tokenizer(sources: list[ModelSource], tokenizers: list[Any]) -> None:
    """Raises ModelError unless token ids mean the same text to both models."""
    target, draft = (tokenizer.get_vocab() for tokenizer in tokenizers)
    names = f"target {sources[0].name} and draft {sources[1].name}"
    if target != draft:
        shared = len(target.items() & draft.items())
        raise ModelError(
            f"{names} have different vocabularies ({len(target)} and {len(draft)} tokens, {shared} in common); "
            "choose a draft that was trained with the target's tokenizer"
        )
    first, second = (tokenizer.encode(TOKENIZER_PROBE, add_special_tokens=False) for tokenizer in tokenizers)
    if first != second:
        raise ModelError(f"{names} have the same vocabulary but split text differently; choose another draft")


def _load_model(source: ModelSource, device: torch.device, dtype: torch.dtype) -> Any:
    problem = f"its weights (*.safetensors) cannot be loaded on {device} as {str(dtype).removeprefix('torch.')}"
    with reading(source.name, problem):
        if source.shape is None:
            return _read_weights(source, dtype).to(device).eval()
        # Read in float32 and widened straight into the device's memory and dtype.
        small = _read_weights(source, torch.float32)
    try:
        return widen(small, source.shape, device, dtype)
    except (RuntimeError, MemoryError):
        raise out_of_memory(source.name, f"it cannot be widened on {device}") from None


def _read_weights(source: ModelSource, dtype: torch.dtype) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source.place,
        config=source.config,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused below
    )
    model, info = loaded
    if mismatched := sorted(info["mismatched_keys"]):
        weight, stored, expected = mismatched[0]
        shapes = [" x ".join(map(str, shape)) for shape in (stored, expected)]
        raise ModelError(
            f"{source.name}: {weight} is {shapes[0]} in its files and {shapes[1]} by its config.json ({len(mismatched)} "
            "weights differ; the first number of embeddings is vocab_size): use a checkpoint and a configuration that fit "
            "together"
        )
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"{source.name}: {len(missing)} weights are missing from its files, {missing[0]} among them")
    if unused := unused_weights(info["unexpected_keys"]):
        raise ModelError(
            f"{source.name}: its files hold {len(unused)} weights for which {source.config.model_type} has no use by its "
            f"config.json, so its output would be wrong ({', '.join(unused[:NUM_NAMED])}): use a checkpoint and a "
            "configuration that fit together, with weights that are not quantised"
        )
    if getattr(source.config, "quantization_config", None) is None and (found := _quantised_weights(source.place)):
        raise ModelError(
            f"{source.name}: its files hold weights as {found[1]} without scales ({found[0]}), and its config.json has no "
            "quantization_config, so its output would be wrong: use the model before it was quantised"
        )
    return model


def _quantised_weights(place: str) -> tuple[str, str] | None:
    """The first weight of a checkpoint that is stored as integers or in 8 bits, and its type; None if there is none."""
    index = file_of(place, "model.safetensors.index.json")
    names = {"model.safetensors"} if index is None else set(json.loads(Path(index).read_text())["weight_map"].values())
    for path in (file_of(place, name) for name in sorted(names)):
        if path is None:
            continue
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it has no iterator
                dtype = file.get_slice(name).get_dtype()
                if name.endswith("weight") and dtype not in FLOATS and not NO_WEIGHTS.search(name):
                    return name, dtype
    return None


def unused_weights(names: Iterable[str]) -> list[str]:
    """Weights of a checkpoint that its model does not use, sorted."""
    return sorted(name for name in names if not NO_WEIGHTS.search(name))


def _draft_context(target: ModelSource, draft: ModelSource) -> int | None:
    """Positions of a draft that has fewer than its target."""
    most = draft.max_context_length
    if most >= target.max_context_length:
        return None
    log.warning(
        "the draft %s has %d positions and the target %s %d: longer sequences go on without drafts",
        *(draft.name, most, target.name, target.max_context_length),
    )
    return most


@torch.no_grad()
def _match_vocabulary(draft: Any, vocab_size: int) -> None:
    """Give the draft as many logits as the target.

    Checkpoints of one family pad the same vocabulary to different sizes. Added rows copy the last one, which is padding
    itself, so that the draft does not propose them.
    """
    old_size = draft.get_output_embeddings().weight.shape[0]
    if old_size == vocab_size:
        return
    draft.resize_token_embeddings(vocab_size, mean_resizing=False)
    for embedding in (draft.get_input_embeddings(), draft.get_output_embeddings()):
        embedding.weight[old_size:] = embedding.weight[min(old_size, vocab_size) - 1]


def _end_ids(name: str, generation_config: Any, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """Every token that ends a sequence: those of the generation configuration, and the tokenizer's own."""
    named = getattr(generation_config, "eos_token_id", None)
    named = [*(named if isinstance(named, list | tuple) else [named]), tokenizer.eos_token_id]
    known = [one for one in named if type(one) is int and 0 <= one < vocab_size]
    if unknown := [one for one in named if one is not None and one not in known]:
        told = ", ".join(map(repr, unknown))
        log.warning("%s: end tokens %s are not among the ids 0 to %d, and are left out", name, told, vocab_size - 1)
    return tuple(sorted(set(known)))
