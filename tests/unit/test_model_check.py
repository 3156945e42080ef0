"""A model that the engine would run wrongly is refused with the reason; models that it runs exactly pass, also rewritten."""

from typing import Any

import pytest
import torch

import speclen.worker.backends.check
import speclen.worker.backends.torch.attention
import speclen.worker.engine.preparation
from speclen.worker.backends.check import check_model, inspect_layers
from speclen.worker.backends.kv_cache import KVPool
from speclen.worker.backends.torch.cached_model import CachedModel
from speclen.worker.backends.torch.llama import LlamaDecoder, rewrite
from speclen.worker.backends.torch.packed_linear import private_copy
from speclen.worker.engine.preparation import EngineConfig, prepare
from speclen.worker.models.naming import ModelError
from tests.support import tiny_models
from tests.support.engines import make_pair

CPU = torch.device("cpu")


def cached(model: Any, dtype: torch.dtype = torch.float32) -> CachedModel:
    layers = inspect_layers(model, "model")
    return CachedModel(model, KVPool(layers, 2, 256, dtype, CPU), 256)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families_that_run_exactly_pass(family, dtype):
    model = tiny_models.build(family).to(dtype)
    one = cached(private_copy(model), dtype)
    check_model(one, model, family)
    assert one.pool.num_bytes_held() == 0, "the check must leave nothing behind"


def with_sinks() -> Any:
    """A gpt-oss model with sinks large enough to matter."""
    model = tiny_models.build(
        "gpt_oss", **tiny_models.GROUPED, num_local_experts=2, num_experts_per_tok=1, layer_types=["full_attention"] * 2
    )
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    return model


EXPERTS = {"num_experts_per_tok": 1, "sliding_window": 64}
PHIMOE = {**tiny_models.GROUPED, **EXPERTS, "num_local_experts": 2}
OLMOE = {**tiny_models.GROUPED, **EXPERTS, "num_experts": 2}


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("phimoe", PHIMOE, "passes a window of all tokens to attention, but its mask allows 64 of 66"),
        ("olmoe", OLMOE, "passes a window of 64 tokens to attention, but its mask allows 66 of 66"),
    ],
)
def test_long_windows_must_agree_with_the_configuration(family, settings, reason, monkeypatch):
    """PhiMoE masks by a window that it does not pass to attention; OLMoE passes one by which it does not mask.

    Windows that are too long to be run must at least agree.
    """
    with pytest.raises(ModelError, match=f"layer 0 of {family} {reason}"):
        inspect_layers(tiny_models.build(family, **settings), "model")
    monkeypatch.setitem(speclen.worker.backends.check.BUDGET, "cpu", 1.0)
    model = tiny_models.build(family, **settings)
    with pytest.raises(ModelError, match=f"the window of 64 tokens in its configuration .* of {family} do disagree"):
        check_model(cached(private_copy(model)), model, "model")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_other_rows_are_refused(kind):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4, "original_max_position_embeddings": 128}
    model = tiny_models.build("llama")
    model.config.rope_parameters = rope
    with pytest.raises(ModelError, match=f"{kind} depend on the longest sequence"):
        cached(model)


@pytest.mark.parametrize(
    ("family", "forgotten"),
    [("mistral", "sliding_window"), ("gemma2", "sliding_window"), ("gemma2", "softcap"), ("gpt_oss", "s_aux")],
)
def test_an_attention_function_that_forgets_a_keyword_is_caught(family, forgotten, monkeypatch):
    """Without its window Mistral is wrong by 0.3 and Gemma 2 by 0.6: that is what the numeric comparison is for."""
    honest = speclen.worker.backends.torch.attention.attend_rows

    def forgetful(*args: Any, **options: Any) -> Any:
        if "row_attention" in options:
            options.pop(forgotten, None)
        return honest(*args, **options)

    monkeypatch.setattr(speclen.worker.backends.torch.attention, "attend_rows", forgetful)
    model = with_sinks() if family == "gpt_oss" else tiny_models.build(family)
    one = cached(private_copy(model))
    with pytest.raises(ModelError, match=rf"{family} gives other logits in ragged batches than alone \(by "):
        check_model(one, model, "model")


@pytest.mark.parametrize(("first_token", "first_query"), [(128, 1), (0, 3)])
def test_the_check_covers_kernels_beyond_their_first_block(first_token, first_query):
    """Story: the longest sequence had 48 tokens and the widest pass two queries, while kernels process 128 keys at once."""
    model = tiny_models.build("llama")
    one, forward = cached(private_copy(model)), CachedModel.forward

    def wrong(parts: Any) -> list[torch.Tensor]:
        is_wrong = parts[0].rows.num_tokens > first_token and parts[0].num_logits >= first_query
        return [-logits if is_wrong else logits for logits in forward(one, parts)]

    one.forward = wrong
    check_model(one, model, "model")
    with pytest.raises(ModelError, match="gives other logits"):
        check_model(one, model, "model", least_tokens=200, num_tail=5)


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


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_those_of_transformers(variant, dtype):
    family, settings = VARIANTS[variant]
    model = tiny_models.build(family, **settings).to(dtype)
    copy = private_copy(model)
    pool = KVPool(inspect_layers(copy, "model"), 2, CONTEXT, dtype, CPU)
    decoder = rewrite(copy, pool.shapes, CONTEXT)
    assert isinstance(decoder, LlamaDecoder)
    check_model(CachedModel(decoder, pool, CONTEXT), model, variant)


def halved_angles(model: Any, *others: Any) -> Any:
    decoder = rewrite(model, *others)
    decoder.angles.mul_(0.5)
    return decoder


def no_longer_there(model: Any, *others: Any) -> Any:
    raise AttributeError("'LlamaAttention' object has no attribute 'scaling'")


@pytest.mark.parametrize(
    ("wrong", "reason"), [(halved_angles, "gives other logits"), (no_longer_there, "no attribute 'scaling'")]
)
def test_a_rewritten_model_that_is_wrong_is_replaced(wrong, reason, monkeypatch, caplog):
    monkeypatch.setattr(speclen.worker.engine.preparation, "rewrite", wrong)
    pair = make_pair("llama")
    prepared = prepare(pair, EngineConfig(max_batch_size=2, backend="torch"))
    assert type(prepared.target.model) is type(pair.target)
    assert "llama runs in transformers' own operators, which is slower" in caplog.text
    assert reason in caplog.text
