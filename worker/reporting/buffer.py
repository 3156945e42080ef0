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

    The engine's thread only appends, and the event loop fetches what was appended into records of its own, so neither
    needs a lock: a deque that grows meanwhile could not be read through. The bound is kept by the event loop, in `trim`.
    sealed: first and last of windows that were sent added up, and raw_seq the last that was sent by itself: sent again,
    each goes as it went before, so that nothing counts twice.
    """

    max_buffered: int
    records: deque[Record] = field(default_factory=deque)
    num_dropped: int = 0
    sealed: deque[tuple[int, int]] = field(default_factory=deque)
    raw_seq: int = 0
    next_seq: Callable[[], int] = field(default_factory=lambda: itertools.count(1).__next__)
    _appended: deque[Record] = field(default_factory=deque)

    def append(self, choice: LengthChoice, result: StepResult) -> None:
        self._appended.append((self.next_seq(), choice, result))

    def __len__(self) -> int:
        """Reports that are kept; from any thread."""
        return len(self.records) + len(self._appended)

    def _fetch(self) -> None:
        while self._appended:
            self.records.append(self._appended[0])  # first, so that no other thread finds it nowhere
            self._appended.popleft()

    def trim(self) -> None:
        """Drop the oldest reports beyond the bound: they are worth the least."""
        self._fetch()
        while len(self.records) > self.max_buffered:
            self.records.popleft()
            self.num_dropped += 1
        if self.records:
            self._unseal_until(self.records[0][0] - 1)

    def forget_until(self, durable_seq: int) -> None:
        self._fetch()
        while self.records and self.records[0][0] <= durable_seq:
            self.records.popleft()
        self._unseal_until(durable_seq)

    def _unseal_until(self, seq: int) -> None:
        while self.sealed and self.sealed[0][1] <= seq:
            self.sealed.popleft()

    def after(self, seq: int, limit: int) -> list[Record]:
        """Up to `limit` records with a larger seq, in order. The records are consecutive, so this is one slice."""
        self._fetch()
        records = self.records
        if not records:
            return []
        skip = max(0, seq - records[0][0] + 1)
        return list(itertools.islice(records, skip, skip + limit))
