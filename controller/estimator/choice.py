"""Selection of arms with hysteresis, and one exploration budget.

The arm with the most expected tokens per second is in use; it stays until another one is better by STAYS. Probes try the
arm whose score plus optimism standard deviations is largest, of those that steps of the arm can reduce, when the seconds
that it is expected to lose have been earned. Plain decoding beside n-grams, and n-grams alone, may be better by settings.current.unseen than
expected where they were not run for memory steps. Policies that do not learn, for `controller --policy`, have their table
from the start.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from speclen.controller.estimator import settings
from speclen.controller.estimator.model import Estimates
from speclen.controller.estimator.saving import Array
from speclen.controller.estimator.sizes import Grid, moved
from speclen.records import Profile

ADAPTIVE = "adaptive"
KNOWN = "adaptive, profile, none or fixed:K with K from 0 to 64"

# Error of a log step time that no formula foresees where n-grams come or go, until it is forgotten. From n-gram steps of 16
# sequences, which took 73 ms, 53 ms were expected of plain ones, which took 33 on that CPU.


def pause(num_seen: float, most: float) -> float:
    """Steps until something is done anew: rarer with what was seen, at most so many."""
    return min(settings.current.first_after + settings.current.per_step * num_seen, most)


@dataclass(eq=False)
class Selection:
    """Arms in use of one group of workers.

    allowed: arms within the limits, [2, lengths]; arms: places of those in use, by range of sizes; version: of the table;
    frozen: by a policy that does not learn; steps: at each range; since_probe: steps since the last probe there; credit_s:
    seconds that probes there may lose; tried: steps at each range when plain decoding and n-grams alone were last run there
    or nearby, [ranges, 2].
    """

    allowed: Array
    arms: Array
    steps: Array
    since_probe: Array
    credit_s: Array
    tried: Array
    version: int = 1
    frozen: bool = False

    @classmethod
    def cold(cls, grid: Grid, ngram: bool) -> Selection:
        """Before anything was seen."""
        ranges, lengths = len(grid.low), grid.num_lengths
        allowed = np.array([[True] * lengths, [ngram] * lengths])
        arms = np.full(ranges, min(settings.current.cold_length, lengths - 1))
        steps, since_probe, credit_s = np.zeros(ranges), np.full(ranges, settings.current.first_after), np.zeros(ranges)
        return cls(allowed, arms, steps, since_probe, credit_s, np.full((ranges, 2), -settings.current.memory))

    def widen(self, grid: Grid, ngram: bool) -> None:
        """Go on with larger limits: sizes that are new begin with the arm of the largest known."""
        old, new = self.allowed.shape[1], Selection.cold(grid, ngram)
        more = len(new.arms) - len(self.arms)
        self.arms = np.pad(moved(self.arms, old, grid.num_lengths), (0, more), mode="edge")
        self.allowed, self.version = new.allowed, self.version + 1
        for name in ("steps", "since_probe", "credit_s", "tried"):
            setattr(self, name, np.concatenate([getattr(self, name), getattr(new, name)[len(self.arms) - more :]]))

    def go_on_from(self, other: Selection) -> None:
        """Begin with the arms of another group, and under its policy."""
        self.arms, self.version, self.frozen = other.arms.copy(), other.version + 1, other.frozen

    def freeze(self, arms: np.ndarray) -> None:
        """Keep these arms, of a policy that does not learn."""
        self.version += bool((self.arms != arms).any())
        self.arms, self.frozen = arms, True

    def earn(self, at: np.ndarray, seconds: np.ndarray) -> None:
        """Count steps. at: range of each; seconds: of each."""
        count, total_s = np.bincount(at, minlength=len(self.steps)), np.bincount(at, seconds, len(self.steps))
        most_s = settings.current.credit * total_s / np.maximum(count, 1)
        saved_s = np.minimum(self.credit_s + settings.current.earned * total_s, np.maximum(most_s, self.credit_s))
        self.credit_s = np.where(self.steps > 0, saved_s, most_s)
        self.steps += count
        self.since_probe += count

    def pay(self, at: int, seconds: float, expected_s: float) -> None:
        """Charge what a step of a probe took beyond its arm's expected time. at: range of sizes."""
        self.credit_s[at] = max(
            self.credit_s[at] - max(0.0, seconds - expected_s), -settings.current.credit * expected_s
        )

    def choose(self, score: np.ndarray, known: np.ndarray, sizes: np.ndarray) -> list[int]:
        """Select anew; returns the ranges whose arm changed.

        score: log tokens per second, [ranges, 2, lengths]; known: ranges that were seen or profiled; sizes: of the ranges.
        """
        if self.frozen or not known.any():
            return []
        before, lengths = self.arms.copy(), self.allowed.shape[1]
        self._select(score, np.flatnonzero(known), np.full(len(sizes), lengths))
        distance = np.abs(np.log(sizes[:, None] / sizes[known]))
        nearest = np.flatnonzero(known)[distance.argmin(axis=1)]
        self._select(score, np.flatnonzero(~known), self.arms[nearest] % lengths + 1)
        changed = np.flatnonzero(self.arms != before)
        self.version += bool(len(changed))
        return [int(at) for at in changed]

    def _select(self, score: np.ndarray, ranges: np.ndarray, bound: np.ndarray) -> None:
        """Take the best arm at some ranges of sizes, of lengths below the bound."""
        fits = (self.allowed & (np.arange(self.allowed.shape[1]) < bound[:, None, None])).reshape(len(bound), -1)
        value = np.where(fits, score.reshape(fits.shape), -np.inf)
        all_ranges, best = np.arange(len(bound)), value.argmax(axis=1)
        stays = (
            value[all_ranges, best] <= value[all_ranges, self.arms] + settings.current.stays
        )  # -inf where it does not fit
        self.arms[ranges] = np.where(stays, self.arms, best)[ranges]

    def probe(self, at: int, near: np.ndarray, estimates: Estimates, allowed: np.ndarray, num_steps: int) -> int | None:
        """The arm to try at a range of sizes now, charged; mostly None.

        near: ranges where it may run. allowed: arms of the worker, [2, lengths].
        """
        if self.since_probe[at] < pause(self.steps[at], settings.current.most_gap):
            return None
        score, in_use = estimates.score[at].reshape(-1), self.arms[at]
        value = score - score[in_use]
        variance = estimates.variance(np.array([at]), self.arms[[at]], by_steps=True).reshape(-1)
        hope = settings.current.optimism * np.sqrt(variance)
        self._note(in_use, near)
        untried = self.steps[at] - self.tried[at] >= settings.current.memory
        hope[:: self.allowed.shape[1]] += settings.current.unseen * untried * [in_use >= self.allowed.shape[1], True]
        optimistic = np.where((self.allowed & allowed).reshape(-1), value + hope, -np.inf)
        optimistic[in_use] = -np.inf
        place = int(optimistic.argmax())
        step_s = estimates.step_s(at, *divmod(place, self.allowed.shape[1]))
        loss_s = num_steps * step_s * max(0.0, 1.0 - float(np.exp(value[place])))
        if not np.isfinite(optimistic[place]) or loss_s > self.credit_s[at]:
            return None
        self.credit_s[at] -= loss_s
        self.since_probe[at] = 0.0
        self._note(place, near)
        return place

    def _note(self, place: int, near: np.ndarray) -> None:
        """Note that an arm runs at some ranges."""
        ngram, length = divmod(place, self.allowed.shape[1])
        if not length:
            self.tried[near, ngram] = self.steps[near]


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
