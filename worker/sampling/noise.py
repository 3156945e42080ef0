"""Random numbers that depend on a key and a position alone: the same whatever else is in the batch."""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def make_key(seed: int, index: int) -> int:
    """The key, a signed 64-bit integer, of the index-th sequence of a request with this seed."""
    return _signed(_mix((_mix(seed & _MASK) + index * _GOLDEN) & _MASK))


def exponential(keys: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Exp(1) variates [rows, columns, vocab_size], float32, positive. keys: [rows]; positions: [rows, columns]; int64.

    Entry (r, c, v) is a function of keys[r], positions[r, c] and v: splitmix64's finaliser (Steele, Lea and Flood 2014)
    on a counter, 53 bits of which make a uniform variate u. Small values matter most in a race, so -log(1 - u) is taken,
    which is fine-grained there.
    """
    rows = _mix_tensor(keys[:, None] + positions * _signed(_GOLDEN))
    counters = torch.arange(1, vocab_size + 1, device=keys.device) * _signed(_GOLDEN)
    bits = _mix_tensor(rows[:, :, None] + counters)
    uniform = (_shift(bits, 11).to(torch.float32) + 0.5) * 2.0**-53
    return -torch.log1p(-uniform.clamp(max=1 - 2.0**-24))


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix_tensor(value: torch.Tensor) -> torch.Tensor:
    value = (value ^ _shift(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shift(value, 31)


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; torch's is arithmetic."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
