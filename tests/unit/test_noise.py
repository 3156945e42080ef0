"""Noise is a function of key, position and token alone, and looks exponential."""

from __future__ import annotations

import math

import pytest
import torch

from speclen.worker.sampling.noise import exponential, make_key


def test_a_row_has_the_same_noise_alone_and_in_any_batch() -> None:
    keys = torch.tensor([make_key(seed, 0) for seed in (1, 2, 3)])
    positions = torch.tensor([[0, 1, 2], [7, 8, 9], [5, 6, 7]])
    together = exponential(keys, positions, 50)
    alone = exponential(keys[1:2], torch.tensor([[9]]), 50)
    assert torch.equal(together[1, 2], alone[0, 0])


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_every_seed_fits_a_signed_integer(seed: int) -> None:
    assert -(2**63) <= make_key(seed, 63) < 2**63


GOLDEN, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


def splitmix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def test_the_numbers_are_those_of_the_definition() -> None:
    """Computed here with Python's own integers; devices may differ in the last bit of a logarithm."""
    seed, position = 2**63 + 5, 1234
    key = make_key(seed, 2)
    found = exponential(torch.tensor([key]), torch.tensor([[position]]), 20_000)[0, 0]
    for token in (0, 1, 8191, 8192, 19_999):
        row = splitmix(key + position * GOLDEN)
        bits = splitmix(row + (token + 1) * GOLDEN) >> 11
        assert float(found[token]) == pytest.approx(-math.log1p(-(bits + 0.5) * 2.0**-53), rel=3e-7)
