"""Which rows of a step copy, and what: the rows' indexes are kept up to date here, a bounded number of tokens a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from speclen.worker.backends.passes import padded_width
from speclen.worker.drafting.copying import Copied, CopyIndex, PastOutputs, PastReader, Reading
from speclen.worker.drafting.plan import Plan
from speclen.worker.engine.length_chooser import CopiedRun, CopyReport
from speclen.worker.requests.sequence import SequenceState

# Tokens of texts that are not indexed yet, all rows together: half a millisecond. What a row has just put out comes on top.
INDEXED_PER_STEP = 256
MOST_NEW = 128  # tokens that a row can have put out since the last step
# Rows that are read while nothing is copied: enough to know whether copies would be worth it, at a cost that nobody notices.
READ_ROWS = 8


@dataclass(frozen=True, slots=True)
class RowCopies:
    """What each row of a step copies, None for those without a match. num_searched_rows: that were looked at."""

    plan: Plan
    num_searched_rows: int
    found: list[Copied | None]

    @property
    def num_copied(self) -> list[int]:
        return [0 if copied is None else len(copied.ids) for copied in self.found]

    def accepted(self, kept: Sequence[int]) -> list[int]:
        """Of the proposed tokens that each row kept, those that were copied: they come first."""
        return [min(number, copied) for number, copied in zip(kept, self.num_copied, strict=True)]

    def report(self, kept: Sequence[int], draft_lengths: Sequence[int], ragged: bool) -> CopyReport:
        """kept: proposed tokens that each row kept; draft_lengths: tokens that the draft model drafted for it.

        ragged: whether the target is fed what each row has, not a rectangle around the longest proposal.
        """
        proposed = [copied + drafted for copied, drafted in zip(self.num_copied, draft_lengths, strict=True)]
        longest = padded_width(max(proposed)) if any(self.num_copied) else max(proposed)
        num_fed = sum(proposed) if ragged else len(proposed) * longest
        runs = Counter(
            (copied.match_length, len(copied.ids), accepted)
            for copied, accepted in zip(self.found, self.accepted(kept), strict=True)
            if copied is not None
        )
        return CopyReport(
            plan=self.plan,
            num_searched_rows=self.num_searched_rows,
            num_drafting_rows=sum(length > 0 for length in draft_lengths),
            num_verified_tokens=len(kept) + num_fed,
            runs=tuple(CopiedRun(*run, num_rows) for run, num_rows in sorted(runs.items())),
        )


def read_texts(
    rows: Sequence[SequenceState],
    prefilling: Sequence[SequenceState],
    reading: Reading,
    most_rows: int | None = None,
    past: PastOutputs | None = None,
) -> None:
    """Bring the rows' indexes up to date, or nearer to it, and count what is read of their outputs.

    prefilling: rows whose prompts are read ahead. most_rows: of all that may copy, None for all. past: what rows may copy
    from beside their own texts.
    """
    budget = INDEXED_PER_STEP
    if past is not None:
        past.read(INDEXED_PER_STEP)
    for row in [row for row in rows if row.may_copy][:most_rows]:
        budget -= _index(row, budget, reading, past)
    ahead = None if most_rows is None else max(0, most_rows - len(rows))
    for row in [row for row in prefilling if row.may_copy][:ahead]:
        if budget > 0:
            budget -= _index(row, budget, reading, past)


def read_ends(rows: Sequence[SequenceState], reading: Reading, past: PastOutputs | None = None) -> None:
    """Count what rows that have ended put out in their last step, of those that were read; past: to copy from later on.

    Long copies end outputs more often than they pass through them: without this, what copies are worth is underrated, the
    more the shorter outputs are.
    """
    for row in rows:
        if not (row.finished and row.may_copy):
            continue
        if row.copy_index is not None and len(row.tokens) - row.copy_index.num_indexed <= MOST_NEW:
            _index(row, 0, reading, past)
        if past is not None:
            past.add(row.tokens[row.num_prompt_tokens :])


def find_copies(rows: Sequence[SequenceState], plan: Plan, max_context_length: int) -> RowCopies:
    """What rows that decode copy under a plan that does, after `read_texts`.

    A row copies only once all of its text is indexed; of long texts that takes some steps.
    """
    num_searched = 0
    found: list[Copied | None] = []
    for row in rows:
        copied, index = None, row.copy_index
        if row.may_copy and not row.has_slow_grammar and index is not None and index.num_indexed == len(row.tokens):
            num_searched += 1
            most = min(plan.copy_max_tokens, row.num_left - 1, max_context_length - len(row.tokens))
            copied = index.find(plan.copy_min_match, most)
            if row.past_reader is not None:
                other = row.past_reader.find(plan.copy_min_match, most)
                if other is not None and (copied is None or other.match_length > copied.match_length):
                    copied = other
        found.append(copied)
    return RowCopies(plan, num_searched, found)


def _index(row: SequenceState, budget: int, reading: Reading, past: PastOutputs | None) -> int:
    """Bring the row's index up to date, or nearer to it; returns how much of the budget that took."""
    index = row.copy_index = row.copy_index or CopyIndex()
    if past is not None and row.past_reader is None:
        row.past_reader = PastReader(past)
    if len(row.tokens) - index.num_indexed <= MOST_NEW:
        index.extend(row.tokens, MOST_NEW, reading, row.num_prompt_tokens, row.past_reader)
        return 0
    return index.extend(row.tokens, max(0, budget), past=row.past_reader)
