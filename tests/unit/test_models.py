"""Models that are damaged, too new, or do not fit together are refused in one sentence that names the model and the file."""

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

import speclen.worker.models.devices
import speclen.worker.models.naming
from speclen.worker.frontend.worker_server import model_name, usable_defaults
from speclen.worker.models.devices import resolve_dtype
from speclen.worker.models.loading import ModelPair, load_pair, load_tokenizer, unused_weights
from speclen.worker.models.naming import BUNDLED_FOLDER, ModelError, Shape
from speclen.worker.models.widen import widen
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
    "a kind that is a list": {"model_type": ["llama"]},
    "an unknown kind": {"model_type": "llama-of-tomorrow"},
    "a number as text": {"hidden_size": "32"},
    "no heads": {"num_attention_heads": 0},
    "a quantisation that is a list": {"quantization_config": []},
    "a rope factor as text": {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
    "a rope of tomorrow": {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}},
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
    "pre_tokenizer": newer("pre_tokenizer"),
    "cut": lambda folder: (folder / "tokenizer.json").write_bytes(b'{"version": "1.0", '),
    "no text": lambda folder: (folder / "tokenizer.json").write_bytes(b"\xff\xfe\x00"),
    "an array": lambda folder: (folder / "tokenizer_config.json").write_text("[]"),
    "an end token that is a list": option(eos_token=["<|endoftext|>"]),
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


# Pairs and names.


@pytest.fixture
def target(folders):
    return folders[0]


def test_a_target_alone_is_a_pair_without_draft(target):
    for none in (None, "", "none"):
        pair = load_pair(target, none, "cpu")
        assert pair.draft is None
        assert pair.draft_name == ""


def with_another_token(tokenizer: dict) -> None:
    tokenizer["merges"].pop()
    tokenizer["vocab"]["zzz"] = tokenizer["vocab"].pop(max(tokenizer["vocab"], key=tokenizer["vocab"].get))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_another_token, r"target and .*other have different vocabularies \(320 and 320 tokens, 319"),
        (lambda tokenizer: tokenizer["merges"].clear(), "split text differently"),
    ],
)
def test_other_tokens_and_other_splitting_are_refused(target, tmp_path, change, words):
    other = tiny_models.save(tiny_models.build("llama"), tmp_path / "other")
    path = Path(other, "tokenizer.json")
    data = json.loads(path.read_text())
    change(data["model"])
    path.write_text(json.dumps(data))
    with pytest.raises(ModelError, match=words):
        load_pair(target, other, "cpu")


@pytest.mark.parametrize("padded", [300, 384])
def test_a_draft_padded_to_another_size_gets_as_many_logits_as_the_target(padded, tmp_path):
    """Qwen 2.5 pads its one vocabulary to 151,936 or 152,064 rows, depending on the size of the model."""
    target = tiny_models.save(tiny_models.build("llama"), tmp_path / "target")
    small = tiny_models.build("llama", vocab_size=padded)
    pair = load_pair(target, tiny_models.save(small, tmp_path / "draft"), "cpu", "float32")
    ids = torch.tensor([[5, 9, 33]])
    shared = min(padded, 320)
    with torch.no_grad():
        logits = pair.draft(ids).logits
        assert torch.equal(logits[..., :shared], small(ids).logits[..., :shared])
    assert logits.shape[-1] == pair.vocab_size == 320
    if padded < 320:
        assert torch.equal(logits[..., padded:], logits[..., padded - 1 : padded].expand_as(logits[..., padded:]))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/no/such/model", "no such directory"),
        ("./nowhere", "no such directory"),
        ("a/b/c", "not a hub id"),
        ("no-owner/no-model-of-this-name", "neither a local directory nor in the hub's cache"),
        ("bundled:huge", "there are bundled:target, bundled:draft"),
    ],
)
def test_unknown_model_names_suggest_what_to_use(target, name, reason, monkeypatch):
    monkeypatch.setattr(speclen.worker.models.naming, "BUNDLED_FOLDER", Path(target).parent)
    with pytest.raises(ModelError, match=reason) as error:
        load_pair(name, None, "cpu")
    assert name in str(error.value)
    assert len(str(error.value)) < 300


def test_auto_dtype_on_cpu_is_bfloat16_only_for_large_models_where_it_is_fast(monkeypatch):
    cpu = torch.device("cpu")
    for fast, small, large in ((True, torch.float32, torch.bfloat16), (False, torch.float32, torch.float32)):
        monkeypatch.setattr(speclen.worker.models.devices, "cpu_has_bfloat16", lambda fast=fast: fast)
        assert resolve_dtype("auto", cpu, 5_000_000) is small
        assert resolve_dtype("auto", cpu, 60_000_000) is large
    assert resolve_dtype("float16", cpu, 60_000_000) is torch.float16


def test_a_model_has_the_same_name_wherever_it_lies(tmp_path):
    """Workers whose copies of a model lie in different folders share what is learned, and other models do not."""
    names = []
    for place in ("one", "another"):
        shutil.copytree(BUNDLED_FOLDER / "draft", tmp_path / place / "draft")
        pair = load_pair(str(tmp_path / place / "draft"), None, "cpu", "float32")
        names.append(model_name(pair.target_name, pair.target))
    assert names[0] == names[1]
    pair.target.config.rms_norm_eps *= 2
    assert model_name(pair.target_name, pair.target) != names[0]


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", [Shape(96, 4, 12, 192), Shape(32, 5, 8, 320)])
def test_a_widened_model_has_the_same_logits(shape, tied):
    model, ids = tiny_models.build("llama", tie_word_embeddings=tied), torch.tensor([[1, 7, 300, 4, 4, 250, 31]])
    for name, parameter in model.named_parameters():
        if "norm" in name:  # away from one, so that a misplaced coefficient shows
            parameter.copy_(torch.linspace(0.5, 1.5, len(parameter)))
    found, expected = (one(ids).logits for one in (widen(model, shape, "cpu", torch.float32), model))
    assert (found - expected).abs().max() / expected.std() < 2e-5
