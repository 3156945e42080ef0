"""Triton's kernels compute what the plain operators do. Without a GPU they run in Triton's interpreter, see conftest."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import tiny_models
import torch

pytest.importorskip("triton")

from speclen.worker.backends import fused, llama
from speclen.worker.backends.cached_model import CachedModel
from speclen.worker.backends.captured_model import CapturedModel, RerunRecorder
from speclen.worker.backends.check import inspect_layers
from speclen.worker.backends.kv_cache import KVPool, LayerShape
from speclen.worker.backends.passes import PassPart, StepRows, prompt_part

CONTEXT = 64
DTYPES = [torch.float32, torch.bfloat16]
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(engines.DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_they_find_out_whether_they_run(dtype: torch.dtype) -> None:
    assert fused.works_on(engines.DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [32, 48, 200])
def test_sums_are_normed(size: int, dtype: torch.dtype) -> None:
    x, change = randn(3, 2, size, dtype=dtype), randn(3, 2, size, dtype=dtype).flip(0)
    weight = randn(size, dtype=dtype)
    for other in (None, change):
        total, normed = fused.add_norm(x, other, weight, 1e-5)
        expected = x if other is None else x + other
        # The interpreter cuts what it rounds to bfloat16.
        torch.testing.assert_close(total, expected, rtol=0 if dtype is torch.float32 else 2**-7, atol=0)
        wide = total.float()
        plain = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.float()
        torch.testing.assert_close(normed.float(), plain, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def test_a_slice_is_normed_too() -> None:
    x, change, weight = randn(4, 3, 32), randn(4, 3, 32).flip(0), torch.ones(32, device=engines.DEVICE)
    total, _ = fused.add_norm(x[:, -1:], change[:, -1:], weight, 1e-5)
    assert torch.equal(total, x[:, -1:] + change[:, -1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 1024, 1100])
def test_gates(size: int, dtype: torch.dtype) -> None:
    gate_up = randn(2, 3, 2 * size, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    plain = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(fused.gate(gate_up), plain, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 8), (3, 3, 12), (40, 8, 16)])
def test_queries_are_turned_and_keys_and_values_stored(heads: int, kv_heads: int, head_dim: int) -> None:
    rows, queries = 3, 2
    pool = KVPool([LayerShape(kv_heads, head_dim)], 5, 40, torch.float32, engines.DEVICE)
    projected = randn(rows, queries, heads + 2 * kv_heads, head_dim)
    turns = randn(rows, queries, 2, head_dim)
    cos, sin = turns.unsqueeze(2).unbind(3)
    positions = torch.tensor([[4, 5], [0, 1], [31, 32]], device=engines.DEVICE)
    query = fused.rotate_and_store(projected, cos, sin, positions, pool.layers[0])

    turning, value = projected.split([heads + kv_heads, kv_heads], dim=2)
    turned = turning * cos + turning.roll(head_dim // 2, dims=-1) * sin
    torch.testing.assert_close(query, turned[:, :, :heads].transpose(1, 2), rtol=1e-5, atol=1e-5)
    expected = torch.zeros_like(pool.layers[0])
    for row in range(rows):
        for column in range(queries):
            place = int(positions[row, column])
            expected[row, 0, :, place] = turned[row, column, heads:]
            expected[row, 1, :, place] = value[row, column]
    torch.testing.assert_close(pool.layers[0], expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_recorded_passes_of_them_give_the_same_logits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows of several lengths, after their prompts; with windows, biases and normed heads."""
    found = []
    for kernels in (None, fused):
        monkeypatch.setattr(llama, "kernels_for", lambda device, dtype, chosen=kernels: chosen)
        model: Any = copy.deepcopy(engines.models(family)[0])
        shapes = inspect_layers(model, family)
        pool = KVPool(shapes, 4, CONTEXT + 8, torch.float32, engines.DEVICE)
        decoder = llama.rewrite(model, shapes, CONTEXT)
        assert decoder is not None
        captured = CapturedModel(CachedModel(decoder, pool, CONTEXT), RerunRecorder(), 8, 8)
        ids = torch.randint(tiny_models.VOCAB_SIZE, (3, 30), generator=torch.Generator().manual_seed(5))
        lengths = np.array([20, 3, 11])
        logits = captured.forward(
            [prompt_part(row, ids[row, :length].tolist(), 0, pool.device) for row, length in enumerate(lengths)]
        )
        rows = StepRows(lengths, 4, pool.device)
        logits += captured.forward([PassPart(rows, ids[:, 20:23].to(pool.device), num_logits=2, column=0)])
        logits += captured.forward([PassPart(rows, ids[:, 23:24].to(pool.device), num_logits=1, column=3)])
        assert captured.num_first_uses == 2
        found.append(torch.cat([each.flatten(0, 1).clone() for each in logits]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


class Wrong:
    """As `fused`, but one."""

    gate, rotate_and_store = staticmethod(fused.gate), staticmethod(fused.rotate_and_store)

    @staticmethod
    def add_norm(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        total, normed = fused.add_norm(*arguments)
        return total, 1.1 * normed


class Refused(Wrong):
    @staticmethod
    def add_norm(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise OSError("no compiler\nand more")  # of no kind that CUDA's errors are


# What computes something wrong is not noticed where nobody checks.
@pytest.mark.parametrize(("kernels", "checked"), [(Wrong, True), (Refused, True), (Refused, False)])
def test_kernels_that_do_not_do_are_left_out(
    kernels: Any, checked: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found wrong before anything is served; found not to run, also later."""
    prompts = [engines.request(str(at), [*range(1, 4 + 3 * at)], max_tokens=12) for at in range(5)]
    expected = engines.generate(engines.make_engine(recorder=RerunRecorder()), *prompts)
    monkeypatch.setattr(llama, "kernels_for", lambda device, dtype: kernels)
    engine = engines.make_engine(recorder=RerunRecorder(), check_models=checked)
    found = engines.generate(engine, *prompts)
    assert [found.ids(str(at)) for at in range(5)] == [expected.ids(str(at)) for at in range(5)]
    for model in (engine.target, engine.draft):
        assert isinstance(model, CapturedModel)
        assert model.model.kernels is None
        assert model.recorder is not None
    warnings = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(warnings) == 2  # the target's and the draft's
    assert all(("no compiler" if kernels is Refused else "other logits") in one for one in warnings)


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from speclen.worker.backends import fused

constants = {"has_change": True, "block": 64, "num_heads": 4, "num_stored": 4, "head_dim": 64}
constants |= {"block_heads": 16, "block_dim": 64}
numbers = {"size": "i32", "eps": "fp32", "queries": "i32", "length": "i32", "angle_stride": "i32", "positions": "*i64"}
for kernel in (fused._add_norm, fused._gate, fused._rotate_and_store):
    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if name in constants else numbers.get(name, "*bf16") for name in names}
    chosen = {(at,): constants[name] for at, name in enumerate(names) if name in constants}
    print(len(compile(ASTSource(kernel, signature, chosen), target=GPUTarget("cuda", 90, 32)).asm["ptx"]) > 1000)
"""


def test_they_compile_for_a_gpu(tmp_path: Path) -> None:
    """Story: the interpreter ran what the compiler then refused."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["True"] * 3, done.stderr
