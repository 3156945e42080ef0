"""What rows of a step may propose, and what a step that copied told. Plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

MAX_MATCH = 16  # tokens; longer matches count as this long
MAX_COPIED = 64  # tokens of one proposal
# The grid: copy from matches of so many tokens on; at most so many; with up to so many draft lengths.
MATCHES, MOSTS, NUM_LENGTHS = (2, 3, 5, 8), (4, 8, 16), 9


class Plan(NamedTuple):
    """draft_length: tokens of the draft model per row. copy_min_match: a row copies from matches of so many tokens on, 0:
    never; copy_max_tokens of them at most. draft_after_copy: the draft model goes on behind copies; else such rows draft
    nothing. Fields as in control.proto.
    """

    draft_length: int = 0
    copy_min_match: int = 0
    copy_max_tokens: int = 0
    draft_after_copy: bool = False

    def within(self, max_drafted: int, max_copied: int) -> Plan:
        """The plan, or as much of it as a worker with these limits can run."""
        drafted, copied = min(self.draft_length, max_drafted), min(self.copy_max_tokens, max_copied)
        match = self.copy_min_match if copied else 0
        return Plan(drafted, match, copied, self.draft_after_copy and drafted * copied > 0)

    def __str__(self) -> str:
        """In words that `speclen worker --plan` reads."""
        if not self.copy_min_match:
            return f"draft {self.draft_length}" if self.draft_length else "plain"
        copying = f"copy>={self.copy_min_match} up to {self.copy_max_tokens}"
        how = "and" if self.draft_after_copy else "else"
        return f"{copying}, {how} draft {self.draft_length}" if self.draft_length else copying


class CopiedRun(NamedTuple):
    """Rows that copied alike: num_proposed tokens after a match of match_length, of which num_accepted were kept."""

    match_length: int
    num_proposed: int
    num_accepted: int
    num_rows: int


class Copies(NamedTuple):
    """What copying did in one step.

    num_searched_rows: looked at; those in no run had no match. num_drafting_rows: that the draft model drafted for.
    num_verified_tokens: that the target was fed, pending ones included. teaches_latency, teaches_acceptance: False where
    another flag than that of copying forbids it.
    """

    plan: Plan
    num_searched_rows: int
    num_drafting_rows: int
    num_verified_tokens: int
    runs: tuple[CopiedRun, ...]
    teaches_latency: bool = True
    teaches_acceptance: bool = True


def plan_from(values: Sequence[Any]) -> Plan:
    """The plan whose fields were stored."""
    return Plan(values[0], values[1], values[2], bool(values[3]))


def plans_of_lengths(num_lengths: int) -> list[Plan]:
    """Of the draft model alone: 0, 1, 2, ... tokens."""
    return [Plan(length) for length in range(num_lengths)]


def grid_of(num_lengths: int, mosts: Sequence[int] = MOSTS) -> list[Plan]:
    """Plans that copy, among which one is chosen."""
    lengths = drafted_lengths(num_lengths)
    return [Plan(drafted, match, most) for match in MATCHES for most in mosts for drafted in lengths]


def drafted_lengths(num_lengths: int) -> list[int]:
    """Draft lengths of the grid: all, or some of many."""
    if num_lengths <= NUM_LENGTHS:
        return list(range(num_lengths))
    longest, some = num_lengths - 1, NUM_LENGTHS - 1
    return sorted({round(longest ** (at / (some - 1))) for at in range(some)} | {0})


assert max(MATCHES) <= MAX_MATCH
