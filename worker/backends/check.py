"""Checks of a model before it serves: the engine must compute the same logits as transformers.

Some model families bypass transformers' AttentionInterface, and would compute something else in the engine. Every model is
checked twice: `inspect_layers` records what its layers pass to the attention function, and `check_model` compares ragged
rows, processed in pieces, with the model's plain forward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from speclen.worker.backends.kv_cache import LayerShape
from speclen.worker.backends.passes import PassModel, PassPart, StepRows, prompt_part
from speclen.worker.backends.torch.attention import install
from speclen.worker.models.naming import ModelError

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
    """Arguments of one call of the attention function. num_visible: tokens that the mask allows the last query to attend to.

    is_causal: the layer's own attribute.
    """

    layer: int
    key_shape: torch.Size
    value_shape: torch.Size
    sliding_window: int | None
    has_bias: bool
    is_causal: bool
    num_visible: int | None


def _num_visible(mask: torch.Tensor | None) -> int | None:
    """Tokens that an additive mask [rows, heads or 1, queries, tokens] allows the last query; None for other masks."""
    return (
        int((mask[0, 0, -1] == 0).sum()) if mask is not None and mask.ndim == 4 and mask.is_floating_point() else None
    )


@torch.inference_mode()
def inspect_layers(model: Any, name: str) -> list[LayerShape]:
    """Find the shapes of every layer's keys and values, and install the engine's attention in the model.

    The input is longer than the shortest window in the configuration, since some families mask by a window that they do not
    pass to attention, or pass one by which they do not mask. Raises ModelError if a layer keeps state elsewhere, or attends
    in an unknown way.
    """
    config = model.config.get_text_config()
    _check_config(config, name)
    calls: list[_Call] = []

    def record(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> tuple[Any, None]:
        layer, has_bias = getattr(module, "layer_idx", -1), options.get("position_bias") is not None
        window, num_visible = options.get("sliding_window"), _num_visible(attention_mask)
        is_causal = getattr(module, "is_causal", True)
        calls.append(_Call(layer, key.shape, value.shape, window, has_bias, is_causal, num_visible))
        return query.transpose(1, 2), None

    AttentionInterface.register(PROBE, record)
    AttentionMaskInterface.register(PROBE, eager_mask)
    model.set_attn_implementation(PROBE)
    device = next(model.parameters()).device
    shortest = min(_named_windows(config), default=0)
    num_tokens = 2 + (shortest if shortest + 2 <= _affordable_tokens(model) else 0)
    try:
        model(input_ids=torch.zeros((1, num_tokens), dtype=torch.long, device=device), use_cache=False)
    except Exception as error:  # A family's own code may raise anything.
        raise ModelError(
            f"{name}: {config.model_type} does not run with another attention function{_sharing(config)}: "
            f"{first_line(error)}"
        ) from error
    finally:
        install(model)
    calls.sort(key=lambda call: call.layer)
    _check_calls(calls, config, name)
    _check_masks(calls, config, name, num_tokens)
    return [LayerShape(call.key_shape[1], call.key_shape[3], call.sliding_window) for call in calls]


def _sharing(config: Any) -> str:
    num_shared = getattr(config, "num_kv_shared_layers", None)
    return f", since {num_shared} of its layers share keys and values" if num_shared else ""


def first_line(error: Exception) -> str:
    """Type and first line of an error, at most 200 characters."""
    lines = str(error).strip().splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0]}"
    return text if len(text) <= 200 else text[:197] + "..."


def _check_config(config: Any, name: str) -> None:
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
            f"{name}: rotary embeddings of type {kinds.pop()} depend on the longest sequence of a batch, so requests "
            "would change each other's output"
        )


def _check_calls(calls: Sequence[_Call], config: Any, name: str) -> None:
    num_layers = config.num_hidden_layers
    if [call.layer for call in calls] != list(range(num_layers)):
        raise ModelError(
            f"{name}: {len(calls)} attention calls for {num_layers} layers of {config.model_type}: its attention "
            "does not go through transformers' AttentionInterface, so sequences of different lengths would be wrong"
        )
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind == "sliding_attention" and calls[index].sliding_window is None:
            raise ModelError(f"{name}: layer {index} of {config.model_type} does not say how long its window is")
    for index, call in enumerate(calls):
        if call.key_shape != call.value_shape:
            raise ModelError(f"{name}: keys and values of layer {index} have different shapes, which is not supported")
        if not call.is_causal:
            raise ModelError(
                f"{name}: {config.model_type} lets tokens attend to later ones, as an encoder does, so it cannot generate: "
                "choose a decoder, or set is_decoder to true in its config.json if it was trained as one"
            )
        if call.has_bias:
            kind = config.model_type
            raise ModelError(f"{name}: layer {index} of {kind} attends with position_bias, which is not supported")


def _check_masks(calls: Sequence[_Call], config: Any, name: str, num_tokens: int) -> None:
    """Raise ModelError unless the model masks by exactly the windows that its layers pass to attention."""
    for index, call in enumerate(calls):
        expected = min(num_tokens, call.sliding_window or num_tokens)
        if call.num_visible not in (None, expected):
            raise ModelError(
                f"{name}: layer {index} of {config.model_type} passes a window of {call.sliding_window or 'all'} tokens to "
                f"attention, but its mask allows {call.num_visible} of {num_tokens}, so its output would be wrong"
            )


# Tokens per row in the last pass: a width that every worker captures, so that captures are checked, too.
NUM_TAIL = 2
LEAST_TOKENS = 48  # of the longest row
SHORT_ENDS = 2, 5, 12  # ends of the pieces of a short prompt: few tokens may take another code path than many
MOST_FED = 256  # tokens in a pass, as in prefill: larger passes may take another code path


@torch.inference_mode()
def check_model(
    cached: PassModel, plain_model: Any, name: str, least_tokens: int = LEAST_TOKENS, num_tail: int = NUM_TAIL
) -> None:
    """Raise ModelError if ragged rows give other logits than a plain forward pass of each row.

    plain_model: the same weights in transformers with its own attention. least_tokens, num_tail: as the constants. Two rows
    of different lengths are processed in pieces: a prompt each, then several tokens of both rows at once, with a rejected
    token overwritten in between. One row is longer than the shortest window in the configuration; its beginning is first
    processed as a short prompt.
    """
    config = plain_model.config.get_text_config()
    shortest = min(_named_windows(config), default=0)
    longest = min(max(least_tokens, 2 * shortest + 16), cached.max_context_length)
    if longest > (affordable := _affordable_tokens(plain_model)):
        _check_unseen_windows(config, cached, name)
        longest = max(min(LEAST_TOKENS, longest), affordable)
    num_tail = max(NUM_TAIL, min(num_tail, longest // 3))
    ids = _check_ids(cached, plain_model, longest, num_tail)
    try:
        short = [end for end in SHORT_ENDS if end <= longest]
        plain = torch.cat([_plain_short_logits(plain_model, ids[0], short), _plain_logits(plain_model, ids, num_tail)])
        ragged = torch.cat([_short_logits(cached, ids[0], short), _ragged_logits(cached, ids, num_tail)])
    except Exception as error:
        why = first_line(error)
        if "row_attention" in why:
            why = "its layers do not pass the engine's arguments on to their attention"
        raise ModelError(
            f"{name}: {config.model_type} does not run in ragged batches{_sharing(config)}: {why}"
        ) from error
    finally:
        for row in range(len(ids)):
            cached.pool.release(row)
    if not torch.isfinite(plain).all():
        raise ModelError(f"{name}: its plain forward pass gives logits that are not finite")
    difference = float((plain - ragged).square().mean().sqrt() / plain.std().clamp_min(1e-6))
    if not difference <= TOLERANCE[cached.pool.dtype]:
        raise ModelError(
            f"{name}: {config.model_type} gives other logits in ragged batches than alone (by {difference:.2g} standard "
            "deviations), so its output would be wrong"
        )


# Largest product of tokens and parameters for the longest row: some seconds on two CPU cores, one second on a GPU.
BUDGET = {"cpu": 2e11, "cuda": 5e13}


def _named_windows(config: Any) -> list[int]:
    """Windows shorter than the context, from any key of the configuration."""
    context = getattr(config, "max_position_embeddings", None) or 0
    named = [value for key, value in config.to_dict().items() if "window" in key or "chunk" in key]
    return [window for window in named if type(window) is int and 1 < window < context]


def _affordable_tokens(model: Any) -> int:
    parameters = list(model.parameters())
    return int(
        BUDGET.get(parameters[0].device.type, BUDGET["cpu"]) / sum(parameter.numel() for parameter in parameters)
    )


def _check_unseen_windows(config: Any, cached: PassModel, name: str) -> None:
    """Raise ModelError if layers and configuration disagree about a window that is too long to be tried."""
    window = getattr(config, "sliding_window", None)
    handed = {shape.window for shape in cached.pool.shapes} - {None}
    known = "sliding_window" in inspect.signature(type(config).__init__).parameters or hasattr(
        type(config), "sliding_window"
    )
    masked = known and window is not None and window < cached.max_context_length
    if bool(handed) != masked:
        raise ModelError(
            f"{name}: the window of {window} tokens in its configuration and what its layers of {config.model_type} do "
            "disagree, so its output would be wrong"
        )


def _check_ids(cached: PassModel, plain_model: Any, longest: int, num_tail: int) -> list[list[int]]:
    """One or two rows of tokens, of which the first has `longest`."""
    vocab_size = plain_model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    lengths = (longest, max(longest // 3, num_tail + 2))[: cached.pool.num_rows]
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def _plain_logits(model: Any, ids: list[list[int]], num_tail: int) -> torch.Tensor:
    """Logits [rows * num_tail, vocab] of the last positions, with each row in a forward pass of its own."""
    return torch.cat([_alone(model, row)[-num_tail:] for row in ids])


def _plain_short_logits(model: Any, tokens: list[int], ends: list[int]) -> torch.Tensor:
    """Logits [ends, vocab] after the first tokens of a row."""
    return _alone(model, tokens[: ends[-1]])[[end - 1 for end in ends]]


def _alone(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits [tokens, vocab] of a plain forward pass."""
    return model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0].float()


def _short_logits(model: PassModel, tokens: list[int], ends: list[int]) -> torch.Tensor:
    """The same through a row, in one piece up to each end."""
    pieces = [prompt_part(0, tokens[start:end], start, model.device) for start, end in pairwise([0, *ends])]
    # Cloned: a backend may overwrite them in its next pass.
    return torch.cat([model.forward([piece])[0][0, -1:].clone() for piece in pieces]).float()


def _ragged_logits(model: PassModel, ids: list[list[int]], num_tail: int) -> torch.Tensor:
    """As `_plain_logits`, by ragged rows: prompts in chunks, then a token to be rejected, then the last tokens together.

    The last chunks of all rows are processed in one packed pass, as prompts are.
    """
    prompts = [tokens[:-num_tail] for tokens in ids]
    halves = [max(len(prompt) // 2, len(prompt) - MOST_FED // len(ids)) for prompt in prompts]
    for row, half in enumerate(halves):
        for start in range(0, half, MOST_FED):
            chunk = prompts[row][start : min(half, start + MOST_FED)]
            model.forward([prompt_part(row, chunk, start, model.device)])
    model.forward([prompt_part(row, prompts[row][half:], half, model.device) for row, half in enumerate(halves)])
    for row, tokens in enumerate(ids):
        model.forward([prompt_part(row, tokens[:1], len(prompts[row]), model.device)])
    rows = StepRows(np.array([len(prompt) for prompt in prompts]), num_tail, model.device)
    tail = torch.tensor([row[-num_tail:] for row in ids], device=model.device)
    (logits,) = model.forward([PassPart(rows, tail, num_logits=num_tail)])
    return logits.flatten(0, 1).float()
