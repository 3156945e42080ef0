"""Memory allocated meanwhile gets huge pages; nothing else is touched."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from speclen.worker.backends.openvino import huge_pages as module
from speclen.worker.backends.openvino.huge_pages import HUGE, NewMemory

MADV_COLLAPSE = 25  # of Linux, since 6.1


def num_huge_bytes(address: int) -> int:
    """Of the mapping that has the address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text("ascii").splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "AnonHugePages:":
            return 1024 * int(line.split()[1])
    return 0


def written(num_pages: int) -> tuple[mmap.mmap, int]:
    """Private memory of so many huge pages and its address, every page of it written."""
    import numpy as np

    memory = mmap.mmap(-1, num_pages * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, np.uint8)
    array[:: mmap.PAGESIZE] = 1
    return memory, array.ctypes.data


def test_memory_that_is_new_gets_huge_pages() -> None:
    try:
        written(1)[0].madvise(MADV_COLLAPSE)
    except OSError as error:
        pytest.skip(f"this kernel collapses no pages: {error}")
    old, old_address = written(8)
    memory = NewMemory()
    new, new_address = written(8)
    before = num_huge_bytes(old_address)
    memory.use_huge_pages()
    assert num_huge_bytes(new_address) >= 6 * HUGE
    assert num_huge_bytes(old_address) - before <= 8 * HUGE, "mappings that touch are one, so it may be the new one's"
    assert new[0] == old[0] == 1


def test_a_system_that_forbids_them_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    monkeypatch.setattr(module, "SETTING", setting)
    memory = NewMemory()
    _, address = written(8)
    before = num_huge_bytes(address)
    memory.use_huge_pages()
    assert num_huge_bytes(address) <= before
