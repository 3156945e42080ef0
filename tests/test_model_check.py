"""A model that the engine would run wrongly is refused, with the reason; those it runs exactly pass."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import worker.attention
from worker.cached_model import CachedModel
from worker.kv_cache import KVPool
from worker.model_check import check_model, inspect_layers
from worker.models import ModelError
from worker.packed_linear import private_copy

CPU = torch.device("cpu")


def cached(model: Any, dtype: torch.dtype = torch.float32) -> CachedModel:
    layers = inspect_layers(model, "model")
    return CachedModel(model, KVPool(layers, 2, 256, dtype, CPU), 256)


def other_family(model_type: str, **settings: Any) -> torch.nn.Module:
    """A tiny random model of a family that tiny_models does not have."""
    tokens = {"vocab_size": 320, "pad_token_id": None, "bos_token_id": None, "eos_token_id": 0}
    config = AutoConfig.for_model(model_type, **(tokens | settings))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


GROUPED = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families_that_run_exactly_pass(family: str, dtype: torch.dtype) -> None:
    model = tiny_models.build(family).to(dtype)
    one = cached(private_copy(model), dtype)
    check_model(one, model, family)
    assert one.pool.num_bytes_held() == 0, "the check must leave nothing behind"


def test_grouped_heads_are_seen() -> None:
    assert [(s.kv_heads, s.head_dim) for s in inspect_layers(tiny_models.build("qwen3"), "m")] == [(2, 8)] * 2


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bloom", "0 attention calls for 2 layers of bloom.*AttentionInterface"),
        ("mamba", "linear_attention.*cannot be rolled back"),
        ("t5", "t5 is an encoder-decoder"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_families_that_cannot_work_are_refused(family: str, reason: str) -> None:
    with pytest.raises(ModelError, match=f"^model: .*{reason}"):
        cached(tiny_models.build(family))


def test_linear_attention_is_refused() -> None:
    model = other_family(
        "qwen3_next",
        **GROUPED,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    with pytest.raises(ModelError, match=r"linear_attention.*cannot be rolled back"):
        cached(model)


def test_attention_sinks_are_refused() -> None:
    model = other_family(
        "gpt_oss", **GROUPED, num_local_experts=2, num_experts_per_tok=1, layer_types=["full_attention"] * 2
    )
    with pytest.raises(ModelError, match=r"attends with s_aux"):
        cached(model)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_other_rows_are_refused(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4, "original_max_position_embeddings": 128}
    model = tiny_models.build("llama")
    model.config.rope_parameters = rope
    with pytest.raises(ModelError, match=f"{kind} depend on the longest row"):
        cached(model)


@pytest.mark.parametrize(
    ("family", "forgotten"), [("mistral", "sliding_window"), ("gemma2", "sliding_window"), ("gemma2", "softcap")]
)
def test_an_attention_function_that_forgets_a_keyword_is_caught(
    family: str, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its window Mistral is wrong by 0.3 and Gemma 2 by 0.6: that is what the numeric comparison is for."""
    honest = worker.attention.attend_rows

    def forgetful(*args: Any, **options: Any) -> Any:
        if "row_attention" in options:
            options.pop(forgotten, None)
        return honest(*args, **options)

    monkeypatch.setattr(worker.attention, "attend_rows", forgetful)
    model = tiny_models.build(family)
    one = cached(private_copy(model))
    with pytest.raises(ModelError, match=rf"{family} gives other logits in ragged batches than alone \(by "):
        check_model(one, model, "model")


def test_a_model_that_ignores_positions_is_caught() -> None:
    model = tiny_models.build("llama")
    ours = private_copy(model)
    plain = ours.forward

    def ignoring(*args: Any, position_ids: torch.Tensor | None = None, **options: Any) -> Any:
        return plain(*args, position_ids=None, **options)

    ours.forward = ignoring
    with pytest.raises(ModelError, match="gives other logits"):
        check_model(cached(ours), model, "model")
