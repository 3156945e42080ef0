"""A transformers model as a trace with three operators of our own.

OpenVINO converts the trace of `torch.jit.trace`. Three placeholder operators stand for attention over blocks, products
with a weight, and embeddings; `convert.py` replaces them. They compute nothing, so tracing is fast, and no weight passes
through TorchScript, whose constants cannot be bfloat16.

Tokens are rows: the input is [tokens, 1]. Splitting heads then moves no memory, and OpenVINO recognises the rotary
embedding.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.pytorch_utils import Conv1D

from speclen.worker.backends.kv_cache import LayerShape
from speclen.worker.backends.openvino.blocks import BLOCK_TOKENS
from speclen.worker.models.forgetful import hand_on_arguments

IMPLEMENTATION = "speclen_openvino"
NUM_EXAMPLE_TOKENS = 5


class NotConvertibleError(ValueError):
    """The model needs more than these operators; the message is the end of a sentence that names it."""


@torch.library.custom_op("speclen::paged_attention", mutates_args=())
def _paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    past_lens: torch.Tensor,
    subsequence_begins: torch.Tensor,
    block_indices: torch.Tensor,
    block_indices_begins: torch.Tensor,
    max_context_len: torch.Tensor,
    kv_heads: int,
    head_dim: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    return torch.zeros_like(query)


@torch.library.custom_op("speclen::linear", mutates_args=())
def _linear(rows: torch.Tensor, weight: int, out_features: int, transposed: bool) -> torch.Tensor:
    return rows.new_zeros(*rows.shape[:-1], out_features)


@torch.library.custom_op("speclen::embedding", mutates_args=())
def _embedding(ids: torch.Tensor, weight: int, width: int) -> torch.Tensor:
    return torch.zeros(*ids.shape, width)


def attend_blocks(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: Sequence[torch.Tensor],
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    """Attention output [tokens, 1, heads, head_dim]. query: [tokens, heads, 1, head_dim]; key, value: kv_heads.

    paged: five inputs of blocks, see BLOCK_INPUTS; then key and value caches of every layer.
    """
    if softcap is not None:
        raise NotConvertibleError(
            "squeezes its attention scores (softcap), for which OpenVINO's attention has no input"
        )
    if s_aux is not None:
        raise NotConvertibleError("attends to sinks (s_aux), which are not handed to OpenVINO's attention")
    tokens, heads, _, head_dim = query.shape
    index: int = module.layer_idx  # type: ignore[assignment]
    output = _paged_attention(
        *(tensor.reshape(-1, tensor.shape[1] * head_dim) for tensor in (query, key, value)),
        *paged[5 + 2 * index : 7 + 2 * index],
        *paged[:5],
        key.shape[1],
        head_dim,
        float(head_dim**-0.5 if scaling is None else scaling),
        sliding_window or 0,
    )
    return output.view(tokens, 1, heads, head_dim), None


class WeightOperators(TorchFunctionMode):
    """Records products with weights and embeddings as operators of our own, in every module.

    numbers: of the weights, by id of their placeholders in the model.
    """

    def __init__(self, numbers: dict[int, int]) -> None:
        super().__init__()
        self._numbers = numbers

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.linear and id(args[1]) in self._numbers:
            product = _linear(args[0], self._numbers[id(args[1])], len(args[1]), True)
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return product if bias is None else product + bias
        if function is torch.addmm and id(args[2]) in self._numbers:  # GPT-2's linear layers
            return _linear(args[1], self._numbers[id(args[2])], args[2].shape[1], False) + args[0]
        if function is F.embedding and id(args[1]) in self._numbers:
            return _embedding(args[0], self._numbers[id(args[1])], args[1].shape[1])
        return function(*args, **kwargs)


class WantedHead(nn.Module):
    """The output layer, applied only to the tokens whose logits are wanted."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self.bias = getattr(head, "bias", None)  # BERT's models take it from there
        self.wanted = torch.zeros(0, dtype=torch.long)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(tokens[self.wanted])


class Traceable(nn.Module):
    """The traced model: forward(ids [tokens], positions [tokens], wanted, five of blocks, caches) → logits.

    weights: by number, as in the recorded operators; shared with the original model.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.weights, copied, numbers = _copy_without_weights(model)
        self.model = copied
        self._operators = WeightOperators(numbers)
        self.head = WantedHead(copied.get_output_embeddings())
        copied.set_output_embeddings(self.head)
        AttentionInterface.register(IMPLEMENTATION, attend_blocks)
        copied.set_attn_implementation(IMPLEMENTATION)
        hand_on_arguments(copied)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, *paged: torch.Tensor
    ) -> torch.Tensor:
        self.head.wanted = wanted
        with self._operators:
            output = self.model(input_ids=ids[:, None], position_ids=positions[:, None], use_cache=False, paged=paged)
        return output.logits[:, 0]


@torch.no_grad()
def trace(model: Any, layers: Sequence[LayerShape]) -> tuple[Any, list[torch.Tensor]]:
    """The recorded model, and the weights that its operators name. Raises NotConvertibleError."""
    traceable = Traceable(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python numbers are meant to become constants.
        traced = torch.jit.trace(traceable, example_inputs(layers), check_trace=False)
    return traced, traceable.weights


def example_inputs(layers: Sequence[LayerShape]) -> tuple[torch.Tensor, ...]:
    """Inputs of a Traceable, of the right types and ranks."""
    tokens = torch.arange(NUM_EXAMPLE_TOKENS)
    counts = [[0], [0, NUM_EXAMPLE_TOKENS], [0], [0, 1], NUM_EXAMPLE_TOKENS]
    blocks = [torch.tensor(numbers, dtype=torch.int32) for numbers in counts]
    caches = [torch.zeros(1, shape.kv_heads, BLOCK_TOKENS, shape.head_dim) for shape in layers for _ in range(2)]
    return tokens, tokens, tokens[1:3], *blocks, *caches


def _copy_without_weights(model: Any) -> tuple[list[torch.Tensor], Any, dict[int, int]]:
    """The weights of linear and embedding layers, a copy without them, and their numbers by id of the placeholders.

    A placeholder is one element expanded to the weight's shape; all else is float32. Tied weights have one number.
    """
    weights: list[torch.Tensor] = []
    memo: dict[int, Any] = {}
    numbers: dict[int, int] = {}
    for module in model.modules():
        if not isinstance(module, nn.Linear | nn.Embedding | Conv1D) or id(module.weight) in memo:
            continue
        stand_in = nn.Parameter(torch.zeros(()).expand(module.weight.shape), requires_grad=False)
        memo[id(module.weight)] = stand_in
        numbers[id(stand_in)] = len(weights)
        weights.append(module.weight.detach().contiguous())
    copied = copy.deepcopy(model, memo)
    for tensor in (*copied.parameters(), *copied.buffers()):
        if id(tensor) not in numbers and tensor.is_floating_point():
            tensor.data = tensor.data.float()
    return weights, copied, numbers
