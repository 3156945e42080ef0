"""Memory allocated meanwhile gets huge pages; nothing else is touched."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from speclen.worker.backends.openvino import huge_pages as module
from speclen.worker.backends.openvino.huge_pages import HUGE, NewMemory, anonymous, whole_pages, without

MADV_COLLAPSE = 25  # of Linux, since 6.1
MAPS = """\
55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
7f0000400000-7f0000500000 ---p 00000000 00:00 0
7f0000500000-7f0000600000 rw-s 00000000 00:01 77                         /dev/zero (deleted)
7f0000600000-7f0000700000 r-xp 00001000 fe:00 1234                       /usr/lib/libc.so.6
7f0000700000-7f0000701000 rw-p 00002000 fe:00 1234                       /usr/lib/libc.so.6
"""


def test_only_private_memory_of_no_file_counts() -> None:
    assert anonymous(MAPS) == [(0x55D0C0000000, 0x55D0C0021000), (0x7F0000000000, 0x7F0000400000)]


@pytest.mark.parametrize(
    ("others", "left"),
    [
        ([], [(10, 20), (30, 40)]),
        ([(0, 50)], []),
        ([(10, 20)], [(30, 40)]),
        ([(12, 14), (16, 35)], [(10, 12), (14, 16), (35, 40)]),
        ([(0, 10), (20, 30), (40, 50)], [(10, 20), (30, 40)]),
        ([(5, 15), (38, 60)], [(15, 20), (30, 38)]),
    ],
)
def test_what_was_there_before_is_left_out(others: list[tuple[int, int]], left: list[tuple[int, int]]) -> None:
    assert without([(10, 20), (30, 40)], others) == left


def test_only_whole_pages_are_asked_for() -> None:
    assert whole_pages([(1, 3 * HUGE - 1), (5 * HUGE, 6 * HUGE), (7, 9)]) == [HUGE, 5 * HUGE]


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
