"""Pages of 2 MiB for the weights of a compiled model.

A pass reads every weight once. Every page of 4 KiB needs a look-up in page tables, two in a virtual machine, and ends a
prefetch. The library that allocates the weights does not ask for larger pages, so memory that the process has gained
meanwhile is collapsed afterwards (madvise(2), MADV_COLLAPSE, Linux 6.1).
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

HUGE = 2 * 2**20
MADV_COLLAPSE = 25
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class NewMemory:
    """Memory that the process allocates from now on."""

    def __init__(self) -> None:
        self._before = _pages() if _allowed() else None

    def use_huge_pages(self) -> None:
        """Collapse the part in use into huge pages, where the system allows it."""
        if self._before is None:
            return
        pages = _pages() - self._before
        failed = [error for page in pages if (error := _collapse(page))]
        if failed:  # unwritten parts, or no memory: they stay as they are
            log.debug("%d of %d times 2 MiB stay in small pages: %s", len(failed), len(pages), failed[-1])


def _pages() -> set[int]:
    """Addresses of the huge pages within private writable memory without a file."""
    maps = Path("/proc/self/maps").read_text("utf-8", errors="replace")  # with files' names in it
    lines = [line.split() for line in maps.splitlines()]
    found = [fields[0].split("-") for fields in lines if fields[1] == "rw-p" and fields[4] == "0"]
    ranges = [(int(begin, 16), int(end, 16)) for begin, end in found]
    return {page for begin, end in ranges for page in range(-(-begin // HUGE) * HUGE, end - HUGE + 1, HUGE)}


def _allowed() -> bool:
    try:
        return "[never]" not in SETTING.read_text("ascii")
    except OSError:
        return False


def _collapse(page: int) -> str | None:
    """Collapse the memory at this address into a huge page. Returns the system's error, None if there was none."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE), MADV_COLLAPSE) == 0:
        return None
    return os.strerror(ctypes.get_errno())
