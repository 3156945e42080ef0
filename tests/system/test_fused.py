"""Triton's kernels compute what the plain operators do. Without a GPU they run in Triton's interpreter, see conftest."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from tests.support import engines

pytest.importorskip("triton")


from speclen.worker.backends.kv_cache import KVPool, LayerShape
from speclen.worker.backends.torch import captured_model, fused, llama
from speclen.worker.backends.torch.captured_model import CapturedModel, RerunRecorder

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(engines.DEVICE, dtype)


# Triton's interpreter takes seconds for the larger shapes, so the table is pairwise.
@pytest.mark.parametrize(
    ("queries", "heads", "kv_heads", "head_dim", "window", "short_places", "dtype"),
    [
        *((1, 4, 4, 16, window, places, torch.float32) for window in (None, 1, 40) for places in (0, 300)),
        *((3, 6, 2, 12, window, places, torch.bfloat16) for window in (None, 1, 40) for places in (0, 300)),
        (9, 16, 2, 8, 40, 0, torch.bfloat16),
        (9, 16, 2, 8, None, 300, torch.float32),
        (17, 8, 1, 64, None, 0, torch.float32),
        (17, 8, 1, 64, 40, 300, torch.bfloat16),
    ],
)
def test_fused_attention_equals_plain_attention(
    queries, heads, kv_heads, head_dim, window, short_places, dtype, monkeypatch
):
    """Rows of all lengths up to a full one, one that holds nothing else, and one that is there only to fill up."""
    places = 300
    monkeypatch.setattr(fused, "SHORT_PLACES", short_places)
    pool = KVPool([LayerShape(kv_heads, head_dim)], 7, places + queries, dtype, engines.DEVICE)
    layer = pool.layers[0]
    starts = torch.tensor([0, 1, 15, 100, places - queries, places], device=engines.DEVICE)
    rows = len(starts)
    numbers = torch.tensor([6, 1, 0, 2, 5, 3], device=engines.DEVICE)
    for number, start in zip(numbers.tolist(), starts.tolist(), strict=True):
        end = start + queries
        layer[number, :, :, :end] = randn(2, kv_heads, end, head_dim, dtype=dtype)
        layer[number, :, :, end:] = torch.nan  # never read
    query = randn(rows, heads, queries, head_dim, dtype=dtype)
    positions = starts[:, None] + torch.arange(queries, device=engines.DEVICE)
    found = fused.attend(query, numbers, positions, layer, 0.3, window, places)

    assert found.shape == (rows, queries, heads, head_dim)
    assert not found[-1].any(), "rows that fill up get zeros"
    for row, start in enumerate(starts.tolist()[:-1]):
        keys, values = (layer[numbers[row], part, :, : start + queries].float() for part in range(2))
        keys, values = (each.repeat_interleave(heads // kv_heads, dim=0) for each in (keys, values))
        ages = positions[row, :, None] - torch.arange(start + queries, device=engines.DEVICE)
        seen = (ages >= 0) & (ages < (window or places))
        plain = torch.nn.functional.scaled_dot_product_attention(
            query[row].float(), keys, values, attn_mask=seen, scale=0.3
        )
        close = {"rtol": CLOSE[dtype], "atol": CLOSE[dtype]}
        torch.testing.assert_close(found[row].float(), plain.transpose(0, 1), **close)


@pytest.mark.parametrize("family", ["mistral", "qwen3"])  # with windows, with normalised heads
def test_an_engine_with_fused_kernels_generates_the_same_tokens(family, monkeypatch):
    """All passes are captured before serving; there are more requests than slots, and prompts arrive while others decode."""
    settings = {"max_batch_size": 2, "max_speculation_length": 2, "max_context_length": 64, "prefill_chunk": 24}
    requests = [engines.request(str(at), list(range(1, 3 + 11 * at)), max_tokens=4) for at in range(4)]
    pair, chooser = engines.make_pair(family), engines.RandomLengths(1, 2)
    expected = engines.generate(engines.make_engine(pair, chooser, **settings), *requests)
    monkeypatch.setattr(llama, "kernels_for", lambda device: fused)
    monkeypatch.setattr(captured_model, "MOST_BLOCKS", 4)  # the interpreter takes seconds for 32
    monkeypatch.setattr(captured_model, "SIZES", (1, 2, 3, 4))
    chooser = engines.RandomLengths(1, 2)
    engine = engines.make_engine(pair, chooser, RerunRecorder(), record_ahead_s=600, **settings)
    models = [engine.target, engine.draft]
    before = [model.num_first_uses for model in models]
    found = engines.generate(engine, *requests)
    assert [model.num_first_uses for model in models] == before, "something was recorded while serving"
    assert [found.ids(str(at)) for at in range(4)] == [expected.ids(str(at)) for at in range(4)]


def wrong(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    total, normed = fused.add_norm(*arguments)
    return total, 1.1 * normed


def refused(*arguments: Any) -> NoReturn:
    raise OSError("no compiler\nand more")  # of no kind that CUDA's errors are


# Without a check, wrong results cannot be noticed.
@pytest.mark.parametrize(("add_norm", "checked"), [(wrong, True), (refused, True), (refused, False)])
def test_kernels_that_fail_or_compute_wrongly_are_disabled(add_norm, checked, monkeypatch, caplog):
    """Found wrong before anything is served; found not to run, also later."""
    kernels = SimpleNamespace(**{**vars(fused), "add_norm": add_norm})
    prompts = [engines.request(str(at), [*range(1, 4 + 3 * at)], max_tokens=12) for at in range(5)]
    expected = engines.generate(engines.make_engine(recorder=RerunRecorder()), *prompts)
    monkeypatch.setattr(llama, "kernels_for", lambda device: kernels)
    engine = engines.make_engine(recorder=RerunRecorder(), check_models=checked)
    found = engines.generate(engine, *prompts)
    assert [found.ids(str(at)) for at in range(5)] == [expected.ids(str(at)) for at in range(5)]
    for model in (engine.target, engine.draft):
        assert isinstance(model, CapturedModel)
        assert model.model.kernels is None
        assert model.recorder is not None
    warnings = [record.getMessage() for record in caplog.records if "kernels are not used" in record.getMessage()]
    assert len(warnings) == 2  # the target's and the draft's
    assert all(("no compiler" if add_norm is refused else "other logits") in one for one in warnings)


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from speclen.worker.backends.torch import fused

constants = {"has_change": True, "block": 64, "num_heads": 4, "num_stored": 4, "head_dim": 64}
constants |= {"block_heads": 16, "block_dim": 64, "kv_heads": 2, "block_queries": 16, "block_keys": 64}
constants |= {"is_interpreted": False, "has_parts": False}
numbers = {"size": "i32", "eps": "fp32", "queries": "i32", "length": "i32", "angle_stride": "i32", "positions": "*i64"}
numbers |= {"rows": "*i64", "scaling": "fp32", "window": "i32", "num_places": "i32", "grouped": "i32", "sums": "*fp32"}
numbers |= {"count": "i32", "found": "*fp32", "num_parts": "i32"}
sizes = fused.block_sizes(72, 256, 4)
large = {"head_dim": 256, **dict(zip(("block_queries", "block_keys", "block_dim"), sizes, strict=True))}
for kernel, changes, dtype in (
    *((kernel, {}, "*bf16") for kernel in (fused._add_norm, fused._gate, fused._rotate_and_store)),
    *((fused._attend, {"has_window": has_window}, "*bf16") for has_window in (False, True)),
    (fused._attend, {"has_window": True} | large, "*fp32"),
    (fused._attend, {"has_window": False, "has_parts": True}, "*bf16"),
    (fused._join, {"num_parts": 4}, "*bf16"),
):
    constants |= changes
    numbers["output"] = "*fp32" if "has_parts" in changes else dtype
    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if name in constants else numbers.get(name, dtype) for name in names}
    chosen = {(at,): constants[name] for at, name in enumerate(names) if name in constants}
    compiled = compile(ASTSource(kernel, signature, chosen), target=GPUTarget("cuda", 86, 32), options={"num_stages": 2})
    print(len(compiled.asm["ptx"]) > 1000 and compiled.metadata.shared <= 99 << 10)
"""


def test_fused_kernels_compile_for_a_gpu(tmp_path):
    """Story: the interpreter ran kernels that the compiler refused, or that use more shared memory than a GPU has."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["True"] * 8, done.stderr
