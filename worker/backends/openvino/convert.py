"""Conversion of a transformers model to OpenVINO: from tokens in rows of blocks to the wanted logits.

Attention is OpenVINO GenAI's operator, `PagedAttentionExtension`. It is not part of OpenVINO's public interface, so the
version is pinned, and every loaded model is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops
from openvino._offline_transformations import apply_moc_transformations
from openvino.frontend import FrontEndManager
from openvino.frontend.pytorch import ConversionExtension
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder
from openvino.op import _PagedAttentionExtension

from speclen.worker.backends.kv_cache import LayerShape
from speclen.worker.backends.openvino.trace import trace

TOKEN_INPUTS = ("input_ids", "position_ids", "wanted")
BLOCK_INPUTS = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins", "max_context_len")


def cache_names(num_layers: int) -> list[str]:
    """Inputs that hold keys and values, a pair per layer."""
    return [f"{kind}_cache.{layer}" for layer in range(num_layers) for kind in ("key", "value")]


def convert(model: Any, layers: Sequence[LayerShape]) -> tuple[ov.Model, list[torch.Tensor]]:
    """The model with the inputs named above, and the weights whose memory it reads: it does not keep them itself.

    Raises NotConvertibleError, or OpenVINO's errors for operators that it does not know.
    """
    traced, weights = trace(model, layers)
    # Not `openvino.convert_model`, which may send statistics.
    frontend = FrontEndManager().load_by_framework("pytorch")
    frontend.add_extension(ConversionExtension("speclen::paged_attention", _paged_attention))
    frontend.add_extension(ConversionExtension("speclen::linear", lambda context: _linear(context, weights)))
    frontend.add_extension(ConversionExtension("speclen::embedding", lambda context: _embedding(context, weights)))
    decoder = TorchScriptPythonDecoder(traced)  # named, since the front end does not keep it
    converted = frontend.convert(frontend.load(decoder))
    apply_moc_transformations(converted, cf=False, smart_reshape=False)
    _name_inputs(converted, layers)
    _fold_scalars(converted)
    return converted, weights


def _paged_attention(context: Any) -> list[ov.Output]:
    """The operator with its 28 inputs; the empty and zero ones belong to unused features."""
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


def _linear(context: Any, weights: list[torch.Tensor]) -> list[ov.Output]:
    rows = context.get_input(0)
    weight = weights[context.get_values_from_const_input(1)]
    # Most layers have [outputs, inputs], GPT-2's [inputs, outputs].
    transposed = bool(context.get_values_from_const_input(3))
    return [ops.matmul(rows, _constant(weight), False, transposed).output(0)]


def _embedding(context: Any, weights: list[torch.Tensor]) -> list[ov.Output]:
    ids = context.get_input(0)
    table, axis = weights[context.get_values_from_const_input(1)], ops.constant(np.array(0, np.int32))
    return [ops.gather(_constant(table), ids, axis).output(0)]


def _constant(weight: torch.Tensor) -> ov.Output:
    """The weight as float32, stored in its own dtype. The compilation sets the precision of products."""
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
    """Replace converted constants of one element by constants, else the rotary embedding is not recognised."""
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Convert":
            continue
        source = node.input_value(0).get_node()
        if source.get_type_name() == "Constant" and np.prod(source.get_output_shape(0)) == 1:
            number = np.array(source.data).astype(node.get_output_element_type(0).to_dtype())
            node.output(0).replace(ops.constant(number).output(0))
    model.validate_nodes_and_infer_types()
