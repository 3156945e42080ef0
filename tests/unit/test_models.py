"""Target and draft of a loaded pair fit together; other pairs are refused with one sentence that names the problem."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import speclen.worker.models.devices
import speclen.worker.models.loading
import speclen.worker.models.naming
from speclen.worker.frontend.worker_server import model_name
from speclen.worker.models.devices import resolve_dtype
from speclen.worker.models.loading import load_pair
from speclen.worker.models.naming import BUNDLED_FOLDER, ModelError, Shape
from speclen.worker.models.widen import widen
from tests.support import tiny_models


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
