"""Where a model's files lie, what they say of it, and whether it can be served; nothing of its weights."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from speclen.worker.models.naming import ModelError, Shape, find_place
from speclen.worker.models.widen import count_parameters


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a named model is: its directory or hub id, its configuration, and the shape it is to be widened to."""

    name: str
    place: str
    shape: Shape | None
    config: Any

    @property
    def text_config(self) -> Any:
        return self.config.get_text_config()

    @property
    def num_parameters(self) -> int:
        """Computed from the configuration without allocating anything."""
        with one_sentence(self.name, "its configuration cannot be used"):
            if self.shape is not None:
                return count_parameters(self.config, self.shape)
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(self.config).num_parameters()

    @property
    def max_context_length(self) -> int:
        limit = getattr(self.text_config, "max_position_embeddings", None)
        if not isinstance(limit, int) or limit < 2:
            raise ModelError(f"{self.name}: its configuration does not say how many positions it can hold")
        return limit


def locate(name: str) -> ModelSource:
    """Find the model's files and read its configuration."""
    place, shape = find_place(name)
    with one_sentence(name, "its configuration cannot be read"):
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    return ModelSource(name, place, shape, config)


def refuse_unsuitable(source: ModelSource) -> None:
    """Refuse what no cache of keys and values per row can run, before any weights are read."""
    config = source.config
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{source.name}: {kind} is an encoder-decoder; speclen runs decoder-only models")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    if model_class is None:
        raise ModelError(f"{source.name}: {kind} is not a causal language model of transformers")
    refuse_latent_attention(source.text_config, source.name)
    if getattr(model_class, "_is_stateful", False):
        raise ModelError(
            f"{source.name}: {kind} keeps a recurrent state, which cannot be rolled back to the last accepted token"
        )
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ModelError(
            f"{source.name}: {kind} computes attention in its own code, so rows of different lengths would be wrong"
        )


def refuse_latent_attention(config: Any, name: str) -> None:
    """Raises ModelError for multi-head latent attention: what it keeps per token are no keys and values."""
    if rank := getattr(config, "kv_lora_rank", None):
        raise ModelError(
            f"{name}: {config.model_type} compresses keys and values (multi-head latent attention, kv_lora_rank {rank}), "
            "which is not supported; use a model with ordinary or grouped heads"
        )


@contextmanager
def one_sentence(name: str, what: str) -> Iterator[None]:
    """Turn whatever transformers, the hub or the file system raise into one ModelError, quietly."""
    try:
        with quiet_transformers(), _without_progress_bars():
            yield
    except ModelError:
        raise
    except torch.OutOfMemoryError:
        raise ModelError(f"{name}: {what}: out of memory; use a smaller model or --dtype bfloat16") from None
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError, HFValidationError) as error:
        raise ModelError(f"{name}: {what}: {_reason(error)}") from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the warnings of transformers, which are about what nobody asked for, such as a missing loss."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


def _reason(error: Exception) -> str:
    """The first sentence of an error, without addresses, at most 200 characters."""
    text = str(error).strip() or type(error).__name__
    if _is_offline() and re.search(r"cached files|internet|offline|connect", text, re.IGNORECASE):
        return "it is neither a local directory nor in the hub's cache, and HF_HUB_OFFLINE is set"
    first_line = re.sub(r"https?://\S+", "the hub", text.splitlines()[0])
    return first_line if len(first_line) <= 200 else first_line[:197] + "..."


@functools.cache
def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
