"""Random numbers that depend only on a key and a position, not on the batch."""

from __future__ import annotations

import numpy as np
import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_HALF = (1 << 32) - 1
CACHED = 32768  # numbers computed at a time on a CPU, even: pieces stay in its cache


def make_key(seed: int, index: int) -> int:
    """The key, a signed 64-bit integer, of the index-th sequence of a request with this seed."""
    mixed = _mix_array(np.array([seed & _MASK], np.uint64)) + np.uint64(index * _GOLDEN & _MASK)
    return int(_mix_array(mixed).view(np.int64)[0])


def exponential(keys: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Exp(1) variates [rows, columns, vocab_size], float32, positive. keys: [rows]; positions: [rows, columns]; int64.

    Entry (r, c, v) is a function of keys[r], positions[r, c] and v: splitmix64's finaliser (Steele, Lea and Flood 2014)
    on a counter gives two neighbouring entries 32 bits each, which make a uniform variate u. The value is -log(1 - u). It
    is finest near 0, since in the race that selects a token (`verification.choose`) small values win.
    """
    if keys.device.type == "cpu":
        every = np.broadcast_to(keys.numpy()[:, None], positions.shape).ravel()
        on_host = exponential_on_host(every, positions.numpy().ravel(), vocab_size)
        return torch.from_numpy(on_host).unflatten(0, tuple(positions.shape))
    rows = _mix_tensor(keys[:, None] + positions * _signed(_GOLDEN))
    counters = torch.arange(1, (vocab_size + 1) // 2 + 1, device=keys.device) * _signed(_GOLDEN)
    bits = _mix_tensor(rows[:, :, None] + counters)
    found = torch.empty(*positions.shape, 2 * len(counters), device=keys.device)
    found[..., 0::2] = bits & _HALF
    found[..., 1::2] = _shift(bits, 32)
    del bits
    # In place, since with a large vocabulary these are the largest tensors of a step.
    found.add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()
    return found[..., :vocab_size]


def fresh(like: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Exp(1) variates of the shape of `like`, [..., vocab], float32, positive."""
    if not like.is_cpu:
        return torch.empty_like(like).exponential_(generator=generator)
    # With random keys, this takes a fraction of the time of torch's own generator on a CPU.
    keys = torch.empty(like.shape[:-1].numel(), dtype=torch.long).random_(generator=generator).numpy()
    return torch.from_numpy(exponential_on_host(keys, np.zeros_like(keys), like.shape[-1])).view(like.shape)


def exponential_on_host(keys: np.ndarray, positions: np.ndarray, vocab_size: int) -> np.ndarray:
    """The same in numpy, for n pairs of a key and a position, int64: [n, vocab_size].

    It is computed in pieces that fit in the processor's cache, so that the time per entry does not grow with the
    vocabulary.
    """
    golden, found = np.uint64(_GOLDEN), np.empty((len(keys), vocab_size), np.float32)
    rows = _mix_array(keys.astype(np.uint64) + positions.astype(np.uint64) * golden)
    num_rows, num_tokens = max(1, CACHED // vocab_size), min(vocab_size, CACHED)
    counters = np.arange(1, (vocab_size + 1) // 2 + 1, dtype=np.uint64) * golden
    for row in range(0, len(rows), num_rows):
        for token in range(0, vocab_size, num_tokens):
            into = found[row : row + num_rows, token : token + num_tokens]
            bits = _mix_array(rows[row : row + num_rows, None] + counters[token // 2 : (token + num_tokens + 1) // 2])
            uniform = bits.astype("<u8", copy=False).view("<u4")[:, : into.shape[1]].astype(np.float32)
            uniform += np.float32(0.5)
            uniform *= np.float32(2.0**-32)
            np.minimum(uniform, np.float32(1 - 2.0**-24), out=uniform)
            np.negative(uniform, out=uniform)
            np.log1p(uniform, out=uniform)
            np.negative(uniform, out=into)
    return found


def _mix_array(value: np.ndarray) -> np.ndarray:
    """In place."""
    value ^= value >> np.uint64(30)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(27)
    value *= np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return value


def _mix_tensor(value: torch.Tensor) -> torch.Tensor:
    """In place."""
    value.bitwise_xor_(_shift(value, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    value.bitwise_xor_(_shift(value, 27)).mul_(_signed(0x94D049BB133111EB))
    return value.bitwise_xor_(_shift(value, 31))


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; torch's is arithmetic."""
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
