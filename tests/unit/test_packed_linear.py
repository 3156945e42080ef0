"""Packed layers compute what plain ones compute, and the caller's model stays as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speclen.worker.backends.torch.packed_linear import PackedLinear, num_packed_bytes, pack_linears, private_copy
from tests.support import tiny_models


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float32, 1e-5),
        pytest.param(
            *(torch.bfloat16, 2e-2),
            marks=pytest.mark.skipif(
                torch.backends.cpu.get_cpu_capability() != "AVX512", reason="oneDNN lays bfloat16 out for AVX-512"
            ),
        ),
    ],
)
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 200])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_equal_to_rounding(dtype: torch.dtype, tolerance: float, rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 80, bias=bias).to(dtype)
    inputs = torch.randn(2, rows, 48).to(dtype)
    with torch.inference_mode():
        packed = PackedLinear(linear)
        for one in (inputs, inputs[:1, :1], inputs[0]):
            torch.testing.assert_close(packed(one), linear(one), atol=tolerance, rtol=tolerance)


@torch.inference_mode()
def test_a_packed_copy_shares_the_weights_and_leaves_the_original_alone() -> None:
    model = tiny_models.build("llama")
    ours = private_copy(model)
    assert {id(p) for p in ours.parameters()} == {id(p) for p in model.parameters()}
    num_linears = sum(isinstance(module, nn.Linear) for module in model.modules())
    # In float32 two copies: one for single rows, one for more.
    assert num_packed_bytes(ours) == 2 * sum(m.weight.nbytes for m in model.modules() if isinstance(m, nn.Linear))
    assert pack_linears(ours) == num_linears == 2 * 7 + 1
    assert not any(isinstance(module, nn.Linear) for module in ours.modules())
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    ids = torch.arange(1, 20)[None]
    torch.testing.assert_close(ours(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-4, rtol=1e-4)


def test_layers_that_do_more_than_multiply_are_left_alone() -> None:
    class Scaled(nn.Linear):
        pass

    model = nn.Sequential(Scaled(8, 8), nn.Linear(8, 8).half(), nn.Linear(8, 8))
    assert pack_linears(model) == 1
    assert isinstance(model[2], PackedLinear)
