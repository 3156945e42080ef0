"""Assignment of sequences to slots of the batch: the rows of the KV caches. Only the scheduler places, moves or frees them.

The rows form three regions, so that every forward pass works on rows 0..n-1 of its cache:

    0 .. num_drafting-1          decoding, may draft
    .. num_decoding-1            decoding, opted out of speculation
    .. len(rows)-1               prefilling, first come first served

When a sequence ends, the last row of its region moves to its place, the last row of the next region fills that gap, and the
prefilling rows move up. That takes at most three copies of one row's keys and values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from speclen.worker.backends.passes import RowStore
from speclen.worker.requests.sequence import SequenceState


class Scheduler:
    """Admits sequences first come first served, each once there is a free row and room for all tokens it may ever have.

    slack: tokens that a step may write beyond a sequence's own. max_kv_tokens: capacity over all rows. vocab_size: for the
    sampling state, which is made when a sequence gets its row.
    """

    def __init__(
        self,
        target_pool: RowStore,
        draft_pool: RowStore | None,
        max_batch_size: int,
        max_kv_tokens: int,
        *,
        slack: int,
        vocab_size: int,
    ) -> None:
        self._pools = [target_pool] if draft_pool is None else [target_pool, draft_pool]
        self._max_batch_size = max_batch_size
        self.max_kv_tokens = max_kv_tokens
        self._slack = slack
        self._vocab_size = vocab_size
        self.waiting: deque[SequenceState] = deque()  # for a row
        self.rows: list[SequenceState] = []
        self.num_drafting = 0
        self.num_decoding = 0
        self.num_reserved_tokens = 0

    @property
    def decoding(self) -> list[SequenceState]:
        """The decoding sequences, in the order of their rows 0..num_decoding-1."""
        return self.rows[: self.num_decoding]

    @property
    def max_sequence_tokens(self) -> int:
        """Largest number of tokens of a sequence that has the whole KV cache to itself."""
        return self.max_kv_tokens - self._slack

    def kv_need(self, sequence: SequenceState) -> int:
        """Largest number of KV tokens of the sequence."""
        return sequence.limit + self._slack

    def check_fits(self, sequence: SequenceState) -> None:
        """Raise ValueError if the sequence can never fit."""
        need, sampling = self.kv_need(sequence), sequence.request.sampling
        if need > self.max_kv_tokens:
            raise ValueError(
                f"max_tokens is {sampling.max_tokens}: with the prompt it may need {need} tokens of KV memory, of "
                f"{self.max_kv_tokens}: lower it"
            )

    # Joining.

    def add(self, sequences: Iterable[SequenceState]) -> None:
        """Queue sequences for rows."""
        self.waiting.extend(sequences)

    def admit(self) -> list[tuple[SequenceState, Exception]]:
        """Give rows to waiting sequences while they fit. Returns those that could not start, with their errors."""
        failed = []
        while self.waiting and len(self.rows) < self._max_batch_size:
            if self.num_reserved_tokens + self.kv_need(self.waiting[0]) > self.max_kv_tokens:
                break  # Nothing overtakes it, or a large request would starve.
            sequence = self.waiting.popleft()
            try:
                sequence.start_sampling(self._vocab_size, self._pools[0].device)
            except Exception as error:
                failed.append((sequence, error))
            else:
                self.num_reserved_tokens += self.kv_need(sequence)
                self.rows.append(sequence)
                sequence.row = len(self.rows) - 1
                self._begin(sequence)
        return failed

    def _begin(self, sequence: SequenceState) -> None:
        """Start the row with the cached prefix of the prompt, without the last token, whose logits are needed."""
        ids = sequence.tokens[:-1]
        held = [pool.begin(sequence.row, ids) for pool in self._pools]
        sequence.target_length, sequence.draft_length = held[0], held[-1] if len(held) == 2 else 0

    def _remember(self, sequence: SequenceState) -> None:
        for pool, length in zip(self._pools, lengths(sequence), strict=False):
            pool.remember(sequence.row, sequence.tokens[:length])

    def next_copy(self) -> tuple[SequenceState, SequenceState | None] | None:
        """The first prefilling sequence and a decoding one to copy its prompt from, if another has prefilled that prompt.

        The second is None if the next token is the last one: it needs the logits after the prompt, but no keys.
        """
        if self.num_decoding == len(self.rows):
            return None
        sequence = self.rows[self.num_decoding]
        if sequence.shared is None or sequence.shared.logits is None:
            return None
        source = next((other for other in self.decoding if other.shared is sequence.shared), None)
        if source is None and (sequence.num_left > 1 or sequence.request.grammar is not None):
            return None  # The sequences that held the prompt have ended.
        return sequence, source

    # After a step.

    def settle(self, sequences: Iterable[SequenceState]) -> None:
        """Free the rows of ended sequences, and move sequences to the region that fits them now.

        Those with their first token start decoding. Those too long for the draft model stop drafting.
        """
        for sequence in sequences:
            if sequence.finished:
                self._remove(sequence)
            elif sequence.row >= self.num_decoding and sequence.num_output_tokens:
                self._start_decoding(sequence)
            elif sequence.row < self.num_drafting and not sequence.may_draft:
                self.num_drafting -= 1
                self._exchange(sequence.row, self.num_drafting)

    def _start_decoding(self, sequence: SequenceState) -> None:
        assert sequence.row == self.num_decoding, "prompts are completed in the order of their rows"
        self.num_decoding += 1
        self._remember(sequence)
        if not sequence.may_draft:
            return
        self._exchange(sequence.row, self.num_drafting)
        self.num_drafting += 1

    def _remove(self, sequence: SequenceState) -> None:
        """Free the row and the reserved tokens of a sequence, if it has a row."""
        if sequence.row < 0:
            return
        if not sequence.failed:
            self._remember(sequence)
        sequence.ngram_index = None
        hole, sequence.row = sequence.row, -1
        self._release(hole)
        self.num_reserved_tokens -= self.kv_need(sequence)
        if hole < self.num_drafting:
            self.num_drafting -= 1
            hole = self._fill(hole, self.num_drafting)
        if hole < self.num_decoding:
            self.num_decoding -= 1
            hole = self._fill(hole, self.num_decoding)
        # Prefilling rows keep their order. Between steps all but the first are empty.
        for row in range(hole, len(self.rows) - 1):
            self._fill(row, row + 1)
        self.rows.pop()

    def drop_waiting(self, request_id: str) -> list[SequenceState]:
        """Remove a request's waiting sequences from the queue, and return them."""
        dropped = [sequence for sequence in self.waiting if sequence.request.request_id == request_id]
        self.waiting = deque(sequence for sequence in self.waiting if sequence.request.request_id != request_id)
        return dropped

    def clear(self) -> None:
        """Drop all sequences and release their rows. Nothing is moved, so this works after any failure."""
        rows, self.rows = self.rows, []
        self.waiting.clear()
        self.num_drafting = self.num_decoding = self.num_reserved_tokens = 0
        for row, sequence in enumerate(rows):
            sequence.row = -1
            self._release(row)

    # Keys and values.

    def _fill(self, hole: int, source: int) -> int:
        """Move the source row into the hole, and return the new hole: the source."""
        if source != hole:
            moved = self.rows[hole] = self.rows[source]
            moved.row = hole
            for pool, length in zip(self._pools, lengths(moved), strict=False):
                pool.move(source, hole, length)
        return source

    def _release(self, row: int) -> None:
        for pool in self._pools:
            pool.release(row)

    def _exchange(self, first: int, second: int) -> None:
        if first == second:
            return
        one, other = self.rows[first], self.rows[second]
        for pool, one_length, other_length in zip(self._pools, lengths(one), lengths(other), strict=False):
            pool.swap(first, second, one_length, other_length)
        self.rows[first], self.rows[second] = other, one
        other.row, one.row = first, second


def lengths(sequence: SequenceState) -> tuple[int, int]:
    """Tokens of the sequence in the target's KV cache and in the draft model's."""
    return sequence.target_length, sequence.draft_length
