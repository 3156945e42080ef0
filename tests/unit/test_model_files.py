"""Files of a model that are damaged, too new, or do not fit together: one sentence that names the model and the file."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from speclen.worker.frontend.worker_server import usable_defaults
from speclen.worker.models.loading import ModelPair, load_pair, load_tokenizer, unused_weights
from speclen.worker.models.naming import ModelError
from tests.support import tiny_models


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return Path(tiny_models.save(tiny_models.build("llama"), tmp_path_factory.mktemp("whole") / "model"))


@pytest.fixture
def folder(whole, tmp_path):
    """A copy of the model for one test to damage."""
    return Path(shutil.copytree(whole, tmp_path / "damaged"))


def load(folder: Path) -> ModelPair:
    return load_pair(str(folder), None, "cpu", "float32")


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as error:
        load(folder)
    return str(error.value)


CONFIGS: dict[str, Any] = {
    "null": None,
    "a list": [],
    "a kind that is a list": {"model_type": ["llama"]},
    "an unknown kind": {"model_type": "llama-of-tomorrow"},
    "a number as text": {"hidden_size": "32"},
    "no heads": {"num_attention_heads": 0},
    "a quantisation that is a list": {"quantization_config": []},
    "a quantisation that is text": {"quantization_config": "fp8"},
    "a rope factor as text": {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
    "a rope of tomorrow": {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}},
    "rope that is text": {"rope_scaling": "linear"},
    "positions as text": {"max_position_embeddings": "many"},
    "no positions": {"max_position_embeddings": None},
    "layer types that are text": {"layer_types": "full_attention"},
    "an activation of tomorrow": {"hidden_act": "wish"},
    "a negative size": {"intermediate_size": -64},
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_configuration_that_cannot_be_used_is_one_sentence(folder, case):
    path = folder / "config.json"
    if isinstance(CONFIGS[case], dict):
        change(path, **CONFIGS[case])
    else:
        path.write_text(json.dumps(CONFIGS[case]))
    told = refusal(folder)
    assert told.startswith(f"{folder}: ")
    assert "config" in told
    assert "\n" not in told


def newer(part: str) -> Callable[[Path], None]:
    """Let a part of a tokenizer be of a kind that another version of its library knows."""

    def write(folder: Path) -> None:
        change(folder / "tokenizer.json", **{part: {"type": "OfTomorrow", "values": [1]}})

    return write


def option(**values: Any) -> Callable[[Path], None]:
    return lambda folder: change(folder / "tokenizer_config.json", **values)


TOKENIZERS: dict[str, Callable[[Path], None]] = {
    "model": newer("model"),
    "normalizer": newer("normalizer"),
    "pre_tokenizer": newer("pre_tokenizer"),
    "post_processor": newer("post_processor"),
    "decoder": newer("decoder"),
    "cut": lambda folder: (folder / "tokenizer.json").write_bytes(b'{"version": "1.0", '),
    "no text": lambda folder: (folder / "tokenizer.json").write_bytes(b"\xff\xfe\x00"),
    "an array": lambda folder: (folder / "tokenizer_config.json").write_text("[]"),
    "an end token that is a list": option(eos_token=["<|endoftext|>"]),
    "an end token that is a dictionary": option(eos_token={"name": "<|endoftext|>"}),
    "extra tokens that are text": option(extra_special_tokens="<|extra|>"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_tokenizer_that_cannot_be_read_is_one_sentence(folder, case):
    TOKENIZERS[case](folder)
    with pytest.raises(ModelError) as error:
        load_tokenizer(str(folder))
    told = str(error.value)
    assert told.startswith(f"{folder}: its tokenizer (tokenizer.json, tokenizer_config.json) cannot be read: ")
    assert "\n" not in told


@pytest.mark.parametrize("text", ["[]", "null", "{", '"text"', "\x00"])
def test_a_generation_configuration_that_cannot_be_read_is_one_sentence(folder, text):
    (folder / "generation_config.json").write_text(text)
    assert refusal(folder).startswith(f"{folder}: its generation_config.json cannot be read: ")


def with_tensors(folder: Path, **tensors: torch.Tensor) -> None:
    """Write more tensors into a model's file."""
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, {"format": "pt"})


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("name", ["flash_attention_2", "kernels-community/flash-attn", "of-tomorrow"])
def test_an_attention_that_the_configuration_names_need_not_be_installed(folder, name):
    change(folder / "config.json", attn_implementation=name)
    load(folder)


def without_tokenizer(folder: Path) -> None:
    for name in folder.glob("tokenizer*"):
        name.unlink()


def with_layers(number: int) -> Callable[[Path], None]:
    return lambda folder: change(folder / "config.json", num_hidden_layers=number)


def as_integers(dtype: torch.dtype) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        weight = load_file(folder / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
        with_tensors(folder, **{"model.layers.1.mlp.up_proj.weight": (50 * weight).to(dtype)})

    return write


def with_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def adapter_alone(folder: Path) -> None:
    with_adapter(folder)
    (folder / "config.json").unlink()


def tekken_alone(folder: Path) -> None:
    without_tokenizer(folder)
    (folder / "tekken.json").write_text('{"config": {}}')


UNFIT: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights cut short": (cut_short, r": its weights \(\*\.safetensors\) cannot be loaded on cpu as float32: "),
    "no safetensors": (pickled, r"no \*\.safetensors"),
    "no tokenizer": (without_tokenizer, "tokenizer"),
    "a tekken.json alone": (tekken_alone, r"its tekken\.json cannot .* put the model's tokenizer\.json next to it"),
    "an adapter": (with_adapter, r"it has an adapter .* merge it into its base model"),
    "an adapter alone": (adapter_alone, r"it has an adapter .* merge it into its base model"),
    "another vocabulary": (
        lambda folder: change(folder / "config.json", vocab_size=400),
        r"lm_head\.weight is 320 x 32 in its files and 400 x 32 by its config\.json .* vocab_size",
    ),
    "integers without scales": (as_integers(torch.int8), r"hold weights as I8 without scales .*mlp\.up_proj\.weight"),
    "bytes without scales": (as_integers(torch.float8_e4m3fn), "hold weights as F8_E4M3 without scales"),
    # transformers fills weights that a checkpoint lacks with random numbers and a warning.
    "a layer too few": (with_layers(3), r"weights are missing.*layers\.2"),
    "a layer too many": (with_layers(1), "9 weights for which llama has no use by its config.json"),
    "a bias that the configuration denies": (
        lambda folder: with_tensors(folder, **{"model.layers.1.mlp.up_proj.bias": torch.ones(64)}),
        r"model\.layers\.1\.mlp\.up_proj\.bias",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_files_that_do_not_fit_together_are_refused(folder, case):
    harm, words = UNFIT[case]
    harm(folder)
    assert re.search(words, refusal(folder))


SCALE = "model.layers.0.self_attn.q_proj.weight_scale"


@pytest.mark.parametrize("quantisation", [None, {"quant_method": "of-tomorrow"}])
def test_scales_of_quantised_weights_are_not_ignored(folder, quantisation):
    """Story: a checkpoint in FP8 was served without its scales, and generated garbage."""
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    if quantisation is not None:
        change(folder / "config.json", quantization_config=quantisation)
    with_tensors(folder, **{SCALE: torch.tensor(0.5)})
    assert SCALE in refusal(folder)


def test_tensors_that_are_not_weights_are_ignored(folder):
    with_tensors(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    load(folder)
    masks = [
        "h.0.attn.bias",
        "h.0.attn.masked_bias",
        "gpt_neox.layers.0.attention.bias",
        "layers.0.rotary_emb.cos_cached",
    ]
    assert unused_weights([*masks, "h.0.attn.c_attn.bias", "layers.0.self_attn.bias"]) == [
        "h.0.attn.c_attn.bias",
        "layers.0.self_attn.bias",
    ]


def test_a_stored_but_tied_head_is_accepted(tmp_path):
    model = tiny_models.build("llama", tie_word_embeddings=True)
    folder = Path(tiny_models.save(model, tmp_path / "tied"))
    with_tensors(folder, **{"lm_head.weight": model.get_input_embeddings().weight.detach().clone()})
    loaded = load(folder).target
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    ("named", "kept"),
    [
        ([7, 99999], (0, 7)),
        ([-1, 7], (0, 7)),
        ("7", (0,)),
        (["7", 8], (0, 8)),
        ([True, 2.0, [3], None], (0,)),
        ({"id": 7}, (0,)),
        (tiny_models.VOCAB_SIZE, (0,)),
        (tiny_models.VOCAB_SIZE - 1, (0, tiny_models.VOCAB_SIZE - 1)),
        (None, (0,)),
    ],
)
def test_end_tokens_are_ids_of_the_vocabulary(folder, named, kept, caplog):
    """Story: min_tokens and every grammar failed with an end token beyond the vocabulary; -1 would mean its last one."""
    change(folder / "generation_config.json", eos_token_id=named)
    with caplog.at_level(logging.WARNING):
        assert load(folder).eos_token_ids == kept
    told = [one.message for one in caplog.records if "are ignored" in one.message]
    assert len(told) == (named not in (None, tiny_models.VOCAB_SIZE - 1))


def test_sampling_defaults_are_those_of_the_generation_configuration_that_a_request_may_have(folder):
    change(folder / "generation_config.json", temperature=0.6, top_k=20, top_p=0.0, repetition_penalty="1.1")
    with capture_logs() as logs:
        assert usable_defaults(load(folder).sampling_defaults) == {"temperature": 0.6, "top_k": 20}
    assert [one["name"] for one in logs] == ["top_p", "repetition_penalty"]


def test_a_model_without_a_generation_configuration_ends_at_the_tokens_of_its_configuration(folder):
    (folder / "generation_config.json").unlink()
    change(folder / "config.json", eos_token_id=[5, 6])
    assert load(folder).eos_token_ids == (0, 5, 6)
