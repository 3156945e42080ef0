"""Triton's kernels compute what the plain operators do. Without a GPU they run in Triton's interpreter, see conftest."""

from __future__ import annotations

import copy
from typing import Any

import engines
import numpy as np
import pytest
import tiny_models
import torch

pytest.importorskip("triton")

from speclen.worker.backends import fused, llama
from speclen.worker.backends.cached_model import CachedModel
from speclen.worker.backends.check import inspect_layers
from speclen.worker.backends.kv_cache import KVPool, LayerShape
from speclen.worker.backends.passes import PassPart, StepRows, prompt_part

CONTEXT = 64
DTYPES = [torch.float32, torch.bfloat16]
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(engines.DEVICE, dtype)


def test_they_find_out_whether_they_run() -> None:
    assert fused.works_on(engines.DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [32, 48, 200])
def test_sums_are_normed(size: int, dtype: torch.dtype) -> None:
    x, change = randn(3, 2, size, dtype=dtype), randn(3, 2, size, dtype=dtype).flip(0)
    weight = randn(size, dtype=dtype)
    for other in (None, change):
        total, normed = fused.add_norm(x, other, weight, 1e-5)
        expected = x if other is None else x + other
        # The interpreter cuts what it rounds to bfloat16.
        torch.testing.assert_close(total, expected, rtol=0 if dtype is torch.float32 else 2**-7, atol=0)
        wide = total.float()
        plain = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.float()
        torch.testing.assert_close(normed.float(), plain, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def test_a_slice_is_normed_too() -> None:
    x, change, weight = randn(4, 3, 32), randn(4, 3, 32).flip(0), torch.ones(32, device=engines.DEVICE)
    total, _ = fused.add_norm(x[:, -1:], change[:, -1:], weight, 1e-5)
    assert torch.equal(total, x[:, -1:] + change[:, -1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 1024, 1100])
def test_gates(size: int, dtype: torch.dtype) -> None:
    gate_up = randn(2, 3, 2 * size, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    plain = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(fused.gate(gate_up), plain, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 8), (3, 3, 12), (40, 8, 16)])
def test_queries_are_turned_and_keys_and_values_stored(heads: int, kv_heads: int, head_dim: int) -> None:
    """Rows of any length, not the first of the pool, whose positions are some columns of a step's."""
    rows, queries, first_row = 3, 2, 1
    pool = KVPool([LayerShape(kv_heads, head_dim)], 5, 40, torch.float32, engines.DEVICE)
    projected = randn(rows, queries, heads + 2 * kv_heads, head_dim)
    turns = randn(rows, queries, 2, head_dim)
    cos, sin = turns.unsqueeze(2).unbind(3)
    every = torch.tensor([[3, 4, 5, 6], [0, 1, 2, 3], [30, 31, 32, 33]], device=engines.DEVICE)
    positions = every[:, 1:3]
    query = fused.rotate_and_store(projected, cos, sin, positions, first_row, pool.layers[0])

    turning, value = projected.split([heads + kv_heads, kv_heads], dim=2)
    turned = turning * cos + turning.roll(head_dim // 2, dims=-1) * sin
    torch.testing.assert_close(query, turned[:, :, :heads].transpose(1, 2), rtol=1e-5, atol=1e-5)
    expected = torch.zeros_like(pool.layers[0])
    for row in range(rows):
        for column in range(queries):
            place = int(positions[row, column])
            expected[first_row + row, 0, :, place] = turned[row, column, heads:]
            expected[first_row + row, 1, :, place] = value[row, column]
    torch.testing.assert_close(pool.layers[0], expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_model_of_them_gives_the_same_logits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, which go in packed passes, and rows of several lengths; with windows, biases and normed heads."""
    found = []
    for kernels in (None, fused):
        monkeypatch.setattr(llama, "kernels_for", lambda device, chosen=kernels: chosen)
        model: Any = copy.deepcopy(engines.models(family)[0])
        shapes = inspect_layers(model, family)
        pool = KVPool(shapes, 3, CONTEXT, torch.float32, engines.DEVICE)
        decoder = llama.rewrite(model, shapes, CONTEXT)
        assert decoder is not None
        cached = CachedModel(decoder, pool, CONTEXT)
        generator = torch.Generator().manual_seed(5)
        ids = torch.randint(tiny_models.VOCAB_SIZE, (3, 30), generator=generator)
        lengths = np.array([20, 3, 11])
        logits = cached.forward(
            [prompt_part(row, ids[row, :length].tolist(), 0, pool.device) for row, length in enumerate(lengths)]
        )
        rows = StepRows(lengths, 4, pool.device)
        logits += cached.forward([PassPart(rows, ids[:, 20:23].to(pool.device), num_logits=2, column=0)])
        logits += cached.forward([PassPart(rows, ids[:, 23:24].to(pool.device), num_logits=1, column=3)])
        found.append(torch.cat([each.flatten(0, 1) for each in logits]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
