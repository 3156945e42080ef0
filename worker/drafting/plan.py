"""What every row of a step may propose: tokens copied from its own text, tokens of the draft model, both or neither."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_MATCH = 16  # tokens; longer matches count as this long
MAX_COPIED = 64  # tokens of one proposal, at most
MAX_DRAFTED = 64

_SIZES = re.compile(r"\s*(?P<low>\d{1,4})\s*(?P<dash>-\s*(?P<high>\d{1,4})?)?\s*")
_COPY = r"copy\s*(?:>=|≥)\s*(?P<match>\d{1,3})\s+up\s+to\s+(?P<most>\d{1,3})"
_PLAN = re.compile(rf"\s*(?:(?P<plain>plain)|{_COPY}(?:\s*,\s*(?P<how>else|and)\s+draft\s+(?P<more>\d{{1,3}}))?"
                   r"|draft\s+(?P<drafted>\d{1,3}))\s*")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """draft_length: tokens of the draft model per row; 0: none. Plan(n) is what a speculation length n means.

    copy_min_match: a row copies when at least so many of its last tokens stand earlier in its prompt or output; 0: never.
    copy_max_tokens: copied per row and step, at most. draft_after_copy: whether the draft model goes on after what was
    copied; else rows that copy draft nothing. Raises ValueError naming the value.
    """

    draft_length: int = 0
    copy_min_match: int = 0
    copy_max_tokens: int = 0
    draft_after_copy: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.draft_length <= MAX_DRAFTED:
            raise ValueError(f"a plan drafts {self.draft_length} tokens; it must be 0 to {MAX_DRAFTED}")
        if not 0 <= self.copy_min_match <= MAX_MATCH:
            raise ValueError(f"a plan copies from matches of {self.copy_min_match} on; it must be 1 to {MAX_MATCH}")
        if not 0 <= self.copy_max_tokens <= MAX_COPIED:
            raise ValueError(f"a plan copies up to {self.copy_max_tokens} tokens; it must be 1 to {MAX_COPIED}")
        if bool(self.copy_min_match) != bool(self.copy_max_tokens):
            raise ValueError(
                f"a plan copies from matches of {self.copy_min_match} on and up to {self.copy_max_tokens} tokens: both or "
                "neither must be 0"
            )
        if self.draft_after_copy and not (self.copy_min_match and self.draft_length):
            raise ValueError("a plan that drafts after copying must copy and draft")

    @property
    def copies(self) -> bool:
        return self.copy_min_match > 0

    @property
    def max_tokens(self) -> int:
        """Tokens that a row may propose in one step."""
        if self.draft_after_copy:
            return self.copy_max_tokens + self.draft_length
        return max(self.copy_max_tokens, self.draft_length)

    def within(self, max_drafted: int, max_copied: int) -> Plan:
        """The plan, or as much of it as a worker with these limits can run."""
        drafted, copied = min(self.draft_length, max_drafted), min(self.copy_max_tokens, max_copied)
        if (drafted, copied) == (self.draft_length, self.copy_max_tokens):
            return self
        return Plan(
            drafted, self.copy_min_match if copied else 0, copied, self.draft_after_copy and drafted * copied > 0
        )

    def __str__(self) -> str:
        """In words that `parse_plan` reads."""
        if not self.copies:
            return f"draft {self.draft_length}" if self.draft_length else "plain"
        copying = f"copy>={self.copy_min_match} up to {self.copy_max_tokens}"
        how = "and" if self.draft_after_copy else "else"
        return f"{copying}, {how} draft {self.draft_length}" if self.draft_length else copying


PLAIN = Plan()
COPYING = Plan(0, 3, 8)  # what a worker does that has no draft model


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """A plan for batch sizes batch_min..batch_max."""

    batch_min: int
    batch_max: int
    plan: Plan


def parse_plans(text: str, max_batch_size: int) -> list[PlannedBucket]:
    """One plan for all batch sizes, or several: `1-4: copy>=2 up to 8, else draft 5; 5-: draft 1`.

    Raises ValueError naming what cannot be read, or the batch size without a plan.
    """
    if ":" not in text:
        return [PlannedBucket(1, max_batch_size, parse_plan(text))]
    buckets, low = [], 1
    for part in text.split(";"):
        sizes, _, words = part.partition(":")
        found = _SIZES.fullmatch(sizes)
        if found is None:
            raise ValueError(f"the batch sizes {sizes.strip()!r} of a plan are unknown: write 1-4: or 5-: before it")
        if int(found["low"]) != low:
            raise ValueError(f"no plan, or more than one, for batch size {min(low, int(found['low']))}")
        high = int(found["high"] or (max_batch_size if found["dash"] else low))
        buckets.append(PlannedBucket(low, high, parse_plan(words)))
        low = high + 1
    if low <= max_batch_size:
        raise ValueError(f"no plan for batch size {low}; the worker has up to {max_batch_size} rows")
    return buckets


def parse_plan(text: str) -> Plan:
    """Plan of words: `plain`, `draft 2`, `copy>=3 up to 8`, the last with `, else draft 2` or `, and draft 2`.

    Raises ValueError naming the words.
    """
    found = _PLAN.fullmatch(text)
    if found is None:
        raise ValueError(
            f"the plan {text.strip()!r} is unknown: write plain, draft 2, copy>=3 up to 8, or the last with "
            "', else draft 2' (rows without a match draft) or ', and draft 2' (all rows draft)"
        )
    drafted = int(found["drafted"] or found["more"] or 0)
    if not found["match"]:
        return Plan(drafted)
    if not int(found["match"]) or not int(found["most"]):
        raise ValueError(f"the plan {text.strip()!r} copies from 0 on or up to 0 tokens; both must be at least 1")
    return Plan(drafted, int(found["match"]), int(found["most"]), found["how"] == "and" and drafted > 0)
