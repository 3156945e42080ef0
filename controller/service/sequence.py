"""Numbers of one worker's reports that have been seen: they make a repeated report count once.

Reports are numbered 1, 2, 3, ... `applied_seq` is the largest number seen. A number above it is new; those that it skips
are remembered as missing, so that a report that was overtaken on its way still counts, once. What stays missing for some
seconds is given up: a worker that had to drop reports never sends them. Every other number up to `applied_seq` is a
repetition. `settled_seq` is the largest number below which nothing is missing: it only grows, and the worker may forget
what lies below once that is on disk.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from itertools import pairwise

MAX_RANGES = 256  # ranges of missing numbers that are remembered; the oldest are given up first
MAX_COUNT = 2**63 - 1  # of SQLite; a count stops there
# Seconds for which a number that was skipped may still come, at least, and at most twice that. Reports overtake each
# other within a moment; until then the worker keeps all that follows the gap.
GAP_PATIENCE_S = 5.0


class SeqWindow:
    """The numbers of one worker and epoch.

    num_missing: numbers that never arrived; num_repeated: reports recognised and ignored, over all epochs.
    missing: JSON [[first, last], ...], as the store keeps it; ValueError for anything else.
    """

    __slots__ = ("_closing_at", "_closing_seq", "applied_seq", "missing", "num_missing", "num_repeated")

    def __init__(self, applied_seq: int = 0, missing: str = "[]", num_missing: int = 0, num_repeated: int = 0) -> None:
        self.applied_seq = applied_seq
        self.missing = read_ranges(missing, applied_seq)
        self.num_missing = num_missing
        self.num_repeated = num_repeated
        self._closing_at, self._closing_seq = 0.0, 0

    @property
    def settled_seq(self) -> int:
        """Every number up to it was seen or given up; never less than before."""
        return self.missing[0][0] - 1 if self.missing else self.applied_seq

    def close_gaps(self, now: float) -> bool:
        """Give up numbers that have been missing for long enough; True if that settles anything. now: in seconds."""
        waiting_s = self._closing_at - now
        if not self.missing or 0.0 < waiting_s <= GAP_PATIENCE_S:  # more: the clock was set back
            return False
        before = self.settled_seq
        while self.missing and self.missing[0][1] <= self._closing_seq:
            del self.missing[0]
        self._closing_at, self._closing_seq = now + GAP_PATIENCE_S, self.applied_seq
        return self.settled_seq != before

    def admit(self, seq: int) -> bool:
        """Note the number as seen; True if it is new. Numbers that no worker gives are left to be refused."""
        if seq == self.applied_seq + 1 <= MAX_COUNT:
            self.applied_seq = seq
            return True
        if not 0 < seq <= MAX_COUNT:
            return True
        if seq > self.applied_seq:
            self._skip(self.applied_seq + 1, seq - 1)
            self.applied_seq = seq
            return True
        if self._fill(seq):
            return True
        self.num_repeated = min(self.num_repeated + 1, MAX_COUNT)
        return False

    def _skip(self, first: int, last: int) -> None:
        self.num_missing = min(self.num_missing + last - first + 1, MAX_COUNT)
        self.missing.append([first, last])
        del self.missing[:-MAX_RANGES]

    def _fill(self, seq: int) -> bool:
        """Take a number out of the missing ones; False if it is none."""
        index = bisect_right(self.missing, seq, key=lambda bounds: bounds[0]) - 1
        if index < 0 or self.missing[index][1] < seq:
            return False
        low, high = self.missing[index]
        self.missing[index : index + 1] = [each for each in ([low, seq - 1], [seq + 1, high]) if each[0] <= each[1]]
        del self.missing[:-MAX_RANGES]
        self.num_missing = max(self.num_missing - 1, 0)
        return True

    @property
    def missing_ranges(self) -> str:
        """Missing ranges as the store keeps them: [[first, last], ...]."""
        return json.dumps(self.missing) if self.missing else "[]"


def read_ranges(text: str, applied_seq: int) -> list[list[int]]:
    """Ranges of missing numbers, ascending and below applied_seq. Raises ValueError for anything else."""
    ranges = json.loads(text)
    if not isinstance(ranges, list) or not all(
        isinstance(each, list) and [type(seq) for seq in each] == [int, int] for each in ranges
    ):
        raise ValueError(f"{text!r} are not ranges of numbers")
    flat = [0, *(seq + side for bounds in ranges for side, seq in enumerate(bounds)), applied_seq + 1]
    if any(later <= earlier for earlier, later in pairwise(flat)):
        raise ValueError(f"{text!r} are not ascending ranges below {applied_seq}")
    return ranges
