"""Reports that the controller does not have on disk yet."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from speclen.worker.engine.length_chooser import LengthChoice, StepResult

# seq, the choice, and what came of it.
Record = tuple[int, LengthChoice, StepResult]


@dataclass(slots=True)
class ReportBuffer:
    """Reports from append to durable.

    The engine's thread only appends and the event loop alone removes, so neither needs a lock; the bound is therefore
    kept by the event loop, in `trim`. sealed: first and last of windows that were sent added up, and raw_seq the last that
    was sent by itself: sent again, each goes as it went before, so that nothing counts twice.
    """

    max_buffered: int
    records: deque[Record] = field(default_factory=deque)
    num_dropped: int = 0
    sealed: deque[tuple[int, int]] = field(default_factory=deque)
    raw_seq: int = 0
    next_seq: Callable[[], int] = field(default_factory=lambda: itertools.count(1).__next__)

    def append(self, choice: LengthChoice, result: StepResult) -> None:
        self.records.append((self.next_seq(), choice, result))

    def trim(self) -> None:
        """Drop the oldest reports beyond the bound: they are worth the least."""
        while len(self.records) > self.max_buffered:
            self.records.popleft()
            self.num_dropped += 1
        if self.records:
            self._unseal_until(self.records[0][0] - 1)

    def forget_until(self, durable_seq: int) -> None:
        while self.records and self.records[0][0] <= durable_seq:
            self.records.popleft()
        self._unseal_until(durable_seq)

    def _unseal_until(self, seq: int) -> None:
        while self.sealed and self.sealed[0][1] <= seq:
            self.sealed.popleft()

    def after(self, seq: int, limit: int) -> list[Record]:
        """Up to `limit` records with a larger seq, in order. The records are consecutive, so this is one slice."""
        records = self.records
        if not records:
            return []
        skip = max(0, seq - records[0][0] + 1)
        return list(itertools.islice(records, skip, skip + limit))
