"""Policies that a comparison can name, and the arm of each at every batch size."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from speclen.cli.support.errors import UserError
from speclen.records import PLAIN, Arm, Limits, parse_arm
from speclen.worker.profiling.file import table_from_file

Table = tuple[Arm, ...]  # the arm of every batch size, that of 1 first
KNOWN = ("adaptive", "none", "n-gram", "profile")


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy: `adaptive`, or a table that never changes.

    table: None for the one that learns.
    """

    name: str
    table: Table | None = None


def parse_policies(text: str, max_length: int) -> list[str]:
    """The names of "adaptive,none,fixed:1-8,n-gram". Raises UserError naming a wrong one."""
    names = [expanded for name in text.split(",") if name.strip() for expanded in expand(name.strip())]
    if not names:
        raise UserError("--compare names no policy: use for example adaptive,none,fixed:3")
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"--compare names {repeated} twice: name each policy once")
    for name in names:
        _check(name, max_length)
    return names


def expand(name: str) -> list[str]:
    """ "fixed:0-3" is none, fixed:1, fixed:2 and fixed:3; everything else is itself."""
    match = re.fullmatch(r"fixed:(\d{1,2})(?:-(\d{1,2}))?", name)
    if not match:
        return [name]
    return [f"fixed:{n}" if n else "none" for n in range(int(match[1]), int(match[2] or match[1]) + 1)]


def _check(name: str, max_length: int) -> None:
    if name not in KNOWN and not is_arm(name, max_length):
        raise UserError(
            f"--compare {name!r} is unknown: use {', '.join(KNOWN)}, fixed:0 to fixed:{max_length}, or an arm such as "
            "n-gram else draft 3"
        )


def is_arm(name: str, max_length: int) -> bool:
    """True for one arm within the longest length."""
    try:
        return arm_of(name).speculation_length <= max_length
    except ValueError:
        return False


def arm_of(name: str) -> Arm:
    """The arm of "fixed:3" or "n-gram else draft 3". Raises ValueError."""
    kind, _, number = name.partition(":")
    return parse_arm(f"draft {number}" if kind == "fixed" else name)


def make_policy(name: str, max_batch_size: int, max_length: int, profile: Path | None) -> Policy:
    """The policy of that name. Raises UserError when it lacks the profile that it needs."""
    if name == "adaptive":
        return Policy(name)
    if name != "profile":
        return Policy(name, (PLAIN if name == "none" else arm_of(name),) * max_batch_size)
    if profile is None:
        raise UserError("--compare profile needs --profile FILE: make one with `speclen profile run`")
    return Policy(name, table_from_file(profile, Limits(max_batch_size, max_length)).arms[1:])


def in_words(table: Table) -> list[tuple[int, int, str]]:
    """Ranges of batch sizes that have one arm: first, last, the arm."""
    ranges = []
    for arm, sizes in itertools.groupby(enumerate(table, 1), key=lambda pair: str(pair[1])):
        numbers = [size for size, _ in sizes]
        ranges.append((numbers[0], numbers[-1], arm))
    return ranges
