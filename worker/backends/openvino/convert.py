"""Conversion of a transformers model to OpenVINO: from tokens in rows of blocks to the wanted logits.

`torch.jit.trace` records the model. Three placeholder operators stand for attention over blocks, products with a weight,
and embeddings. They compute nothing, so tracing is fast, and no weight passes through TorchScript, whose constants cannot
be bfloat16. The conversion replaces them by OpenVINO's operators.

The tokens of a pass are the rows of a batch, [tokens, 1]: splitting heads then moves no memory, and OpenVINO recognises the
rotary embedding. Attention is the operator of OpenVINO GenAI, `PagedAttentionExtension`. It is not part of OpenVINO's public
interface, so the version is pinned, and every loaded model is checked.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
import torch
import torch.nn.functional as F
from openvino import opset13 as ops
from openvino._offline_transformations import apply_moc_transformations
from openvino.frontend import FrontEndManager
from openvino.frontend.pytorch import ConversionExtension
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder
from openvino.op import _PagedAttentionExtension
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.pytorch_utils import Conv1D

from speclen.worker.backends.kv_cache import LayerShape
from speclen.worker.backends.openvino.blocks import BLOCK_TOKENS
from speclen.worker.backends.torch.attention import pass_arguments_on

IMPLEMENTATION = "speclen_openvino"
NUM_EXAMPLE_TOKENS = 5
TOKEN_INPUTS = ("input_ids", "position_ids", "wanted")
BLOCK_INPUTS = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins", "max_context_len")


class NotConvertibleError(ValueError):
    """The model needs more than these operators. The message is a verb phrase whose subject is the model."""


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

    paged: the five inputs in BLOCK_INPUTS, then the key and value caches of every layer.
    """
    if softcap is not None:
        raise NotConvertibleError(
            "squeezes its attention scores (softcap), for which OpenVINO's attention has no input"
        )
    if s_aux is not None:
        raise NotConvertibleError("attends to sinks (s_aux), which are not passed to OpenVINO's attention")
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
    """While active, replaces products with a weight, and embeddings, by our placeholder operators.

    numbers: number of each weight, by the id of its placeholder in the model.
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
    """The model's output layer, applied only to the tokens whose logits are wanted."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self.bias = getattr(head, "bias", None)  # BERT's models take it from there
        self.wanted = torch.zeros(0, dtype=torch.long)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(tokens[self.wanted])


class Traceable(nn.Module):
    """The model in the form that is traced: forward(ids, positions, wanted, the five BLOCK_INPUTS, caches) → logits.

    weights: by number, as in the placeholder operators; shared with the original model.
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
        pass_arguments_on(copied)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, *paged: torch.Tensor
    ) -> torch.Tensor:
        self.head.wanted = wanted
        with self._operators:
            output = self.model(input_ids=ids[:, None], position_ids=positions[:, None], use_cache=False, paged=paged)
        return output.logits[:, 0]


@torch.no_grad()
def trace(model: Any, layers: Sequence[LayerShape]) -> tuple[Any, list[torch.Tensor]]:
    """Trace the model. Returns the trace, and the weights by the numbers in it. Raises NotConvertibleError."""
    traceable = Traceable(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python numbers are meant to become constants.
        traced = torch.jit.trace(traceable, example_inputs(layers), check_trace=False)
    return traced, traceable.weights


def example_inputs(layers: Sequence[LayerShape]) -> tuple[torch.Tensor, ...]:
    """Example inputs of a Traceable, with the right types and ranks."""
    tokens = torch.arange(NUM_EXAMPLE_TOKENS)
    counts = [[0], [0, NUM_EXAMPLE_TOKENS], [0], [0, 1], NUM_EXAMPLE_TOKENS]
    blocks = [torch.tensor(numbers, dtype=torch.int32) for numbers in counts]
    caches = [torch.zeros(1, shape.kv_heads, BLOCK_TOKENS, shape.head_dim) for shape in layers for _ in range(2)]
    return tokens, tokens, tokens[1:3], *blocks, *caches


def _copy_without_weights(model: Any) -> tuple[list[torch.Tensor], Any, dict[int, int]]:
    """The weights of linear and embedding layers, a copy of the model without them, and the number of each placeholder.

    A placeholder is one element expanded to the weight's shape. Other parameters are converted to float32. Tied weights have
    one number.
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


def cache_names(num_layers: int) -> list[str]:
    """Names of the inputs that hold keys and values, a pair per layer."""
    return [f"{kind}_cache.{layer}" for layer in range(num_layers) for kind in ("key", "value")]


def convert(model: Any, layers: Sequence[LayerShape]) -> tuple[ov.Model, list[torch.Tensor]]:
    """Convert a model. Returns it with the weights whose memory it reads, which the caller must keep alive.

    Raises NotConvertibleError, or OpenVINO's errors if it does not know an operator.
    """
    traced, weights = trace(model, layers)
    # `openvino.convert_model` is not used, since it may send statistics.
    frontend = FrontEndManager().load_by_framework("pytorch")
    frontend.add_extension(ConversionExtension("speclen::paged_attention", _convert_attention))
    frontend.add_extension(ConversionExtension("speclen::linear", lambda context: _convert_linear(context, weights)))
    frontend.add_extension(
        ConversionExtension("speclen::embedding", lambda context: _convert_embedding(context, weights))
    )
    decoder = TorchScriptPythonDecoder(traced)  # in a variable, since the front end does not keep it alive
    converted = frontend.convert(frontend.load(decoder))
    apply_moc_transformations(converted, cf=False, smart_reshape=False)
    _name_inputs(converted, layers)
    _fold_scalars(converted)
    return converted, weights


def _convert_attention(context: Any) -> list[ov.Output]:
    """The attention operator with its 28 inputs. The empty and zero ones belong to unused features."""
    inputs = [context.get_input(index) for index in range(10)]
    kv_heads, head_dim, scale, window = (context.get_values_from_const_input(index) for index in range(10, 14))
    nothing = {dtype: ops.constant(np.zeros(0, dtype)).output(0) for dtype in (np.int32, np.float32, np.uint8)}
    zero = ops.constant(np.array(0, np.int32)).output(0)
    none, none_real, none_byte = nothing[np.int32], nothing[np.float32], nothing[np.uint8]
    node = _PagedAttentionExtension(
        [
            *inputs[:9],
            ops.constant(np.array(scale, np.float32)).output(0),
            ops.constant(np.array(window, np.int32)).output(0),
            none_real,  # slopes of ALiBi
            inputs[9],
            none,  # aggregated scores
            *(none, none, none_real),  # rotated blocks
            *(none_real, zero, zero),  # sparse attention
            none_real,  # sinks
            *(zero, none, none, none),  # eviction
            none,  # kinds of tokens
            *(none_byte, none),  # bias of trees of tokens
        ]
    )
    sizes = {"num_k_heads": kv_heads, "num_v_heads": kv_heads, "k_head_size": head_dim, "v_head_size": head_dim}
    for name, size in sizes.items():
        node.get_rt_info()[name] = size
    return [node.output(0)]


def _convert_linear(context: Any, weights: list[torch.Tensor]) -> list[ov.Output]:
    rows = context.get_input(0)
    weight = weights[context.get_values_from_const_input(1)]
    # Most layers have [outputs, inputs], GPT-2's [inputs, outputs].
    transposed = bool(context.get_values_from_const_input(3))
    return [ops.matmul(rows, _constant(weight), False, transposed).output(0)]


def _convert_embedding(context: Any, weights: list[torch.Tensor]) -> list[ov.Output]:
    ids = context.get_input(0)
    table, axis = weights[context.get_values_from_const_input(1)], ops.constant(np.array(0, np.int32))
    return [ops.gather(_constant(table), ids, axis).output(0)]


def _constant(weight: torch.Tensor) -> ov.Output:
    """The weight as a float32 constant stored in its own dtype. The compilation sets the precision of products."""
    if weight.dtype == torch.float32:
        return ops.constant(weight.numpy(), shared_memory=True).output(0)
    raw = ov.Tensor(weight.view(torch.int16).numpy(), list(weight.shape), ov.Type.bf16)
    return ops.convert(ops.constant(raw, shared_memory=True), "f32").output(0)


def _name_inputs(model: ov.Model, layers: Sequence[LayerShape]) -> None:
    names = [*TOKEN_INPUTS, *BLOCK_INPUTS, *cache_names(len(layers))]
    for parameter, name in zip(model.get_parameters(), names, strict=True):
        if name in BLOCK_INPUTS or name in TOKEN_INPUTS:
            rank = parameter.get_partial_shape().rank.get_length()
            parameter.set_partial_shape(ov.PartialShape([-1] * rank))
        else:
            # The plugin chooses layout and type by KV_CACHE_PRECISION.
            parameter.set_element_type(ov.Type.dynamic)
            parameter.set_partial_shape(ov.PartialShape([-1, -1, -1, -1]))
        parameter.output(0).tensor.set_names({name})
    model.validate_nodes_and_infer_types()


def _fold_scalars(model: ov.Model) -> None:
    """Fold conversions of one-element constants. OpenVINO does not recognise the rotary embedding otherwise."""
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Convert":
            continue
        source = node.input_value(0).get_node()
        if source.get_type_name() == "Constant" and np.prod(source.get_output_shape(0)) == 1:
            number = np.array(source.data).astype(node.get_output_element_type(0).to_dtype())
            node.output(0).replace(ops.constant(number).output(0))
    model.validate_nodes_and_infer_types()
