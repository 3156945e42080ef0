"""A row keeps its place and its contents, whatever other rows do, and memory follows what rows hold."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from speclen.worker.backends import kv_cache
from speclen.worker.backends.kv_cache import KVPool, LayerShape, free_memory
from speclen.worker.models import control_groups

CPU = torch.device("cpu")
SHAPES = [LayerShape(2, 8), LayerShape(1, 16)]


def filled(num_rows: int = 4, lengths: tuple[int, ...] = (5, 9, 3, 7)) -> KVPool:
    """A pool whose row r holds the value r + 1 in all its tokens."""
    pool = KVPool(SHAPES, num_rows, 100, torch.float32, CPU)
    for row, length in enumerate(lengths):
        for layer in pool.layers:
            layer[row, :, :, :length] = row + 1
        pool.note_written(row, length)
    return pool


def values(pool: KVPool, row: int, length: int) -> set[float]:
    return {value for layer in pool.layers for value in layer[row, :, :, :length].unique().tolist()}


def test_rows_are_moved_and_released_outside_inference_mode_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: on a GPU an engine that cleared up after a fault ended: what is allocated in that mode is written to in it."""
    monkeypatch.setattr(kv_cache.sys, "platform", "elsewhere")  # allocated in full, as on a GPU
    with torch.inference_mode():
        pool = filled()
    pool.swap(0, 1, 5, 9)
    pool.move(3, 2, 7)
    pool.release(0)
    assert values(pool, 0, 9) == values(pool, 3, 7) == {0.0}
    assert (values(pool, 1, 5), values(pool, 2, 7)) == ({1.0}, {4.0})


def test_nobody_gets_what_another_row_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked places are read all the same, and what is not finite there would spoil the row; also where no memory is
    handed back."""
    monkeypatch.setattr(sys, "platform", "elsewhere")
    pool = filled()
    for layer in pool.layers:
        layer[1, :, :, :9] = math.nan
    pool.swap(1, 2, 9, 3)
    assert values(pool, 1, pool.max_length) == {0.0, 3.0}
    pool.release(2)
    assert values(pool, 2, pool.max_length) == {0.0}


def test_what_cannot_be_had_is_refused_with_a_sentence() -> None:
    with pytest.raises(MemoryError, match=r"1000000 sequences .* GiB of KV memory.*lower --max-batch-size"):
        KVPool([LayerShape(64, 128)] * 80, 1_000_000, 1_000_000, torch.float32, CPU)


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
def test_free_is_what_the_container_has_left_and_not_the_host(tmp_path, monkeypatch, path, limits, expected):
    """The process is in the group of this path, on a machine with 200 GiB free."""
    real = control_groups.lines_of
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path)
    told = {"/proc/meminfo": [f"MemAvailable: {200 << 20} kB\n"], "/proc/self/cgroup": [f"0::{path}\n"]}
    monkeypatch.setattr(control_groups, "lines_of", lambda name: told.get(str(name)) or real(name))
    for name, (most, used, caches) in limits.items():
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "memory.max").write_text(f"{most}\n")
        (tmp_path / name / "memory.current").write_text(f"{used}\n")
        (tmp_path / name / "memory.stat").write_text(f"anon 5\ninactive_file {caches}\n")
    assert free_memory(torch.device("cpu")) == expected
