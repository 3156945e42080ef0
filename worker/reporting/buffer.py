"""Reports that are not durable at the controller yet."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

from speclen.records import StepRecord

BLOCK = 64  # consecutive steps reported out of each BLOCK x sample_every


@dataclass(slots=True)
class ReportBuffer:
    """Reports from append to durable.

    The engine's thread only appends; the event loop moves appended records into its own deque, so there is no lock.
    `trim`, on the event loop, keeps the bound. sample_every: 1 for all steps; only reported ones have a seq.
    """

    max_buffered: int
    sample_every: int = 1
    records: deque[StepRecord] = field(default_factory=deque)
    num_dropped: int = 0
    _appended: deque[StepRecord] = field(default_factory=deque)
    _last_seq: int = 0
    _place: int = 0  # of the next step, among those of which one block is reported

    def append(self, record: StepRecord) -> None:
        """Number a step and keep it, if it is sampled."""
        place, self._place = self._place, (self._place + 1) % (BLOCK * self.sample_every)
        if place < BLOCK:
            self._last_seq += 1
            self._appended.append(record._replace(seq=self._last_seq))

    def will_report(self, num_steps: int = 1) -> bool:
        """True if all of the next num_steps steps are reported."""
        return self.sample_every == 1 or self._place + num_steps <= BLOCK

    def __len__(self) -> int:
        """Number of kept reports; from any thread."""
        return len(self.records) + len(self._appended)

    def _fetch(self) -> None:
        while self._appended:
            self.records.append(self._appended[0])  # before popleft, so that __len__ always counts it
            self._appended.popleft()

    def trim(self) -> None:
        """Drop the oldest reports beyond the bound."""
        self._fetch()
        while len(self.records) > self.max_buffered:
            self.records.popleft()
            self.num_dropped += 1

    def forget_until(self, durable_seq: int) -> None:
        """Remove durable reports."""
        self._fetch()
        while self.records and self.records[0].seq <= durable_seq:
            self.records.popleft()

    def after(self, seq: int, limit: int) -> list[StepRecord]:
        """Up to `limit` records with a larger seq, in order. The records are consecutive, so this is one slice."""
        self._fetch()
        if not self.records:
            return []
        skip = max(0, seq - self.records[0].seq + 1)
        return list(itertools.islice(self.records, skip, skip + limit))
