"""Pools fit the memory there is, and the caller's models stay as they are."""

from __future__ import annotations

import dataclasses

import engines
import pytest
import tiny_models
import torch

import worker.preparation
from worker.engine_config import EngineConfig
from worker.models import ModelError
from worker.packed_linear import PackedLinear
from worker.preparation import prepare


def test_the_callers_models_stay_as_they_are() -> None:
    pair = engines.make_pair("llama")
    prepared = prepare(pair, EngineConfig(max_batch_size=2))
    assert pair.target.config._attn_implementation == "sdpa"
    assert not any(isinstance(module, PackedLinear) for module in pair.target.modules())
    assert prepared.target.model is not pair.target
    assert {id(p) for p in prepared.target.model.parameters()} == {id(p) for p in pair.target.parameters()}


def test_weights_are_not_copied_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.preparation, "free_memory", lambda device: 2**16)
    prepared = prepare(engines.make_pair("llama"), EngineConfig(max_batch_size=2))
    assert not any(isinstance(module, PackedLinear) for module in prepared.target.model.modules())
    # Two layers of two heads of 8 in each model: 512 bytes a token, and half of 64 KiB may be used.
    assert prepared.max_kv_tokens == 2**15 // 512


def test_limits_may_be_set() -> None:
    config = EngineConfig(max_batch_size=3, max_context_length=100, max_kv_tokens=150, max_speculation_length=4)
    prepared = prepare(engines.make_pair("llama"), config)
    assert (prepared.max_context_length, prepared.max_kv_tokens) == (100, 150)
    assert prepared.target.pool.max_length >= 104
    config = dataclasses.replace(config, max_context_length=10**6, max_kv_tokens=None)
    prepared = prepare(engines.make_pair("llama"), config)
    assert (prepared.max_context_length, prepared.max_kv_tokens) == (tiny_models.MAX_POSITIONS, 3 * (256 + 4))


@pytest.mark.parametrize(("free", "expected"), [(10**12, 256), (2**20, 89)])
def test_on_a_gpu_the_context_is_cut_to_what_fits(free: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic alone: 0.8 of 1 MiB over 16 rows of 512 bytes a token, less the 6 tokens that a step may overshoot
    and the 7 that rows of a recorded pass may write which are only there to fill it up."""
    monkeypatch.setattr(worker.preparation, "free_memory", lambda device: free)
    pair = engines.make_pair("llama", device=torch.device("cuda:0"))
    config = EngineConfig(max_batch_size=16, max_speculation_length=6)
    assert worker.preparation._context_length(pair, config, 512) == expected
    monkeypatch.setattr(worker.preparation, "free_memory", lambda device: 1000)
    with pytest.raises(ModelError, match=r"16 rows need more KV than the 0.0 GiB left on cuda:0: lower the batch size"):
        worker.preparation._context_length(pair, config, 512)


def test_models_that_are_refused_are_named() -> None:
    pair = engines.make_pair("llama", draft=tiny_models.build("bloom"), draft_name="some/bloom")
    with pytest.raises(ModelError, match=r"^some/bloom: 0 attention calls"):
        prepare(pair, EngineConfig(max_batch_size=2))
