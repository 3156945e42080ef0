"""Which sequences have rows, and which row is whose.

Rows are kept in three regions, so that every pass works on rows 0..n-1 of its pool:

    0 .. num_drafting-1          decoding, may draft
    .. num_decoding-1            decoding, opted out of speculation
    .. len(rows)-1               prefilling, first come first served

When a row leaves, the last row of its region moves into its place, the last row of the next region into the hole that
this leaves, and the prefilling rows move up: at most three copies of one row's keys and values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from worker.backends.passes import RowStore
from worker.sequence import Sequence


class Scheduler:
    """First come first served. A sequence gets a row when one is free and the tokens that it may hold at most fit.

    slack: tokens that a step may write beyond a row's own. max_kv_tokens: over all rows. A request of n sequences goes
    behind the others that wait after each of them, so that it does not hold up the queue.
    """

    def __init__(
        self, target_pool: RowStore, draft_pool: RowStore | None, max_batch_size: int, max_kv_tokens: int, slack: int
    ) -> None:
        self._target_pool = target_pool
        self._draft_pool = draft_pool
        self._max_batch_size = max_batch_size
        self.max_kv_tokens = max_kv_tokens
        self._slack = slack
        self.waiting: deque[list[Sequence]] = deque()  # requests; their sequences that have no row yet
        self.rows: list[Sequence] = []
        self.num_drafting = 0
        self.num_decoding = 0
        self.num_reserved_tokens = 0
        self.version = 0  # grows whenever the decoding rows change

    @property
    def decoding(self) -> list[Sequence]:
        """Sequences of rows 0..num_decoding-1."""
        return self.rows[: self.num_decoding]

    @property
    def num_waiting(self) -> int:
        """Requests of which any sequence waits for a row."""
        return len(self.waiting)

    def kv_need(self, sequence: Sequence) -> int:
        """Tokens of KV that the sequence may come to hold."""
        return sequence.limit + self._slack

    def add(self, sequences: Iterable[Sequence]) -> None:
        self.waiting.append(list(sequences))

    def admit(self) -> list[Sequence]:
        """Give rows to waiting sequences while they fit; returns them."""
        admitted = []
        while self.waiting and len(self.rows) < self._max_batch_size:
            sequence = self.waiting[0][0]
            if self.num_reserved_tokens + self.kv_need(sequence) > self.max_kv_tokens:
                break  # Nobody overtakes: a large request would wait forever.
            group = self.waiting.popleft()
            group.pop(0)
            if group:
                self.waiting.append(group)
            self.num_reserved_tokens += self.kv_need(sequence)
            self.rows.append(sequence)
            admitted.append(sequence)
        return admitted

    def next_prefill(self) -> Sequence | None:
        """The sequence whose prompt is next; its row is num_decoding."""
        return self.rows[self.num_decoding] if self.num_decoding < len(self.rows) else None

    @property
    def prefilling(self) -> list[Sequence]:
        """Sequences of the rows from num_decoding on."""
        return self.rows[self.num_decoding :]

    def start_decoding(self) -> None:
        """The first prefilling sequence becomes a decoding one."""
        row = self.num_decoding
        self.num_decoding += 1
        self.version += 1
        if not self.rows[row].may_draft:
            return
        if row != self.num_drafting:
            self._swap(row, self.num_drafting)
        self.num_drafting += 1

    def remove(self, sequence: Sequence) -> None:
        """Free the sequence's row and its reservation."""
        self.version += 1
        hole = self.rows.index(sequence)
        self._release(hole)
        self.num_reserved_tokens -= self.kv_need(sequence)
        if hole < self.num_drafting:
            self.num_drafting -= 1
            hole = self._fill(hole, self.num_drafting)
        if hole < self.num_decoding:
            self.num_decoding -= 1
            hole = self._fill(hole, self.num_decoding)
        # Prefilling rows keep their order. Between steps all but the first hold nothing yet.
        for row in range(hole, len(self.rows) - 1):
            self._fill(row, row + 1)
        self.rows.pop()

    def drop_waiting(self, request_id: str) -> list[Sequence]:
        """Take a request's waiting sequences out of the queue."""
        dropped = [s for group in self.waiting for s in group if s.request.request_id == request_id]
        self.waiting = deque(group for group in self.waiting if group[0].request.request_id != request_id)
        return dropped

    def num_kv_tokens(self) -> int:
        """Tokens that the rows hold."""
        return sum(sequence.target_length for sequence in self.rows)

    def _fill(self, hole: int, source: int) -> int:
        """Move a row into the hole; returns where the hole is then."""
        if source != hole:
            moved = self.rows[hole] = self.rows[source]
            self._target_pool.move(source, hole, moved.target_length)
            if self._draft_pool is not None:
                self._draft_pool.move(source, hole, moved.draft_length)
        return source

    def _release(self, row: int) -> None:
        self._target_pool.release(row)
        if self._draft_pool is not None:
            self._draft_pool.release(row)

    def _swap(self, first: int, second: int) -> None:
        one, other = self.rows[first], self.rows[second]
        self._target_pool.swap(first, second, one.target_length, other.target_length)
        if self._draft_pool is not None:
            self._draft_pool.swap(first, second, one.draft_length, other.draft_length)
        self.rows[first], self.rows[second] = other, one
