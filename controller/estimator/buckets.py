"""How batch sizes are grouped: each bucket has one choice."""

from __future__ import annotations

from itertools import pairwise

from speclen.controller.estimator.core import Bucket, default_buckets

DOUBLING = "doubling"
EACH = "each"
FINE = "fine"
# "fine": every batch size its own up to here, then buckets that end this much further on.
FINE_UNTIL, FINE_STEP = 64, 1.04


def buckets_for(spec: str, max_batch_size: int) -> tuple[Bucket, ...]:
    """Buckets up to max_batch_size.

    spec: "fine" (every batch size its own up to 64, a few percent wide beyond), "each" (every batch size its own),
    "doubling" (1, 2, 3-4, 5-8, ...), or upper ends such as "1,2,4,6,12": they
    ascend, and a last bucket holds what is beyond them. Raises ValueError for anything else.
    """
    if spec == DOUBLING:
        return default_buckets(max_batch_size)
    if spec == EACH:
        return tuple(Bucket(size - 1, size, size) for size in range(1, max_batch_size + 1))
    if spec == FINE:
        return _from_ends(_fine_ends(max_batch_size))
    try:
        ends = [int(part) for part in spec.split(",")]
    except ValueError:
        ends = []
    if not ends or ends[0] < 1 or any(high <= low for low, high in pairwise(ends)):
        raise ValueError(f"buckets {spec!r}: use 'fine', 'each', 'doubling', or ascending upper ends such as '1,2,4,8'")
    return _from_ends([end for end in ends if end < max_batch_size] + [max_batch_size])


def _fine_ends(max_batch_size: int) -> list[int]:
    ends = list(range(1, min(FINE_UNTIL, max_batch_size) + 1))
    while ends[-1] < max_batch_size:
        ends.append(min(int(ends[-1] * FINE_STEP) + 1, max_batch_size))
    return ends


def _from_ends(ends: list[int]) -> tuple[Bucket, ...]:
    starts = [1, *(end + 1 for end in ends[:-1])]
    return tuple(Bucket(index, low, high) for index, (low, high) in enumerate(zip(starts, ends, strict=True)))
