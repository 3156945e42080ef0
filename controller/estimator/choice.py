"""Selection of arms with hysteresis, and one exploration budget.

The arm with the most expected tokens per second is in use; it stays until another one is better by STAYS. Probes try the
arm whose score plus OPTIMISM standard deviations, relative to the arm in use, is largest, when the seconds that it is
expected to lose have been earned. Policies that do not learn, for `controller --policy`, have their table from the start.
"""

from __future__ import annotations

import numpy as np

from speclen.controller.estimator.model import Estimates
from speclen.records import Profile

Array = np.ndarray

ADAPTIVE = "adaptive"
KNOWN = "adaptive, profile, none or fixed:K with K from 0 to 64"

STAYS = 0.005  # log score by which another arm must be better
OPTIMISM = 1.0  # standard deviations
EARNED = 0.01  # seconds of probes per second of steps
CREDIT = 12.0  # steps' worth of credit to begin with, that can be saved, and that can be owed
LEAST_GAP, MOST_GAP, GAP_GROWTH = 8.0, 120.0, 0.1  # steps between probes of a size: at first, at most, per step seen
SEEN = 6.0  # usable samples from which on a size has a choice of its own
COLD_LENGTH = 2


class Selection:
    """Arms in use of one group of workers. arms: place in [2 x lengths] by range of sizes."""

    STATE = ("arms", "version", "steps", "since_probe", "credit_s")

    def __init__(self, num_ranges: int, num_lengths: int, allowed: Array) -> None:
        self.num_lengths, self.allowed = num_lengths, allowed
        self.arms = np.full(num_ranges, min(COLD_LENGTH, num_lengths - 1))
        self.version = 1
        self.frozen = False  # by a policy that does not learn
        self.steps = np.zeros(num_ranges)  # at each range of sizes
        self.since_probe = np.full(num_ranges, LEAST_GAP)
        self.credit_s = np.zeros(num_ranges)
        self.value = self.step_s = np.zeros((0, 0))
        self.optimism: Array | None = None

    def at(self, index: int) -> tuple[int, int]:
        """The arm in use at a range of sizes: n-grams or not, length."""
        return divmod(int(self.arms[index]), self.num_lengths)

    def earn(self, at: Array, seconds: Array) -> None:
        """Count steps. at: range of each; seconds: of each."""
        count, total_s = np.bincount(at, minlength=len(self.steps)), np.bincount(at, seconds, len(self.steps))
        most_s = CREDIT * total_s / np.maximum(count, 1)
        saved_s = np.minimum(self.credit_s + EARNED * total_s, np.maximum(most_s, self.credit_s))
        self.credit_s = np.where(self.steps > 0, saved_s, most_s)
        self.steps += count
        self.since_probe += count

    def pay(self, index: int, arm: int, seconds: float) -> None:
        """Charge what a step of a probe took beyond its arm's expected time. arm: place in [2 x lengths]."""
        if self.optimism is not None:
            expected_s = float(self.step_s[index, arm])
            owed_s = self.credit_s[index] - max(0.0, seconds - expected_s)
            self.credit_s[index] = max(owed_s, -CREDIT * expected_s)

    def go_on_from(self, other: Selection) -> None:
        """Begin with the arms of another group."""
        self.arms, self.version = other.arms.copy(), other.version + 1

    def choose(self, estimates: Estimates, seen: Array, profiled: Array, sizes: Array) -> list[int]:
        """Select anew; returns the ranges whose arm changed.

        seen: usable samples by range; profiled: those that a profile tells of; sizes: of the ranges.
        """
        if self.frozen:
            return []
        known = (seen >= SEEN) | profiled
        if not known.any():
            self.note(estimates)
            return []
        before = self.arms.copy()
        bound = np.full(len(sizes), self.num_lengths)
        self._select(estimates, np.flatnonzero(known), bound)
        distance = np.abs(np.log(sizes[:, None] / sizes[known]))
        nearest = np.flatnonzero(known)[distance.argmin(axis=1)]
        bound = np.where(known, bound, self.arms[nearest] % self.num_lengths + 1)
        self._select(estimates, np.flatnonzero(~known), bound)
        self.note(estimates)
        changed = np.flatnonzero(self.arms != before)
        self.version += bool(len(changed))
        return [int(index) for index in changed]

    def _relative(self, estimates: Estimates) -> Array:
        """Score of every arm relative to the one in use, [ranges, arms]."""
        score = estimates.score.reshape(len(self.arms), -1)
        value: Array = score - np.take_along_axis(score, self.arms[:, None], 1)
        return value

    def _select(self, estimates: Estimates, ranges: Array, bound: Array) -> None:
        """Take the best arm at some ranges of sizes, of lengths below the bound."""
        value = self._relative(estimates)
        fits = np.arange(self.num_lengths) < bound[:, None]
        fits = self.allowed.reshape(-1) & np.concatenate([fits, fits], axis=1)
        value = np.where(fits, value, -np.inf)
        best = value.argmax(axis=1)
        stays = np.take_along_axis(fits, self.arms[:, None], 1)[:, 0] & (value.max(axis=1) <= STAYS)
        self.arms[ranges] = np.where(stays, self.arms, best)[ranges]

    def note(self, estimates: Estimates) -> None:
        """Keep what probes are selected by until the next choice."""
        self.value = self._relative(estimates)
        variance = estimates.variance(self.arms).reshape(self.value.shape)
        optimistic = np.where(self.allowed.reshape(-1), self.value + OPTIMISM * np.sqrt(variance), -np.inf)
        optimistic[np.arange(len(self.arms)), self.arms] = -np.inf
        self.optimism = optimistic
        self.step_s = np.exp(estimates.log_time + estimates.level).reshape(self.value.shape)

    def probe(self, index: int, allowed: Array, num_steps: int) -> int | None:
        """The arm to try at a range of sizes now, charged; mostly None. allowed: of the worker, [2 x lengths]."""
        gap = min(LEAST_GAP + GAP_GROWTH * self.steps[index], MOST_GAP)
        if self.since_probe[index] < gap or self.optimism is None:
            return None
        optimistic = np.where(allowed.reshape(-1), self.optimism[index], -np.inf)
        arm = int(optimistic.argmax())
        if not np.isfinite(optimistic[arm]):
            return None
        loss = num_steps * self.step_s[index, arm] * max(0.0, 1.0 - float(np.exp(self.value[index, arm])))
        if loss > self.credit_s[index]:
            return None
        self.credit_s[index] -= loss
        self.since_probe[index] = 0.0
        return arm


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
