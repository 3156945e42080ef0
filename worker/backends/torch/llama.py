"""Llama-style models rewritten in fewer operators.

transformers launches 39 operators in each layer of a Llama, views not counted, most of them on a few kilobytes: a small
draft model spends more time on launches than on arithmetic. This module needs 28. Projections of the same input are one
matrix product; the rotary embedding rotates queries and keys together, with angles from a table; a norm takes six operators
instead of eight. In captured passes on a GPU, a few kernels of `fused` replace all operators between the matrix products.
The logits differ only by rounding; `check_model` compares them before serving.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import SiLUActivation
from transformers.modeling_outputs import CausalLMOutput

from speclen.worker.backends.check import first_line
from speclen.worker.backends.kv_cache import LayerShape
from speclen.worker.backends.torch.attention import PackedAttention, RecordedRows, RowAttention, attend

# Classes of transformers with layers of norm, attention, norm, gated MLP. The last one also normalises queries and keys.
KNOWN_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
SILUS = (nn.SiLU, SiLUActivation)
FIRST_POSITIONS = 4096  # positions whose angles are computed at the start, on a CPU
Kernels: TypeAlias = Any  # the module `fused`, whose import fails without Triton

log = logging.getLogger(__name__)


def rewrite(model: Any, shapes: Sequence[LayerShape], max_context_length: int) -> LlamaDecoder | None:
    """The same model in fewer operators; None for other families, and for linear layers that do more than multiply.

    shapes: of the model's layers. The weights are shared: those of merged layers become views in `model`.
    """
    if type(model).__name__ not in KNOWN_CLASSES or not type(model).__module__.startswith("transformers."):
        return None
    # Layers of other types, such as quantised ones, cannot be merged.
    if not all(type(module) is nn.Linear for name, module in model.named_modules() if name.endswith("_proj")):
        return None
    weight = model.get_input_embeddings().weight
    return LlamaDecoder(model, shapes, max_context_length, kernels_for(weight.device))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, rounded once at the end."""

    scaled_weight: torch.Tensor
    scaled_eps: torch.Tensor

    def __init__(self, norm: Any) -> None:
        super().__init__()
        size = norm.weight.numel()
        self.weight = norm.weight
        self.eps = float(norm.variance_epsilon)
        # x / hypot(|x|, sqrt(size * eps)) * sqrt(size) is the same, and |x| takes a single operator.
        self.register_buffer("scaled_weight", norm.weight.detach().float() * size**0.5)
        self.register_buffer("scaled_eps", torch.tensor((size * self.eps) ** 0.5, device=norm.weight.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu":
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return (wide / torch.hypot(length, self.scaled_eps)).mul_(self.scaled_weight).to(x.dtype)


class Layer(nn.Module):
    """One decoder layer. index: of the layer in the pool."""

    def __init__(self, layer: Any, index: int, shape: LayerShape) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.index = index
        self.shape = shape
        self.scaling = attention.scaling
        self.num_heads = attention.q_proj.out_features // shape.head_dim
        self.attention_norm = RMSNorm(layer.input_layernorm)
        self.qkv = merge([attention.q_proj, attention.k_proj, attention.v_proj])
        self.query_norm = RMSNorm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.key_norm = RMSNorm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.output = attention.o_proj
        self.mlp_norm = RMSNorm(layer.post_attention_layernorm)
        self.gate_up = merge([mlp.gate_proj, mlp.up_proj])
        self.activation = mlp.act_fn
        self.has_silu = isinstance(mlp.act_fn, SILUS)
        self.down = mlp.down_proj

    def forward(
        self,
        x: torch.Tensor,
        change: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        row_attention: RowAttention | PackedAttention,
        kernels: Kernels | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the residual stream before this layer's MLP, and the MLP's output.

        x, change: the same of the previous layer. cos, sin: [rows, queries, 1, head_dim], see LlamaDecoder. kernels: given
        only with RecordedRows.
        """
        x, normed = add_norm(x, change, self.attention_norm, kernels)
        attended = self.output(self._attend(normed, cos, sin, row_attention, kernels))
        x, normed = add_norm(x, attended, self.mlp_norm, kernels)
        return x, self.down(self._gate(self.gate_up(normed), kernels))

    def _gate(self, gate_up: torch.Tensor, kernels: Kernels | None) -> torch.Tensor:
        if kernels is not None and self.has_silu:
            return kernels.gate(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activation(gate) * up

    def _attend(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        row_attention: RowAttention | PackedAttention,
        kernels: Kernels | None,
    ) -> torch.Tensor:
        heads, kv_heads = self.num_heads, self.shape.kv_heads
        projected = self.qkv(x).view(*x.shape[:2], heads + 2 * kv_heads, self.shape.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            query, key, value = projected.split([heads, kv_heads, kv_heads], dim=2)
            projected = torch.cat([self.query_norm(query), self.key_norm(key), value], dim=2)
        if kernels is not None and isinstance(row_attention, RecordedRows):
            rows, positions = row_attention.rows, row_attention.positions
            layer, num_places = row_attention.pool.layers[self.index], row_attention.num_places
            by_row = projected.view(*positions.shape, *projected.shape[2:])
            query = kernels.rotate_and_store(by_row, cos, sin, rows, positions, layer)
            attended = kernels.attend(query, rows, positions, layer, self.scaling, self.shape.window, num_places)
            return attended.view(*x.shape[:2], -1)
        turning, value = projected.split([heads + kv_heads, kv_heads], dim=2)
        turned = turning * cos + turning.roll(self.shape.head_dim // 2, dims=-1) * sin
        query, key, value = (part.transpose(1, 2) for part in (*turned.split([heads, kv_heads], dim=2), value))
        attended = attend(self.index, row_attention, query, key, value, self.scaling, self.shape.window)
        return attended.flatten(2)


class LlamaDecoder(nn.Module):
    """A Llama-style model with the part of transformers' interface that the engine uses.

    angles: [positions, 2, head_dim], cosines and sines of each position, with the first half of the sines negated: a rotated
    head is x * cos + (x with its halves exchanged) * sin. On a CPU the table grows. Elsewhere it has all max_context_length
    positions, since captured passes need fixed addresses.
    """

    angles: torch.Tensor

    def __init__(
        self, model: Any, shapes: Sequence[LayerShape], max_context_length: int, kernels: Kernels | None = None
    ) -> None:
        super().__init__()
        self.kernels = kernels
        self.config = model.config
        self.embedding = model.get_input_embeddings()
        self.layers = nn.ModuleList(
            Layer(layer, index, shape)
            for index, (layer, shape) in enumerate(zip(model.model.layers, shapes, strict=True))
        )
        self.norm = RMSNorm(model.model.norm)
        self.head = model.lm_head
        self.rotary = model.model.rotary_emb
        self._most_positions = max_context_length
        on_cpu = self.embedding.weight.device.type == "cpu"
        num_positions = min(FIRST_POSITIONS, max_context_length) if on_cpu else max_context_length
        self.register_buffer("angles", self._angles_of(num_positions))

    def _angles_of(self, num_positions: int) -> torch.Tensor:
        weight = self.embedding.weight
        cos, sin = self.rotary(weight[:1], torch.arange(num_positions, device=weight.device)[None])
        sin = torch.cat([-sin[..., : sin.shape[-1] // 2], sin[..., sin.shape[-1] // 2 :]], dim=-1)
        return torch.stack([cos[0], sin[0]], dim=1)

    def reach(self, position_ids: torch.Tensor) -> None:
        """Extend the table of angles to these positions, at least doubling it."""
        needed = int(position_ids.max()) + 1
        if needed > len(self.angles):
            self.angles = self._angles_of(min(self._most_positions, max(needed, 2 * len(self.angles))))

    def leave_out_kernels(self, reason: str) -> None:
        """Use torch's kernels from now on, after a warning."""
        warn_left_out(reason)
        self.kernels = None

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of tokens."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        """The layer that makes the logits."""
        return self.head

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        row_attention: RowAttention | PackedAttention,
        logits_to_keep: int | torch.Tensor,
        use_cache: bool = False,
    ) -> CausalLMOutput:
        """Logits [rows, kept, vocab]. input_ids, position_ids: [rows, queries].

        logits_to_keep: number of last positions, or their indices. use_cache: unused, as keys are in row_attention's pool.
        """
        if len(self.angles) < self._most_positions:
            self.reach(position_ids)
        cos, sin = self.angles[position_ids].unsqueeze(2).unbind(3)
        # Launching one of our kernels from Python takes longer than launching the operators it replaces from C++.
        kernels = self.kernels if isinstance(row_attention, RecordedRows) else None
        x, change = self.embedding(input_ids), None
        for layer in self.layers:
            x, change = layer(x, change, cos, sin, row_attention, kernels)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        assert change is not None
        _, normed = add_norm(x[:, kept], change[:, kept], self.norm, kernels)
        return CausalLMOutput(logits=self.head(normed))


def add_norm(
    x: torch.Tensor, change: torch.Tensor | None, norm: RMSNorm, kernels: Kernels | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + change, and its norm. change may be None."""
    if kernels is not None:
        return kernels.add_norm(x, change, norm.weight, norm.eps)
    if change is not None:
        x = x + change
    return x, norm(x)


def merge(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One layer whose output is the concatenation of the given layers' outputs.

    It takes no additional memory: the given layers' weights become views of its weight.
    """
    first = linears[0]
    sizes = [linear.out_features for linear in linears]
    with torch.inference_mode(False), torch.no_grad():
        merged = nn.Linear(first.in_features, sum(sizes), bias=first.bias is not None, device="meta")
        merged.weight = _share([linear.weight for linear in linears])
        if first.bias is not None:
            merged.bias = _share([linear.bias for linear in linears])
    return merged


def _share(parts: Sequence[torch.Tensor]) -> nn.Parameter:
    """Concatenate the parts, which become views of the result."""
    whole = nn.Parameter(torch.cat([part.detach() for part in parts]), requires_grad=False)
    for part, piece in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = piece
    return whole


@cache
def kernels_for(device: torch.device) -> Kernels | None:
    """The module `fused` on a GPU; None elsewhere, or if it cannot be imported."""
    if device.type != "cuda":
        return None
    try:
        from speclen.worker.backends.torch import fused
    except Exception as error:  # no Triton, or one that is broken
        warn_left_out(first_line(error))
        return None
    return fused


def warn_left_out(reason: str) -> None:
    log.warning("Triton's kernels are not used, so passes take longer: %s", reason)
