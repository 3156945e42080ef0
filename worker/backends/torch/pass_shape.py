"""Shapes of recorded passes: few of them, so that some dozens of recordings serve everything."""

from __future__ import annotations

from dataclasses import dataclass

# Tokens that attention reads at least, and the steps that follow within each doubling.
SMALLEST_REACH = 128
REACHES_PER_DOUBLING = 2


@dataclass(frozen=True, slots=True)
class PassShape:
    """num_tokens: that attention reads."""

    num_rows: int
    num_queries: int
    num_tokens: int
    num_logits: int


def padded_rows(rows: int, most: int) -> int:
    """Rows rounded up to a power of two, beyond 8 to a multiple of 8."""
    padded = 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8
    return min(padded, most)


def reach(num_tokens: int, most: int) -> int:
    """Tokens that attention reads, rounded up: 128, 192, 256, 384, 512, ..."""
    doubled = SMALLEST_REACH
    while doubled < num_tokens:
        for step in range(1, REACHES_PER_DOUBLING + 1):
            between = doubled + step * doubled // REACHES_PER_DOUBLING
            if between >= num_tokens:
                return min(between, most)
        doubled *= 2
    return min(doubled, most)
