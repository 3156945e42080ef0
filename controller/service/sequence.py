"""Which reports of a worker's life have been seen: what makes a repeated report count once.

Reports are numbered 1, 2, 3, ... `applied_seq` is the largest number seen. A number above it is new; what it skips is
remembered as missing, so that a report that was overtaken on its way still counts, once. Every other number up to
`applied_seq` is a repetition.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence

MAX_RANGES = 256  # ranges of missing numbers that are remembered; the oldest are given up first


class SeqWindow:
    """The numbers of one worker and epoch.

    num_missing: numbers that never arrived; num_repeated: reports recognised and ignored, over all epochs.
    late: numbers that filled a gap and are not on disk yet.
    """

    __slots__ = ("applied_seq", "late", "missing", "num_missing", "num_repeated")

    def __init__(self, applied_seq: int = 0, missing: str = "[]", num_missing: int = 0, num_repeated: int = 0) -> None:
        self.applied_seq = applied_seq
        self.missing: list[list[int]] = json.loads(missing)
        self.num_missing = num_missing
        self.num_repeated = num_repeated
        self.late: set[int] = set()

    def admit(self, seqs: Sequence[int]) -> list[bool] | None:
        """Note the numbers as seen; say which are new. None, the usual answer: all are, and none is skipped."""
        first = self.applied_seq + 1
        last = self.applied_seq + len(seqs)
        if not seqs or (seqs[0] == first and seqs[-1] == last and list(seqs) == list(range(first, last + 1))):
            self.applied_seq = last
            return None
        return [self._admit_one(seq) for seq in seqs]

    def _admit_one(self, seq: int) -> bool:
        if not 0 < seq < 2**63:
            return True  # not a number of ours: left to be refused, and noted nowhere
        if seq > self.applied_seq:
            self._skip(self.applied_seq + 1, seq - 1)
            self.applied_seq = seq
            return True
        if self._fill(seq):
            return True
        self.num_repeated += 1
        return False

    def _skip(self, first: int, last: int) -> None:
        if first > last:
            return
        self.num_missing += last - first + 1
        self.missing.append([first, last])
        del self.missing[:-MAX_RANGES]

    def _fill(self, seq: int) -> bool:
        """Take seq out of the missing numbers; False if it is not one of them."""
        index = bisect_right(self.missing, seq, key=lambda bounds: bounds[0]) - 1
        if index < 0 or self.missing[index][1] < seq:
            return False
        first, last = self.missing[index]
        self.missing[index : index + 1] = [
            bounds for bounds in ([first, seq - 1], [seq + 1, last]) if bounds[0] <= bounds[1]
        ]
        del self.missing[:-MAX_RANGES]
        self.num_missing -= 1
        self.late.add(seq)
        return True

    def missing_json(self) -> str:
        """Missing ranges as the store keeps them: [[first, last], ...]."""
        return json.dumps(self.missing) if self.missing else "[]"
