"""N-gram proposals of the sequences in a step, whose indexes grow by a bounded number of tokens a step."""

from __future__ import annotations

from collections.abc import Sequence

from speclen.records import NGRAM_MAX_TOKENS
from speclen.worker.drafting.ngrams import NgramIndex
from speclen.worker.requests.sequence import SequenceState

# Tokens of prompts indexed in a step, over all sequences: half a millisecond. New output comes on top.
INDEXED_PER_STEP = 256
MOST_NEW = 128  # bound on tokens that a sequence generates in a step


def propose_ngrams(
    rows: Sequence[SequenceState], prefilling: Sequence[SequenceState], max_context_length: int
) -> list[list[int]]:
    """N-gram tokens of each row, none without a match. prefilling: sequences whose prompts are indexed ahead.

    A sequence proposes once all of its tokens are indexed, which takes several steps for long prompts.
    """
    budget = INDEXED_PER_STEP
    for row in rows:
        budget -= _index(row, budget)
    for row in prefilling:
        if budget > 0:
            budget -= _index(row, budget)
    return [_propose(row, max_context_length) for row in rows]


def _propose(row: SequenceState, max_context_length: int) -> list[int]:
    index, most = row.ngram_index, min(NGRAM_MAX_TOKENS, row.room(max_context_length))
    if not row.may_use_ngrams or index is None or index.num_indexed < len(row.tokens) or most <= 0:
        return []
    return index.propose(most)


def _index(row: SequenceState, budget: int) -> int:
    """Extend the row's index; returns the part of the budget that this took."""
    if not row.may_use_ngrams:
        return 0
    index = row.ngram_index = row.ngram_index or NgramIndex()
    if len(row.tokens) - index.num_indexed <= MOST_NEW:
        index.extend(row.tokens, MOST_NEW)
        return 0
    return index.extend(row.tokens, max(0, budget))
