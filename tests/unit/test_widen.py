"""A widened model computes what the small one computes: the law is equality of logits within the dtype's rounding."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from speclen.worker.models.naming import Shape
from speclen.worker.models.widen import widen

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


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(64, 2, 4, 172),
        Shape(192, 4, 12, 516),
        Shape(192, 2, 4, 172),
        Shape(64, 5, 8, 5 * 172),
        Shape(320, 3, 12, 344),
    ],
)
def test_same_logits_in_float32(shape: Shape, tied: bool) -> None:
    model = small(tie_word_embeddings=tied)
    wide = widen(model, shape, "cpu", torch.float32)
    assert (logits(wide) - logits(model)).abs().max() / logits(model).std() < 2e-5
    assert (wide.lm_head.weight is wide.model.embed_tokens.weight) == tied
