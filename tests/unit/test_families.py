"""Families of transformers that are served or refused with a reason: the table of docs/guides/serving.md."""

from typing import Any

import pytest

from speclen.worker.models.loading import ModelSource, refuse_unsuitable
from speclen.worker.models.naming import ModelError
from speclen.worker.requests.request import FinishReason
from tests.support import tiny_models
from tests.support.engines import check_greedy, generate, make_engine, make_pair, request

POSITIONS = {"max_position_embeddings": tiny_models.MAX_POSITIONS}
LAYERED = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64} | POSITIONS
GROUPED = LAYERED | {"num_key_value_heads": 2, "head_dim": 8}
WINDOWED = GROUPED | {"sliding_window": tiny_models.SLIDING_WINDOW}
EXPERTS = GROUPED | {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": tiny_models.MAX_POSITIONS}
LATENT = EXPERTS | {"q_lora_rank": 8, "kv_lora_rank": 8}
SHARED = WINDOWED | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "global_head_dim": 8}
SHARED |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
SHARED |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": tiny_models.VOCAB_SIZE}
PADDED = GROUPED | {"pad_token_id": 0}

# Those of tiny_models.FAMILIES are run through every test of the engine.
SERVED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gemma", "granite", "helium", "olmo", "olmo2", "smollm3", "cohere", "starcoder2"), GROUPED),
    **dict.fromkeys(
        ("apertus", "arcee", "ernie4_5", "hunyuan_v1_dense", "nanochat", "nemotron", "seed_oss", "stablelm"), GROUPED
    ),
    **dict.fromkeys(("cohere2", "exaone4", "ministral", "olmo3", "afmoe"), WINDOWED),
    **dict.fromkeys(("glm", "glm4", "phi3"), PADDED),
    **dict.fromkeys(("biogpt", "phi", "persimmon"), LAYERED),
    **dict.fromkeys(("mixtral", "qwen3_moe", "olmoe", "granitemoe", "phimoe", "glm4_moe", "minimax_m2"), EXPERTS),
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "gpt_bigcode": GPT2,
    "bert": LAYERED | {"is_decoder": True},
    "gpt_oss": EXPERTS | {"sliding_window": tiny_models.SLIDING_WINDOW},
    "gemma4_text": SHARED,
    "gemma4_unified_text": SHARED | {"hidden_size_per_layer_input": 0},
    "gemma3n_text": SHARED | {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4},
}
OWN = "attention in its own code"
STATE = "recurrent state"
KEPT = "keep more than keys and values"
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("lets tokens attend to later ones", LAYERED),
    "bloom": (OWN, {"n_layer": 2, "hidden_size": 32, "n_head": 4}),
    "codegen": (OWN, GPT2 | {"rotary_dim": 4}),
    "gptj": (OWN, GPT2 | {"rotary_dim": 4}),
    "gpt_neo": (
        OWN,
        {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    ),
    "openai-gpt": (OWN, GPT2),
    "falcon": (OWN, LAYERED),
    "mpt": (OWN, {"n_layers": 2, "d_model": 32, "n_heads": 4}),
    "xglm": (OWN, {"num_layers": 2, "d_model": 32, "attention_heads": 4, "ffn_dim": 64}),
    "deepseek_v2": ("latent attention", LATENT),
    "deepseek_v3": ("latent attention", LATENT),
    "mamba": (STATE, {"num_hidden_layers": 2, "hidden_size": 32, "state_size": 4}),
    "rwkv": (STATE, {"num_hidden_layers": 2, "hidden_size": 32}),
    "falcon_h1": (STATE, GROUPED),
    "jamba": (STATE, EXPERTS),
    "qwen3_next": (STATE, EXPERTS),
    "recurrent_gemma": (STATE, GROUPED),
    # transformers itself cannot run that: it slices embeddings that are not there.
    "gemma4_text": ("2 of its layers share keys and values", SHARED | {"hidden_size_per_layer_input": 0}),
    "lfm2": (KEPT, GROUPED | {"layer_types": ["conv", "full_attention"]}),
    "llama4_text": (KEPT, EXPERTS),
    "minimax": (KEPT, EXPERTS),
}


def build(family: str, settings: dict[str, Any], backend: str = "torch") -> None:
    """Make an engine of a random model, as `load_pair` and `prepare` would of one that is loaded."""
    model = tiny_models.build(family, **settings)
    refuse_unsuitable(ModelSource(family, family, None, model.config, model.config.get_text_config()))
    make_engine(
        make_pair(target=model, target_name=family), 0, check_models=True, max_speculation_length=0, backend=backend
    )


@pytest.mark.parametrize("family", SERVED)
def test_families_that_are_served(family):
    build(family, SERVED[family])


def test_a_model_that_moves_a_bias_with_its_output_layer_runs_on_openvino():
    pytest.importorskip("openvino")
    build("bert", SERVED["bert"], "openvino")


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_are_refused_in_one_sentence(family):
    reason, settings = REFUSED[family]
    with pytest.raises(ModelError, match=f"^{family}: .*{reason}") as error:
        build(family, settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", ["gemma4_text", "gemma3n_text"])
def test_prompts_of_any_length_where_layers_share_keys_and_values(family):
    """Story: with prompts or last chunks of 2, 3, 5 or 8 tokens every request was aborted."""
    target = tiny_models.build(family, **SERVED[family])
    pair = make_pair(target=target, draft=tiny_models.noisy_copy(target), target_name=family)
    requests = [
        request(str(length), range(1, length + 1), max_tokens=6) for length in (1, 2, 3, 5, 8, 12, 16, 20, 33, 36, 48)
    ]
    outputs = generate(make_engine(pair, 3, prefill_chunk=32), *requests)
    for each in requests:
        check_greedy(target, each, outputs.ids(each.request_id))
        assert outputs.reason(each.request_id) is not FinishReason.ABORT
