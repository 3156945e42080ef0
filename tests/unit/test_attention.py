"""Attention over a ragged pool equals attention of each row alone, computed by its formula."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from speclen.worker.backends.attention import RowAttention, StepMasks, attend_rows
from speclen.worker.backends.kv_cache import KVPool, LayerShape

CPU = torch.device("cpu")
HEAD_DIM = 8


def by_formula(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """One query [heads, head_dim] over one row's keys and values [kv_heads, tokens, head_dim], in float64."""
    heads, kv_heads = len(query), len(keys)
    first = 0 if window is None else max(0, position - window + 1)
    outputs = []
    for head in range(heads):
        shared = head * kv_heads // heads
        scores = keys[shared, first : position + 1].double() @ query[head].double() * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        outputs.append(torch.softmax(scores, 0) @ values[shared, first : position + 1].double())
    return torch.stack(outputs)


def random_pool(dtype: torch.dtype, kv_heads: int, generator: torch.Generator) -> KVPool:
    pool = KVPool([LayerShape(kv_heads, HEAD_DIM)] * 2, 6, 60, dtype, CPU)
    for layer in pool.layers:
        layer.copy_(torch.randn(layer.shape, generator=generator))
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_queries", [1, 2, 5])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (None, 1.5), (7, 1.5)])
def test_ragged_rows_equal_each_row_alone(
    dtype: torch.dtype, num_queries: int, kv_heads: int, window: int | None, softcap: float | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    pool = random_pool(dtype, kv_heads, generator)
    before = [layer.clone() for layer in pool.layers]
    held = [3, 31, 17]
    positions = torch.tensor(held)[:, None] + torch.arange(num_queries)
    query = torch.randn(3, 4, num_queries, HEAD_DIM, generator=generator).to(dtype)
    key, value = torch.randn(2, 3, kv_heads, num_queries, HEAD_DIM, generator=generator).to(dtype)
    attention = RowAttention(pool, StepMasks(positions, 40, dtype), slice(None))
    output, _ = attend_rows(
        SimpleNamespace(layer_idx=1),
        query,
        key,
        value,
        None,
        row_attention=attention,
        scaling=0.3,
        sliding_window=window,
        softcap=softcap,
    )
    assert output.shape == (3, num_queries, 4, HEAD_DIM)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for row, start in enumerate(held):
        keys, values = before[1][row, 0].clone(), before[1][row, 1].clone()
        keys[:, start : start + num_queries], values[:, start : start + num_queries] = key[row], value[row]
        for column in range(num_queries):
            expected = by_formula(query[row, :, column], keys, values, start + column, 0.3, window, softcap)
            torch.testing.assert_close(output[row, column].double(), expected, atol=tolerance, rtol=tolerance)
    # Only the new tokens were written, in this layer alone.
    changed = (pool.layers[1] != before[1]).flatten(3).any(-1).any(-1).any(-1)
    assert changed.tolist() == [True, True, True, False, False, False]
    assert torch.equal(pool.layers[0], before[0])


def test_rows_of_one_length_may_be_written_as_a_block() -> None:
    """Both ways of writing store the same, for rows that do not begin at 0 too."""
    key, value = torch.randn(2, 2, 4, 3, HEAD_DIM)
    layers = []
    for start in (None, 5):
        pool = KVPool([LayerShape(4, HEAD_DIM)], 6, 60, torch.float32, CPU)
        masks = StepMasks(torch.arange(5, 8).expand(2, 3), 8, torch.float32)
        RowAttention(pool, masks, slice(None), first_row=3, start=start).write(pool.layers[0], key, value)
        layers.append(pool.layers[0])
    assert torch.equal(*layers)
    assert torch.equal(layers[0][3:5, 0, :, 5:8], key)
    assert torch.equal(layers[0][3:5, 1, :, 5:8], value)


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("queries", [1, 3])
def test_on_a_gpu_every_column_of_a_mask_begins_where_its_kernel_may_read(queries: int, repeats: int) -> None:
    """Story: a pass that was not recorded, of a model whose heads share keys, ended the process on a GPU."""
    masks = StepMasks(torch.zeros(2, 8, dtype=torch.long, device="meta"), 47, torch.float32)
    pool = KVPool([LayerShape(1, HEAD_DIM)], 2, 60, torch.float32, CPU)
    for column in range(8 - queries):
        mask = RowAttention(pool, masks, slice(column, column + queries)).mask(None, repeats)
        assert mask.shape == (2, 1, repeats * queries, 47)
        assert mask.storage_offset() % 8 == 0
        assert all(stride % 8 == 0 for stride in mask.stride()[:-1])
