"""Loading of a target and a draft model that fit together.

Only safetensors are read, and no code of a checkpoint runs. `reading` is the boundary around a model's files: any error of
a library in it becomes one sentence for the user. Only models that can never work are refused here; the engine checks
later that it runs a model exactly.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import is_offline_mode
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from speclen.worker.models.devices import resolve_device, resolve_dtype
from speclen.worker.models.naming import ADAPTER, ModelError, Shape, adapter_refusal, check_settings, find_place
from speclen.worker.models.widen import widen, widened_config

log = logging.getLogger(__name__)

# Model types that use transformers' AttentionInterface although their classes do not declare it.
UNDECLARED = {"biogpt", "stablelm"}
# Text on which tokenizers with the same vocabulary are compared: words, code, digits, other scripts.
TOKENIZER_PROBE = "def f(x):\n    return  x + 1234.5  # naïve café, 北京 и Москва 🙂\tEND"
# Tensors of older checkpoints that hold no weights: angles of rotary embeddings and causal masks.
NO_WEIGHTS = re.compile(r"(^|\.)(rotary_emb\.\w+|(attn|attention)\.(bias|masked_bias))$")
# Values of generation_config.json that apply if a request leaves them out, as in vLLM.
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Types of unquantised weights, as safetensors names them.
FLOATS = ("F64", "F32", "F16", "BF16")
NUM_NAMED = 3  # tensors that an error lists


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model before it is loaded: its directory or hub id, its configuration, and the shape to widen it to.

    text_config: configuration of the language model in a multimodal one; otherwise config itself.
    """

    name: str
    place: str
    shape: Shape | None
    config: Any
    text_config: Any

    @property
    def num_parameters(self) -> int:
        """Number of parameters by the configuration; allocates nothing."""
        config = self.config if self.shape is None else widened_config(self.config, self.shape)
        with reading(self.name, "its configuration (config.json) cannot be used"), torch.device("meta"):
            number: int = AutoModelForCausalLM.from_config(config).num_parameters()
        return number

    @property
    def max_context_length(self) -> int:
        limit = getattr(self.text_config, "max_position_embeddings", None)
        if not isinstance(limit, int) or limit < 2:
            raise ModelError(f"{self.name}: its configuration does not say how many positions it can hold")
        return limit


def locate(name: str) -> ModelSource:
    """Find a model's files, and read its configuration. Raises ModelError."""
    place, shape = find_place(name)
    with reading(name, "its configuration (config.json) cannot be read"):
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
        if file_of(place, ADAPTER) is not None:
            raise ModelError(adapter_refusal(name))
        config._attn_implementation = None  # noqa: SLF001 - what it names may not be installed, and speclen brings its own
        return ModelSource(name, place, shape, config, config.get_text_config())


def file_of(place: str, name: str) -> str | None:
    """Path of a file of the model, downloaded from the hub if necessary; None if it has no such file."""
    optional = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found: str | None = cached_file(place, name, **optional)
    return found


def read_generation_config(source: ModelSource) -> Any:
    """The model's generation_config.json; without that file, the defaults in its config.json."""
    with reading(source.name, "its generation_config.json cannot be read"):
        if file_of(source.place, "generation_config.json") is None:
            return GenerationConfig.from_model_config(source.config)
        return GenerationConfig.from_pretrained(source.place)


def refuse_unsuitable(source: ModelSource) -> None:
    """Raise ModelError, before weights are read, if a model cannot be served with a KV cache per sequence."""
    config = source.config
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{source.name}: {kind} is an encoder-decoder; speclen runs decoder-only models")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    if model_class is None:
        raise ModelError(f"{source.name}: {kind} is not a causal language model of transformers")
    if rank := getattr(source.text_config, "kv_lora_rank", None):
        raise ModelError(
            f"{source.name}: {kind} compresses keys and values (multi-head latent attention, kv_lora_rank {rank}), "
            "which is not supported; use a model with ordinary or grouped heads"
        )
    if getattr(model_class, "_is_stateful", False):
        raise ModelError(
            f"{source.name}: {kind} keeps a recurrent state, which cannot be rolled back to the last accepted token"
        )
    if not getattr(model_class, "_supports_attention_backend", False) and kind not in UNDECLARED:
        raise ModelError(
            f"{source.name}: {kind} computes attention in its own code, so sequences of different lengths would be wrong"
        )


@contextmanager
def reading(name: str, problem: str) -> Iterator[None]:
    """Turn any error of a library that reads a model's files into a ModelError, without the library's warnings.

    Only for calls of libraries, which raise all types of exceptions for damaged or newer files. problem: a clause such as
    "its weights cannot be read", with the file's name.
    """
    try:
        with quiet_transformers():
            yield
    except ModelError:
        raise
    except (torch.OutOfMemoryError, MemoryError):
        raise out_of_memory(name, problem) from None
    except Exception as error:
        raise ModelError(f"{name}: {problem}: {_reason(error)}") from error


def out_of_memory(name: str, problem: str) -> ModelError:
    """The error for a model that does not fit in memory."""
    return ModelError(f"{name}: {problem}: out of memory; use a smaller model or --dtype bfloat16")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress progress bars and warnings of transformers, such as that of a missing loss."""
    verbosity, enabled = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if enabled:
            transformers_logging.enable_progress_bar()


def _reason(error: Exception) -> str:
    """First line of an error, without URLs and at most 200 characters; with its type unless the text suffices."""
    text = str(error).strip()
    if not text or not isinstance(error, OSError | ValueError | RuntimeError | ImportError):
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    if is_offline_mode() and re.search(r"cached files|internet|offline|connect", text, re.IGNORECASE):
        return "it is neither a local directory nor in the hub's cache, and HF_HUB_OFFLINE is set"
    first, *others = [line.strip() for line in text.splitlines()]
    if others and first.endswith(":"):
        first = f"{first} {others[0]}"
    first_line = re.sub(r"'?https?://\S+", "the hub", first)
    return first_line if len(first_line) <= 200 else first_line[:197] + "..."


@dataclass(slots=True)
class ModelPair:
    """A target and its draft model, in eval mode on one device and in one dtype.

    draft: None for a target alone. vocab_size: entries of the logits of both models. max_context_length: limit of the target
    for prompt and output together. draft_context_length: the draft model's limit; None if it is not lower. eos_token_ids:
    ascending; any of them ends a sequence. sampling_defaults: from generation_config.json, for requests that leave them out.
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
    """Load a target with its draft model, or alone if draft is None, "" or "none".

    device: "auto" (CUDA if there is a GPU), "cpu", "cuda" or "cuda:N". dtype: "auto", "float32", "bfloat16", "float16".
    Raises ModelError if a model cannot be read or served, or if the two do not fit together.
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
    """Load the tokenizer of a model, which is named as for load_pair. Raises ModelError."""
    return _load_tokenizer(locate(name))


def _load_tokenizer(source: ModelSource) -> Any:
    problem = "its tokenizer (tokenizer.json, tokenizer_config.json) cannot be read"
    folder = Path(source.place)
    if (folder / "tekken.json").is_file() and not (folder / "tokenizer.json").is_file():
        problem = "its tekken.json cannot be read as a tokenizer; put the model's tokenizer.json next to it"
    with reading(source.name, problem):
        tokenizer = AutoTokenizer.from_pretrained(source.place, trust_remote_code=False)
        tokenizer.decode(tokenizer.encode(TOKENIZER_PROBE))  # parts of another version fail only when used
        return tokenizer


def _check_same_tokenizer(sources: list[ModelSource], tokenizers: list[Any]) -> None:
    """Raise ModelError unless token ids have the same meaning for both models."""
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
        # Read in float32, and widened directly into the device's memory and dtype.
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
    """Name and type of the first weight in a checkpoint that is stored as integers or in 8 bits; None if none is."""
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
    """Names of tensors in a checkpoint that are weights, sorted. names: of those that the model does not use."""
    return sorted(name for name in names if not NO_WEIGHTS.search(name))


def _draft_context(target: ModelSource, draft: ModelSource) -> int | None:
    """Number of positions of a draft model that has fewer than its target; otherwise None."""
    most = draft.max_context_length
    if most >= target.max_context_length:
        return None
    log.warning(
        "the draft %s has %d positions and the target %s %d: longer sequences continue without drafts",
        *(draft.name, most, target.name, target.max_context_length),
    )
    return most


@torch.no_grad()
def _match_vocabulary(draft: Any, vocab_size: int) -> None:
    """Resize the draft model's vocabulary to that of the target.

    Checkpoints of one family pad the same vocabulary to different sizes. Added entries are copies of the last one, which is
    padding itself, so that the draft model does not propose them.
    """
    old_size = draft.get_output_embeddings().weight.shape[0]
    if old_size == vocab_size:
        return
    draft.resize_token_embeddings(vocab_size, mean_resizing=False)
    for embedding in (draft.get_input_embeddings(), draft.get_output_embeddings()):
        embedding.weight[old_size:] = embedding.weight[min(old_size, vocab_size) - 1]


def _end_ids(name: str, generation_config: Any, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """All tokens that end a sequence: those of the generation configuration and of the tokenizer."""
    named = getattr(generation_config, "eos_token_id", None)
    named = [*(named if isinstance(named, list | tuple) else [named]), tokenizer.eos_token_id]
    known = [one for one in named if type(one) is int and 0 <= one < vocab_size]
    if unknown := [one for one in named if one is not None and one not in known]:
        listed = ", ".join(map(repr, unknown))
        log.warning("%s: the end tokens %s are ignored: ids go from 0 to %d", name, listed, vocab_size - 1)
    return tuple(sorted(set(known)))
