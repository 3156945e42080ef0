"""Finds out whether the engine runs a model exactly, before it serves anything.

Some families do not go through transformers' AttentionInterface and would, with a warning at most, compute something
else. So every model is looked at twice: `inspect_layers` records what its layers hand to the attention function, and
`check_model` compares ragged rows fed in pieces with the model's own plain forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

from worker.attention import install
from worker.backends.passes import PassModel, PassPart, StepRows, prompt_part
from worker.kv_cache import LayerShape
from worker.models import ModelError

PROBE = "speclen_probe"
KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Rotary embeddings that depend on the longest row of a batch, so that rows would influence each other.
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# Root mean square difference of logits, in units of their standard deviation, that rounding explains. Measured on tiny
# random models of nine families: 6e-7 in float32, 0.002 in float16, 0.02 in bfloat16; a forgotten window or softcap
# gives 0.3 and more. The margin in 16 bits is for models of many layers.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.12}


@dataclass(slots=True)
class _Call:
    """What one layer handed to its attention function."""

    key_shape: torch.Size
    value_shape: torch.Size
    sliding_window: int | None
    others: frozenset[str]


class _Recorder:
    """Stands in for an attention function and notes what it is given, by layer."""

    def __init__(self) -> None:
        self.calls: dict[int, _Call] = {}
        self.num_calls = 0

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        self.num_calls += 1
        others = {name for name, option in options.items() if option is not None and name in ("s_aux", "position_bias")}
        self.calls[getattr(module, "layer_idx", -1)] = _Call(
            key.shape, value.shape, options.get("sliding_window"), frozenset(others)
        )
        return query.transpose(1, 2), None


@torch.inference_mode()
def inspect_layers(model: Any, name: str) -> list[LayerShape]:
    """Shapes of every layer's keys and values; the engine's attention is installed in the model afterwards.

    Raises ModelError when a layer keeps state elsewhere, or attends in a way that the engine does not know.
    """
    config = model.config.get_text_config()
    _check_config(config, name)
    recorder = _Recorder()
    AttentionInterface.register(PROBE, recorder)
    model.set_attn_implementation(PROBE)
    device = next(model.parameters()).device
    try:
        model(input_ids=torch.zeros((1, 2), dtype=torch.long, device=device), use_cache=False)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"{name}: {config.model_type} does not run with another attention function: {error}"
        ) from error
    finally:
        install(model)
    _check_calls(recorder, config, name)
    return [
        LayerShape(call.key_shape[1], call.key_shape[3], call.sliding_window)
        for _, call in sorted(recorder.calls.items())
    ]


def _check_config(config: Any, name: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name}: {config.model_type} is an encoder-decoder; speclen runs decoder-only models")
    unknown = set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYER_TYPES
    if unknown:
        raise ModelError(
            f"{name}: its layers of type {', '.join(sorted(unknown))} keep more than keys and values per token, which "
            "cannot be rolled back"
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    variants = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    kinds = {variant.get("rope_type", variant.get("type")) for variant in variants} & BATCH_DEPENDENT_ROPE
    if kinds:
        raise ModelError(
            f"{name}: rotary embeddings of type {kinds.pop()} depend on the longest row of a batch, so that requests "
            "would change each other's output"
        )


def _check_calls(recorder: _Recorder, config: Any, name: str) -> None:
    num_layers = config.num_hidden_layers
    if set(recorder.calls) != set(range(num_layers)) or recorder.num_calls != num_layers:
        raise ModelError(
            f"{name}: {recorder.num_calls} attention calls for {num_layers} layers of {config.model_type}: its attention "
            "does not go through transformers' AttentionInterface, so rows of different lengths would be wrong"
        )
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind == "sliding_attention" and recorder.calls[index].sliding_window is None:
            raise ModelError(f"{name}: layer {index} of {config.model_type} does not say how long its window is")
    for index, call in recorder.calls.items():
        if call.key_shape != call.value_shape:
            raise ModelError(f"{name}: keys and values of layer {index} have different shapes, which is not supported")
        if call.others:
            extras = ", ".join(sorted(call.others))
            raise ModelError(
                f"{name}: layer {index} of {config.model_type} attends with {extras}, which is not supported"
            )


@torch.inference_mode()
def check_model(cached: PassModel, plain_model: Any, name: str) -> None:
    """Raises ModelError when ragged rows give other logits than the plain forward of each row.

    plain_model: the same weights as transformers runs them, in its own attention.
    Two rows of different lengths are fed in pieces: a prompt each, then several tokens of both rows at once, with a
    rejected token overwritten in between.
    """
    ids = _check_ids(cached, plain_model)
    plain = _plain_logits(plain_model, ids)
    ragged = _ragged_logits(cached, ids)
    for row in range(len(ids)):
        cached.pool.release(row)
    if not torch.isfinite(plain).all():
        raise ModelError(f"{name}: its plain forward gives logits that are not finite")
    difference = float((plain - ragged).square().mean().sqrt() / plain.std().clamp_min(1e-6))
    if not difference <= TOLERANCE[cached.pool.dtype]:
        raise ModelError(
            f"{name}: {plain_model.config.get_text_config().model_type} gives other logits in ragged batches than alone "
            f"(by {difference:.2g} standard deviations), so its output would be wrong"
        )


NUM_TAIL = 3  # tokens per row that are fed together at the end


def _check_ids(cached: PassModel, plain_model: Any) -> list[list[int]]:
    """One or two rows of tokens; longer than a sliding window where that is short."""
    vocab_size = plain_model.get_input_embeddings().weight.shape[0]
    longest = min(48, cached.max_context_length)
    generator = torch.Generator().manual_seed(0)
    lengths = (longest, max(longest // 3, NUM_TAIL + 2))[: cached.pool.num_rows]
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def _plain_logits(model: Any, ids: list[list[int]]) -> torch.Tensor:
    """Logits [rows, NUM_TAIL, vocab] of the last positions, each row alone."""
    rows = [
        model(input_ids=torch.tensor([row], device=model.device), use_cache=False).logits[0, -NUM_TAIL:] for row in ids
    ]
    return torch.stack(rows).float()


def _ragged_logits(model: PassModel, ids: list[list[int]]) -> torch.Tensor:
    """The same through the rows: prompts in two chunks, then a junk token each, then the last tokens together.

    The second chunks of all rows go in one packed pass, as prompts do.
    """
    prompts = [tokens[:-NUM_TAIL] for tokens in ids]
    halves = [len(prompt) // 2 for prompt in prompts]
    for row, half in enumerate(halves):
        if half:
            model.forward([prompt_part(row, prompts[row][:half], 0, model.device)])
    model.forward([prompt_part(row, prompts[row][half:], half, model.device) for row, half in enumerate(halves)])
    for row, tokens in enumerate(ids):
        model.forward([prompt_part(row, tokens[:1], len(prompts[row]), model.device)])
    rows = StepRows(np.array([len(prompt) for prompt in prompts]), NUM_TAIL, model.device)
    tail = torch.tensor([row[-NUM_TAIL:] for row in ids], device=model.device)
    (logits,) = model.forward([PassPart(rows, tail, num_logits=NUM_TAIL)])
    return logits.float()
