"""Pools fit the memory there is, and OpenVINO is used where it was tested."""

import re

import pytest
import torch

import speclen.worker.engine.preparation
from speclen.worker.backends import openvino
from speclen.worker.backends.torch.packed_linear import PackedLinear
from speclen.worker.engine.preparation import EngineConfig, fit_rows, prepare
from speclen.worker.models.naming import ModelError
from tests.support import engines


def test_weights_are_not_copied_where_memory_is_short(monkeypatch):
    monkeypatch.setattr(speclen.worker.engine.preparation, "free_memory", lambda device: 2**16)
    prepared = prepare(engines.make_pair("llama"), EngineConfig(max_batch_size=2, backend="torch"))
    assert not any(isinstance(module, PackedLinear) for module in prepared.target.model.modules())
    # Two layers of two heads of 8 in each model: 512 bytes a token, and half of 64 KiB may be used.
    assert prepared.max_kv_tokens == 2**15 // 512


@pytest.mark.parametrize(
    ("budget", "least", "context", "expected"),
    [
        (10**9, 256, 256, (16, 256)),
        (1638, 64, 256, (16, 89)),  # the context gives way first
        (1638, 256, 256, (6, 256)),  # but not below what a request needs: then rows do
        (1638, 80, 80, (16, 80)),
        (1638, 200, 200, (7, 200)),
        (100, 200, 200, (0, 200)),
    ],
)
def test_on_a_gpu_rows_and_context_are_cut_to_what_fits(budget, least, context, expected):
    assert fit_rows(16, context, least, spare=13, budget=budget) == expected


@pytest.mark.parametrize(("free", "vocab_size"), [(1000, 128), (200_000, 128_256)])
def test_no_memory_for_a_single_sequence_is_an_error(free, vocab_size, monkeypatch):
    """A slot needs keys and values, 512 bytes a token, and memory for its logits."""
    monkeypatch.setattr(speclen.worker.engine.preparation, "free_memory", lambda device: free)
    pair = engines.make_pair("llama", device=torch.device("cuda:0"), vocab_size=vocab_size)
    with pytest.raises(ModelError, match=r"a single sequence of 256 tokens needs more than the 0.0 GiB left on cuda:0"):
        prepare(pair, EngineConfig(max_batch_size=16))


@pytest.mark.parametrize(
    ("attribute", "found", "reason"),
    [
        ("installed_version", lambda: None, r"not installed: pip install 'speclen\[openvino\]'"),
        ("installed_version", lambda: "2027.1.0", r"version 2027.1.0 is installed and 2026\.4\.x was tested"),
        ("cpu_has_bfloat16", lambda: False, "no bfloat16 products"),
    ],
)
def test_machines_without_openvino(attribute, found, reason, monkeypatch):
    monkeypatch.setattr(openvino, "installed_version", lambda: "2026.4.1")
    monkeypatch.setattr(openvino, attribute, found)
    told = openvino.why_not(torch.device("cpu"), torch.bfloat16)
    assert re.search(reason, told)
