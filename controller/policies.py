"""Policies that do not learn, for `controller --policy`: the paper's table, a fixed length, plain decoding."""

from __future__ import annotations

import numpy as np

from speclen.records import Profile

ADAPTIVE = "adaptive"
KNOWN = "adaptive, profile, none or fixed:K with K from 0 to 64"


def check_policy(name: str) -> str:
    """The name; ValueError if it is unknown."""
    fixed = name.removeprefix("fixed:")
    if name in (ADAPTIVE, "profile", "none") or (name != fixed and fixed.isdigit() and int(fixed) <= 64):
        return name
    raise ValueError(f"the policy {name!r} is unknown: use {KNOWN}")


def lengths_of(name: str, sizes: np.ndarray, max_length: int, profile: Profile | None) -> np.ndarray:
    """Length at each batch size by a policy that does not learn; 0 while the paper's table has no profile."""
    if name == "profile":
        best = {} if profile is None else best_lengths(profile)
        known = np.array(sorted(best)) if best else np.zeros(0, int)
        at = np.minimum(np.searchsorted(known, sizes), len(known) - 1)
        lengths = np.array([best[size] for size in known[at]]) if best else np.zeros(len(sizes), int)
    else:
        lengths = np.full(len(sizes), 0 if name == "none" else int(name.removeprefix("fixed:")))
    return np.minimum(lengths, max_length)


def best_lengths(profile: Profile) -> dict[int, int]:
    """The length with the most tokens per second at every profiled batch size; others take the next larger size's."""
    tokens = 1.0 + np.concatenate([[0.0], np.cumsum(profile.survival)])
    best: dict[int, tuple[float, int]] = {}
    for cell in profile.cells:
        if cell.speculation_length < len(tokens):
            goodput = float(tokens[cell.speculation_length]) / cell.step_s
            best[cell.batch_size] = max(best.get(cell.batch_size, (0.0, 0)), (goodput, cell.speculation_length))
    return {size: length for size, (_, length) in best.items()}
