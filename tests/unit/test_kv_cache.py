"""Rows are moved and released, and memory follows the tokens in use and the limits of the container."""

import math
import sys

import numpy as np
import pytest
import torch

from speclen.worker.backends import kv_cache
from speclen.worker.backends.kv_cache import KVPool, LayerShape, free_memory
from speclen.worker.backends.openvino.blocks import BLOCK_TOKENS, FREE_BLOCKS, BlockPool
from speclen.worker.models import machine

CPU = torch.device("cpu")
SHAPES = [LayerShape(2, 8), LayerShape(1, 16)]


def filled(num_rows: int = 4, lengths: tuple[int, ...] = (5, 9, 3, 7)) -> KVPool:
    """A pool whose row r holds the value r + 1 in all its tokens."""
    pool = KVPool(SHAPES, num_rows, 100, torch.float32, CPU)
    for row, length in enumerate(lengths):
        for layer in pool.layers:
            layer[row, :, :, :length] = row + 1
        pool.note_written(row, [length])
    return pool


def values(pool: KVPool, row: int, length: int) -> set[float]:
    return {value for layer in pool.layers for value in layer[row, :, :, :length].unique().tolist()}


def test_rows_are_moved_and_released_outside_inference_mode_too(monkeypatch):
    """Story: on a GPU the engine ended while it cleared up a fault: inference tensors are written in inference mode."""
    monkeypatch.setattr(kv_cache.sys, "platform", "elsewhere")  # allocated in full, as on a GPU
    with torch.inference_mode():
        pool = filled()
    pool.swap(0, 1, 5, 9)
    pool.move(3, 2, 7)
    pool.release(0)
    assert values(pool, 0, 9) == values(pool, 3, 7) == {0.0}
    assert (values(pool, 1, 5), values(pool, 2, 7)) == ({1.0}, {4.0})


def test_released_memory_is_zeroed_for_the_next_row(monkeypatch):
    """Masked places are still read, and values there that are not finite would spoil the row, even if memory is kept."""
    monkeypatch.setattr(sys, "platform", "elsewhere")
    pool = filled()
    for layer in pool.layers:
        layer[1, :, :, :9] = math.nan
    pool.swap(1, 2, 9, 3)
    assert values(pool, 1, pool.max_length) == {0.0, 3.0}
    pool.release(2)
    assert values(pool, 2, pool.max_length) == {0.0}


@pytest.mark.parametrize(("make", "num_rows"), [(KVPool, 1_000_000), (BlockPool, 1_000)])
def test_too_much_kv_memory_is_refused_with_a_sentence(make, num_rows):
    with pytest.raises(MemoryError, match=rf"{num_rows} sequences .* GiB of KV memory.*lower --max-batch-size"):
        make([LayerShape(64, 128)] * 80, num_rows, 1_000_000_000, torch.float32, *[CPU] * (make is KVPool))


@pytest.mark.parametrize(
    ("path", "limits", "expected"),
    [
        ("/", {}, 200 << 30),
        ("/", {"": (3 << 30, 2 << 30, 1 << 30)}, 2 << 30),  # a container sees its own group as the root
        ("/system.slice/speclen.service", {"system.slice/speclen.service": (8 << 30, 1 << 30, 0)}, 7 << 30),
        ("/pods/one", {"pods": (4 << 30, 3 << 30, 0), "pods/one": (8 << 30, 1 << 30, 0)}, 1 << 30),
        ("/full", {"full": (1 << 30, 2 << 30, 0)}, 0),
    ],
)
def test_free_memory_is_that_of_the_container(tmp_path, monkeypatch, path, limits, expected):
    """The process is in the group of this path, on a machine with 200 GiB free."""
    real = machine.lines_of
    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    told = {"/proc/meminfo": [f"MemAvailable: {200 << 20} kB\n"], "/proc/self/cgroup": [f"0::{path}\n"]}
    monkeypatch.setattr(machine, "lines_of", lambda name: told.get(str(name)) or real(name))
    for name, (most, used, caches) in limits.items():
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "memory.max").write_text(f"{most}\n")
        (tmp_path / name / "memory.current").write_text(f"{used}\n")
        (tmp_path / name / "memory.stat").write_text(f"anon 5\ninactive_file {caches}\n")
    assert free_memory(torch.device("cpu")) == expected


def test_memory_of_released_rows_is_returned():
    pool = BlockPool([LayerShape(2, 64), LayerShape(1, 128)], 8, 2000, torch.bfloat16)
    for row in range(8):
        blocks, _ = pool.reach(row, np.array([2000]))
        for cache in pool.caches:
            cache[blocks] = 7
    for row in range(8):
        pool.release(row)
    num_held = sum(int((cache != 0).sum()) for cache in pool.caches)
    assert num_held <= FREE_BLOCKS * BLOCK_TOKENS * pool.bytes_per_token // 2
