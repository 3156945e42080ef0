"""A widened model computes what the small one computes: the law is equality of logits within the dtype's rounding."""

from __future__ import annotations

import math
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from speclen.worker.models.naming import BUNDLED, Shape, parse_shape
from speclen.worker.models.widen import coefficients, count_parameters, widen

IDS = torch.tensor([[1, 7, 300, 4, 4, 250, 31, 90, 2, 11]])


def small(seed: int = 0, **overrides: object) -> LlamaForCausalLM:
    """A random model with the norms away from one, so that a misplaced coefficient shows."""
    settings = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(settings | overrides))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(std=0.2)
    return model


@torch.no_grad()
def logits(model: LlamaForCausalLM) -> torch.Tensor:
    return model(IDS, use_cache=False).logits.float()


def relative_difference(wide: LlamaForCausalLM, narrow: LlamaForCausalLM) -> float:
    return float((logits(wide) - logits(narrow)).abs().max() / logits(narrow).std())


@pytest.mark.parametrize("num_copies", range(1, 40))
def test_coefficients_are_powers_of_two_that_sum_to_one(num_copies: int) -> None:
    parts = coefficients(num_copies)
    assert len(parts) == num_copies
    assert sum(parts) == 1.0
    assert all(math.frexp(part)[0] == 0.5 for part in parts)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(hidden=128),
        Shape(hidden=192, layers=4),
        Shape(hidden=192, heads=4, ffn=172),
        Shape(heads=8),
        Shape(ffn=5 * 172),
        Shape(layers=5),
        Shape(hidden=320, heads=12, ffn=344, layers=3),
    ],
)
def test_same_logits_in_float32(shape: Shape, tied: bool) -> None:
    model = small(tie_word_embeddings=tied)
    wide = widen(model, shape, "cpu", torch.float32)
    assert relative_difference(wide, model) < 2e-5
    assert (wide.lm_head.weight is wide.model.embed_tokens.weight) == tied


def test_bfloat16_differs_no_more_than_bfloat16_itself() -> None:
    """Weights are exact, so the widened model is as near to the float32 truth as the small bfloat16 model is."""
    exact = small().to(torch.bfloat16).float()
    narrow = small().to(torch.bfloat16)
    wide = widen(exact, Shape(hidden=192, layers=4), "cpu", torch.bfloat16)
    own_rounding = relative_difference(narrow, exact)
    assert 0 < own_rounding < 0.2
    assert relative_difference(wide, exact) < 2 * own_rounding


def test_every_bfloat16_weight_is_a_copy_or_a_power_of_two_part() -> None:
    narrow = small().to(torch.bfloat16)
    wide = widen(narrow, Shape(hidden=192), "cpu", torch.bfloat16)
    value = narrow.model.layers[0].mlp.down_proj.weight[5, 3].item()
    copies = wide.model.layers[0].mlp.down_proj.weight[5::64, 3::172]
    assert copies.tolist() == [[value / 2, value / 4, value / 4]] * 3


def test_the_step_through_a_cache_is_widened_too() -> None:
    model = small()
    wide = widen(model, Shape(hidden=128, layers=3), "cpu", torch.float32)
    with torch.no_grad():
        cache = wide(IDS[:, :6], use_cache=True).past_key_values
        rest = wide(IDS[:, 6:], past_key_values=cache, use_cache=True).logits
    assert torch.allclose(rest, logits(model)[:, 6:], atol=2e-4)


def test_shapes_are_what_was_asked_for_and_heads_and_ffn_follow_hidden() -> None:
    config = widen(small(), Shape(hidden=192, layers=4), "cpu", torch.float32).config
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (192, 4, 516)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (12, 6, 16)


@pytest.mark.parametrize(
    ("name", "millions"), [("bundled:target-60m", 58), ("bundled:draft-125m", 125), ("bundled:target-6.7b", 6484)]
)
def test_named_shapes_have_the_size_in_their_name(name: str, millions: int) -> None:
    layers = 6 if "target" in name else 1
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    shape = BUNDLED[name][1]
    assert shape is not None
    assert count_parameters(config, shape) // 1_000_000 == millions


def test_building_60_million_parameters_takes_seconds() -> None:
    config = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6}
    model = small(**config, num_key_value_heads=4, head_dim=64)
    start = time.monotonic()
    wide = widen(model, BUNDLED["bundled:target-60m"][1], "cpu", torch.bfloat16)
    assert time.monotonic() - start < 30
    assert wide.dtype == torch.bfloat16
    assert relative_difference(wide, model) < 0.5


@pytest.mark.parametrize(
    "text", ["hidden", "hidden=-1", "hidden=0", "width=3", "hidden=64,hidden=64", "hidden=1.5", ""]
)
def test_bad_shapes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="shape"):
        parse_shape("tiny", text)


def test_shapes_that_are_no_multiple_name_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"hidden=100 is not a multiple of the model's 64; the nearest is 128"):
        widen(small(), Shape(hidden=100), "cpu", torch.float32)
    with pytest.raises(ValueError, match="fewer than the model's 2"):
        widen(small(), Shape(layers=1), "cpu", torch.float32)


def test_other_families_and_biases_are_refused() -> None:
    with pytest.raises(ValueError, match="biases"):
        widen(small(attention_bias=True), Shape(hidden=128), "cpu", torch.float32)
