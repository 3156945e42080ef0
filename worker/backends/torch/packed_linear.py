"""Linear layers with weights packed once for the CPU's matrix kernels.

torch passes a plain matrix to oneDNN at every call, which rearranges it. With 2 to 40 rows, as in verification, a product
with a packed weight takes 0.4 to 0.8 of the time. With a single float32 row, a product with the transposed weight takes 0.8.
The price is a second copy of the weights, in float32 a third one.

The kernels are those of torch's compiler (`torch.ops.mkldnn`). They are first tried on a small product; if they are missing
or wrong, nothing is packed.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

log = logging.getLogger(__name__)

# Kernels in oneDNN's cache, one per shape of a product; its default of 1,024 takes more memory.
KERNELS_KEPT = "512"
ROWS_HINT = 16  # rows for which the layout is chosen; all numbers use it
PACKED_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """Replacement for `linear` that shares its weight and adds packed copies."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features = linear.in_features
        self._packed = _pack(linear.weight)
        self._transposed = linear.weight.detach().t().contiguous() if linear.weight.dtype == torch.float32 else None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self._transposed is not None and rows.numel() == self.in_features:
            row = rows.reshape(1, -1)
            product = row @ self._transposed if self.bias is None else torch.addmm(self.bias, row, self._transposed)
            return product.view(*rows.shape[:-1], -1)
        return _packed_product(rows, self._packed, self.bias)


def private_copy(model: Any) -> Any:
    """A copy that shares all parameters and buffers, so that its modules can be replaced without changing the original."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


@torch.no_grad()
def pack_linears(model: Any, room: int) -> None:
    """Replace the model's linear layers on the CPU by packed ones, if the copies take less than `room` bytes."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", KERNELS_KEPT)  # read when the first kernel is made
    found = _linears(model)
    if sum(linear.weight.nbytes * (1 + (linear.weight.dtype == torch.float32)) for *_, linear in found) < room:
        for parent, name, linear in found:
            setattr(parent, name, PackedLinear(linear))


def _linears(model: Any) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Every linear layer that can be packed, with its parent module and its name there."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        # Subclasses may do more than multiply.
        if type(child) is nn.Linear
        and child.weight.device.type == "cpu"
        and child.weight.dtype in PACKED_DTYPES
        and _works(child.weight.dtype)
    ]


@functools.cache
@torch.no_grad()
def _works(dtype: torch.dtype) -> bool:
    """True if the kernels exist and are right, tried on a small product with a bias."""
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(shape, generator=generator).to(dtype) for shape in ((48, 32), (5, 32)))
    bias = torch.ones(48, dtype=dtype)
    try:
        product = _packed_product(rows, _pack(weight), bias)
    except (AttributeError, RuntimeError) as error:
        log.info("no packed linear layers: %s", str(error).splitlines()[0])
        return False
    exact = F.linear(rows.double(), weight.double(), bias.double())
    return bool((product.double() - exact).abs().max() < (1e-4 if dtype == torch.float32 else 0.2))


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)  # noqa: SLF001 - has no public name


def _packed_product(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")  # noqa: SLF001 - likewise
