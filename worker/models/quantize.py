"""Rounding of a model's weights to 8 bits, in place.

A weight is a whole number from -127 to 127 times the scale of its output: symmetric rounding per channel, as usual for
weight-only compression (LLM.int8() without its outliers, arXiv 2208.07339; nncf's INT8_SYM). Activations, keys and values
are not rounded, so rows stay independent of one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

LARGEST = 127


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A matrix as int8 `values` times float32 `scales`, one per output."""

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def widened(self) -> torch.Tensor:
        """The matrix in float32."""
        return self.values * self.scales


def int8_of(weight: torch.Tensor) -> Int8Weight | None:
    """The result of `round_weights` for a parameter; None where the parameter was not rounded."""
    return getattr(weight, "int8", None)


@torch.no_grad()
def round_weights(model: Any) -> None:
    """Round every linear layer's weight, which keeps its dtype and gets its integers as an attribute.

    Embeddings are not rounded, unless tied to the output layer.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D) and int8_of(module.weight) is None:
            # GPT-2's linear layers have [inputs, outputs].
            rounded = _rounded(module.weight, dim=0 if isinstance(module, Conv1D) else 1)
            module.weight.copy_(rounded.widened())
            module.weight.int8 = rounded  # type: ignore[attr-defined]


def _rounded(weight: torch.Tensor, dim: int) -> Int8Weight:
    """dim: of the inputs."""
    wide = weight.detach().float()
    scales = wide.abs().amax(dim, keepdim=True) / LARGEST
    scales[scales == 0] = 1.0
    return Int8Weight((wide / scales).round_().to(torch.int8), scales)
