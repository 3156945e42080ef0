"""On a GPU all prompts of a pass attend in one kernel. What that computes is the same, and is tested, anywhere."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from speclen.worker.backends.kv_cache import KVPool, LayerShape
from speclen.worker.backends.passes import prompt_part
from speclen.worker.backends.torch.cached_model import CachedModel
from speclen.worker.backends.torch.row_attention import JoinedRows, PackedAttention, RowAttention, StepMasks
from tests.support import engines
from tests.support.engines import RandomLengths, check_greedy


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gpt2", "qwen3"])
def test_prompts_that_attend_together_put_out_what_the_target_alone_would(family: str) -> None:
    """Prompts of all lengths, in chunks, and drafts that catch up with many rows at once."""
    engine = engines.make_engine(
        engines.make_pair(family), RandomLengths(1, longest=4), max_batch_size=6, prefill_chunk=40
    )
    joined = []
    for model in (engine.target, engine.draft):
        assert isinstance(model, CachedModel)
        model.joins_prompts = True
        model.run = lambda ids, positions, attention, kept, run=model.run: (  # type: ignore[method-assign]
            joined.extend(part for part in parts_of(attention) if isinstance(part, JoinedRows))
            or run(ids, positions, attention, kept)
        )
    generator = random.Random(3)
    requests = [
        engines.request(str(at), engines.random_prompt(generator, 32), max_tokens=generator.randint(1, 14))
        for at in range(60)
    ]
    collected = engines.generate(engine, *requests)
    target, _ = engines.models(family)
    assert sum(check_greedy(target, one, collected.ids(one.request_id)) for one in requests) <= 1
    assert len(joined) > 20
    assert engines.DEVICE.type != "cpu" or engine.target.pool.num_bytes_held() == 0


def parts_of(attention: RowAttention | PackedAttention) -> list[RowAttention]:
    return list(attention.parts) if isinstance(attention, PackedAttention) else [attention]


def test_the_operators_of_a_pass_do_not_grow_with_its_prompts() -> None:
    """A GPU waits for the start of each operator: some ten microseconds."""
    model = joining_model()

    def operators_of(num_prompts: int) -> int:
        parts = [prompt_part(row, [1] * (3 + row), 0, model.device) for row in range(num_prompts)]
        with torch.inference_mode(), torch.profiler.profile() as profile:
            model.forward(parts)
        return sum(event.count for event in profile.key_averages() if event.key.startswith("aten::"))

    few, many = operators_of(2), operators_of(9)
    assert many < 1.3 * few  # of each its tokens are put together and its logits taken apart, once for all layers
    model.joins_prompts = False
    assert operators_of(9) > 3 * operators_of(2)


def joining_model() -> CachedModel:
    engine: Any = engines.make_engine(max_batch_size=9)
    engine.target.joins_prompts = True
    return engine.target


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("queries", [1, 3])
def test_on_a_gpu_every_column_of_a_mask_begins_where_its_kernel_may_read(queries: int, repeats: int) -> None:
    """Story: a pass that was not recorded, of a model whose heads share keys, ended the process on a GPU."""
    masks = StepMasks(torch.zeros(2, 8, dtype=torch.long, device="meta"), 47, torch.float32)
    pool = KVPool([LayerShape(1, 8)], 2, 60, torch.float32, torch.device("cpu"))
    for column in range(8 - queries):
        mask = RowAttention(pool, masks, slice(column, column + queries)).mask(None, repeats)
        assert mask.shape == (2, 1, repeats * queries, 47)
        assert mask.storage_offset() % 8 == 0
        assert all(stride % 8 == 0 for stride in mask.stride()[:-1])
