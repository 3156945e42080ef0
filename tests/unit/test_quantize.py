"""Weights of 8 bits make another target, of which everything holds that holds of the one that was rounded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from speclen.worker.backends import openvino
from speclen.worker.backends.check import check_model, inspect_layers
from speclen.worker.backends.torch.packed_linear import private_copy
from speclen.worker.engine.config import EngineConfig
from speclen.worker.engine.preparation import prepare
from speclen.worker.models.loading import ModelPair, load_pair
from speclen.worker.models.naming import ModelError
from speclen.worker.models.quantize import int8_of, round_weights
from speclen.worker.reporting.identity import context_key
from tests.support import engines, tiny_models
from tests.support.traffic import Traffic, check_outputs

needs_openvino = pytest.mark.skipif(
    engines.WHY_NOT_OPENVINO is not None, reason=f"OpenVINO: {engines.WHY_NOT_OPENVINO}"
)
FAMILIES = [family for family in tiny_models.FAMILIES if family != "gemma2"]  # whose softcap OpenVINO has no input for


def rounded(model: Any) -> Any:
    model = copy.deepcopy(model)
    round_weights(model)
    return model


def rounded_pair(family: str = "llama") -> ModelPair:
    target, draft = (rounded(model) for model in engines.models(family))
    return engines.make_pair(family, target=target, draft=draft, weights="int8")


def linears(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D")}


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_linear_layer_is_rounded_by_less_than_half_a_step_and_nothing_else_changes(
    family: str, dtype: torch.dtype
) -> None:
    model = tiny_models.build(family).to(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    round_weights(model)
    changed = {f"{name}.weight" for name in linears(model)}
    assert changed
    for name, module in linears(model).items():
        whole = int8_of(module.weight)
        outputs = 1 if type(module).__name__ == "Conv1D" else 0
        assert whole is not None
        assert whole.values.dtype == torch.int8
        assert whole.scales.numel() == whole.scales.shape[outputs] == module.weight.shape[outputs]
        assert torch.equal(module.weight, whole.widened().to(dtype))
        exact = before[f"{name}.weight"].float()
        assert ((whole.widened() - exact).abs() <= 0.5001 * whole.scales).all()
        assert (whole.values.abs().amax(1 - outputs) == 127).all()
    for name, tensor in model.state_dict().items():
        assert name in changed or torch.equal(tensor, before[name]), name


def test_an_output_whose_weights_are_all_zero_stays_zero() -> None:
    """Layers that the bundled targets add have such weights."""
    model = tiny_models.build("llama")
    with torch.no_grad():
        model.lm_head.weight[7] = 0
    round_weights(model)
    assert not model.lm_head.weight[7].any()
    assert model.lm_head.weight.isfinite().all()


@needs_openvino
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", engines.OPENVINO_DTYPES)
def test_rounded_families_pass_the_check(family: str, dtype: torch.dtype) -> None:
    """The one that every model passes: ragged rows give the logits that transformers gives with the rounded weights."""
    heads = {"head_dim": 16} if family in ("qwen3", "gemma3") and dtype == torch.bfloat16 else {}
    model = rounded(tiny_models.build(family, **heads).to(dtype))
    check_model(loaded(model, dtype), model, family)


@needs_openvino
def test_tied_embeddings_are_those_of_the_rounded_head() -> None:
    model = rounded(tiny_models.build("llama", tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    check_model(loaded(model, torch.float32), model, "llama")


def loaded(model: Any, dtype: torch.dtype) -> Any:
    layers = inspect_layers(private_copy(model), "model")
    return openvino.load(model, layers, 2, 256, 256, dtype, num_threads=1)


@needs_openvino
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_outputs_are_what_the_rounded_target_alone_would_write(family: str) -> None:
    """100 requests that join and leave at random, under plans that change with every step."""
    pair = rounded_pair(family)
    traffic = Traffic(family, 90, backend="openvino", ngrams=True, pair=pair, num_requests=100)
    requests, collected, _ = traffic.run()
    check_outputs(pair.target, requests, collected)


def test_only_openvino_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="--weights int8 saves nothing on torch: use --backend openvino, or"):
        prepare(rounded_pair(), EngineConfig(max_batch_size=2, backend="torch"))
    monkeypatch.setattr(openvino, "why_not", lambda device, dtype: "this machine is a toaster")
    with pytest.raises(ModelError, match="--weights int8 needs OpenVINO: this machine is a toaster"):
        prepare(rounded_pair(), EngineConfig(max_batch_size=2))


def test_weights_that_nobody_knows_are_refused() -> None:
    with pytest.raises(ModelError, match="--weights 'int3' is not known; use full or int8"):
        load_pair("bundled:target", None, weights="int3")


def test_a_rounded_pair_is_loaded_and_learned_for_apart() -> None:
    """Neither its acceptance nor its step times are those of the pair that was rounded."""
    full, small = (load_pair("bundled:target", "bundled:draft", "cpu", weights=weights) for weights in ("full", "int8"))
    assert int8_of(full.target.lm_head.weight) is None
    assert int8_of(small.target.lm_head.weight) is not None
    assert int8_of(small.draft.lm_head.weight) is not None
    first, second = (context_key(pair, "openvino 2026.4.1") for pair in (full, small))
    assert (first.dtype, second.dtype) == ("float32", "float32+int8")
    assert first.target != second.target
    assert first.draft != second.draft
    assert first.target.partition("#")[0] == second.target.partition("#")[0] == "bundled:target"
