"""Parser of `--arms`: arms by batch size."""

from __future__ import annotations

import re

from speclen.records import Choice, parse_arm

_SIZES = re.compile(r"\s*(?P<low>\d{1,4})\s*(?P<dash>-\s*(?P<high>\d{1,4})?)?\s*")


def parse_arms(text: str, max_batch_size: int) -> tuple[Choice, ...]:
    """One arm for all batch sizes, or several: `1-4: n-gram else draft 5; 5-: draft 1`.

    Raises ValueError naming the malformed part, or the batch size without an arm.
    """
    if ":" not in text:
        return (Choice(1, max_batch_size, parse_arm(text)),)
    choices: list[Choice] = []
    low = 1
    for part in text.split(";"):
        sizes, _, words = part.partition(":")
        choices.append(_range_of(sizes, low, max_batch_size)._replace(arm=parse_arm(words)))
        low = choices[-1].batch_max + 1
    if low <= max_batch_size:
        raise ValueError(f"no arm for batch size {low}; the worker has up to {max_batch_size} sequences")
    return tuple(choices)


def _range_of(sizes: str, low: int, max_batch_size: int) -> Choice:
    """Batch sizes of one part, which begin at `low`. Raises ValueError."""
    found = _SIZES.fullmatch(sizes)
    if found is None:
        raise ValueError(f"the batch sizes {sizes.strip()!r} of an arm are unknown: write 1-4: or 5-: before it")
    high = int(found["high"] or (max_batch_size if found["dash"] else found["low"]))
    if int(found["low"]) != low or high < low:
        raise ValueError(f"the batch sizes {sizes.strip()!r} are out of order: the next arm is for {low} and more")
    return Choice(low, high, parse_arm("plain"))
