"""Policies that a comparison can name, and the arm of each at every batch size."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from speclen.cli.support.errors import UserError
from speclen.records import Arm, Limits
from speclen.worker.config import parse_policy
from speclen.worker.profiling.file import table_from_file

Table = tuple[Arm, ...]  # the arm of every batch size, that of 1 first


def parse_policies(text: str, max_length: int) -> list[str]:
    """The names of "adaptive,none,fixed:1-8,n-gram". Raises UserError naming a wrong one."""
    names = [expanded for name in text.split(",") if name.strip() for expanded in expand(name.strip())]
    if not names:
        raise UserError("--compare names no policy: use for example adaptive,none,fixed:3")
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"--compare names {repeated} twice: name each policy once")
    if unknown := next((name for name in names if not is_policy(name, max_length)), None):
        raise UserError(
            f"--compare {unknown!r} is unknown: use adaptive, none, n-gram, profile, fixed:0 to fixed:{max_length}, "
            "or an arm such as n-gram else draft 3"
        )
    return names


def expand(name: str) -> list[str]:
    """ "fixed:0-3" is none, fixed:1, fixed:2 and fixed:3; everything else is itself."""
    match = re.fullmatch(r"fixed:(\d{1,2})(?:-(\d{1,2}))?", name)
    if not match:
        return [name]
    return [f"fixed:{n}" if n else "none" for n in range(int(match[1]), int(match[2] or match[1]) + 1)]


def is_policy(name: str, max_length: int) -> bool:
    """True for a worker's policy within the longest length."""
    try:
        arm = parse_policy(name)
    except ValueError:
        return False
    return arm is None or arm.speculation_length <= max_length


def make_table(name: str, max_batch_size: int, max_length: int, profile: Path | None) -> Table | None:
    """The table of a policy; None for `adaptive`, which learns. Raises UserError when it lacks the profile that it needs."""
    if (arm := parse_policy(name)) is not None:
        return (arm,) * max_batch_size
    if name == "adaptive":
        return None
    if profile is None:
        raise UserError("--compare profile needs --profile FILE: make one with `speclen profile run`")
    return table_from_file(profile, Limits(max_batch_size, max_length)).arms[1:]


def in_words(table: Table) -> list[tuple[int, int, str]]:
    """Ranges of batch sizes that have one arm: first, last, the arm."""
    ranges = []
    for arm, sizes in itertools.groupby(enumerate(table, 1), key=lambda pair: str(pair[1])):
        numbers = [size for size, _ in sizes]
        ranges.append((numbers[0], numbers[-1], arm))
    return ranges
