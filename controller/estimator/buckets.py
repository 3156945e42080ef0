"""How batch sizes are grouped: each bucket has one choice."""

from __future__ import annotations

from itertools import pairwise

from speclen.controller.estimator.core import Bucket, default_buckets

DOUBLING = "doubling"
EACH = "each"


def buckets_for(spec: str, max_batch_size: int) -> tuple[Bucket, ...]:
    """Buckets up to max_batch_size.

    spec: "doubling" (1, 2, 3-4, 5-8, ...), "each" (every batch size its own), or upper ends such as "1,2,4,6,12": they
    ascend, and a last bucket holds what is beyond them. Raises ValueError for anything else.
    """
    if spec == DOUBLING:
        return default_buckets(max_batch_size)
    if spec == EACH:
        return tuple(Bucket(size - 1, size, size) for size in range(1, max_batch_size + 1))
    try:
        ends = [int(part) for part in spec.split(",")]
    except ValueError:
        ends = []
    if not ends or ends[0] < 1 or any(high <= low for low, high in pairwise(ends)):
        raise ValueError(f"buckets {spec!r}: use 'doubling', 'each', or ascending upper ends such as '1,2,4,8'")
    ends = [end for end in ends if end < max_batch_size] + [max_batch_size]
    starts = [1, *(end + 1 for end in ends[:-1])]
    return tuple(Bucket(index, low, high) for index, (low, high) in enumerate(zip(starts, ends, strict=True)))
