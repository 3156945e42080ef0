"""Location, configuration and suitability of a model, without its weights.

`reading` is the boundary around a model's files: any error in it becomes one sentence for the user.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub import is_offline_mode
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from speclen.worker.models.naming import ADAPTER, ModelError, Shape, adapter_refusal, find_place
from speclen.worker.models.widen import widened_config

# Families that use transformers' AttentionInterface, although their classes do not declare it.
UNDECLARED = {"biogpt", "stablelm"}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Location of a named model: its directory or hub id, its configuration, and the shape it is to be widened to.

    text_config: of the language model in a multimodal one; else config itself.
    """

    name: str
    place: str
    shape: Shape | None
    config: Any
    text_config: Any

    @property
    def num_parameters(self) -> int:
        """Computed from the configuration without allocating anything."""
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
    """Find the model's files and read its configuration."""
    place, shape = find_place(name)
    with reading(name, "its configuration (config.json) cannot be read"):
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
        if file_of(place, ADAPTER) is not None:
            raise ModelError(adapter_refusal(name))
        config._attn_implementation = None  # noqa: SLF001 - what it names may not be installed, and speclen brings its own
        return ModelSource(name, place, shape, config, config.get_text_config())


def file_of(place: str, name: str) -> str | None:
    """Path of one of a model's files, from the hub if need be; None if it has none of that name."""
    optional = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found: str | None = cached_file(place, name, **optional)
    return found


def read_generation_config(source: ModelSource) -> Any:
    """Defaults for generation; from config.json without a file of their own."""
    with reading(source.name, "its generation_config.json cannot be read"):
        if file_of(source.place, "generation_config.json") is None:
            return GenerationConfig.from_model_config(source.config)
        return GenerationConfig.from_pretrained(source.place)


def refuse_unsuitable(source: ModelSource) -> None:
    """Raises ModelError for models that keys and values per sequence cannot serve, before weights are read."""
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
    """Turn any error of a library that reads a model's files into one ModelError, quietly.

    Only for calls of libraries, which raise all kinds of exceptions for damaged or newer files. problem: as in "its weights
    cannot be read", with the file's name.
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
    """The error for a model that does not fit the memory."""
    return ModelError(f"{name}: {problem}: out of memory; use a smaller model or --dtype bfloat16")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without progress bars and warnings of transformers, for example about a missing loss."""
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
    """First line of an error, without URLs, at most 200 characters; with its type if the text needs it."""
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
