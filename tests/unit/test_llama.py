"""Models in fewer operators give the logits of transformers' own code, and share its weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import speclen.worker.engine.preparation
from speclen.worker.backends.check import check_model, inspect_layers
from speclen.worker.backends.kv_cache import KVPool
from speclen.worker.backends.torch.cached_model import CachedModel
from speclen.worker.backends.torch.llama import LlamaDecoder, rewrite
from speclen.worker.backends.torch.packed_linear import private_copy
from speclen.worker.engine.preparation import EngineConfig, prepare
from tests.support import tiny_models
from tests.support.engines import make_pair

CPU = torch.device("cpu")
CONTEXT = 200
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "own activation": ("llama", {"hidden_act": "gelu"}),
    "scaled rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}),
    "window": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "window in one layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "normed heads": ("qwen3", {}),
}


def rewritten(model: Any, dtype: torch.dtype = torch.float32) -> CachedModel:
    copy = private_copy(model)
    pool = KVPool(inspect_layers(copy, "model"), 2, CONTEXT, dtype, CPU)
    decoder = rewrite(copy, pool.shapes, CONTEXT)
    assert isinstance(decoder, LlamaDecoder)
    return CachedModel(decoder, pool, CONTEXT)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_those_of_transformers(variant: str, dtype: torch.dtype) -> None:
    family, settings = VARIANTS[variant]
    model = tiny_models.build(family, **settings).to(dtype)
    check_model(rewritten(model, dtype), model, variant)


def halved_angles(model: Any, *others: Any) -> Any:
    decoder = rewrite(model, *others)
    decoder.angles.mul_(0.5)
    return decoder


def no_longer_there(model: Any, *others: Any) -> Any:
    raise AttributeError("'LlamaAttention' object has no attribute 'scaling'")


@pytest.mark.parametrize(
    ("wrong", "reason"), [(halved_angles, "gives other logits"), (no_longer_there, "no attribute 'scaling'")]
)
def test_a_rewritten_model_that_is_wrong_is_replaced(
    wrong: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(speclen.worker.engine.preparation, "rewrite", wrong)
    pair = make_pair("llama")
    prepared = prepare(pair, EngineConfig(max_batch_size=2, backend="torch"))
    assert type(prepared.target.model) is type(pair.target)
    assert "llama runs in transformers' own operators, which is slower" in caplog.text
    assert reason in caplog.text
