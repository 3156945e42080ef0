"""Reports of a worker whose steps overlap, as vLLM's do: two steps late, with the plugin's flags.

In the recordings, steps flagged `prefill` and `first_use` take as long as others (ratios 1.00 and 1.05). 1.4% of the steps
report 0.5 to 3 ms: the queue had run empty, so their result arrived right after the previous one.
"""

from __future__ import annotations

from collections import deque

from speclen.integrations.vllm.timing import NUM_BEFORE, StepShape, overlap_flags
from speclen.records import StepFlag, StepRecord

SHORT_SHARE, SHORT_S = 0.014, (0.0005, 0.003)


class Queue:
    """Steps in flight and the flags of their reports, by the plugin's rule for steps that overlap."""

    def __init__(self) -> None:
        self._before: deque[StepShape] = deque(maxlen=NUM_BEFORE)
        self._pending: deque[tuple[StepRecord, StepShape]] = deque()
        self._seen: set[tuple[int, int, int]] = set()
        self._reports: list[StepRecord] = []

    def add(self, record: StepRecord, with_prefill: bool, ran_empty: bool) -> None:
        """Add a step, and report the one two steps earlier, whose flags are known now."""
        length = record.arm.speculation_length
        if self._pending:
            self._drafted(self._pending[-1][1], length)
        was_queued = bool(self._pending) and not ran_empty
        self._pending.append(
            (record, StepShape(record.batch_size, length, length, with_prefill, was_queued=was_queued))
        )
        if len(self._pending) > 2:
            self._report(self._pending[1][1])

    def drain(self) -> None:
        """Report all remaining steps. The last one has no successor."""
        self._drafted(self._pending[-1][1], self._pending[-1][1].verified)
        while self._pending:
            self._report(self._pending[1][1] if len(self._pending) > 1 else None)

    def take(self) -> list[StepRecord]:
        """Return the reports since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def _drafted(self, shape: StepShape, length: int) -> None:
        shape.drafted = length
        key = (shape.num_decoding, shape.verified, length)
        shape.is_first = key not in self._seen
        self._seen.add(key)

    def _report(self, following: StepShape | None) -> None:
        record, shape = self._pending.popleft()
        flags = overlap_flags(self._before, shape, following)
        flags |= {StepFlag.PREFILL} if shape.with_prefill else set()
        flags |= {StepFlag.FIRST_USE} if shape.is_first else set()
        self._reports.append(record._replace(flags=frozenset(flags)))
        self._before.append(shape)
