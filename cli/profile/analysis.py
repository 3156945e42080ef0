"""Analysis of a profile: time per token, the best lengths, and what the estimator makes of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from speclen.cli.profile.document import ProfileDocument
from speclen.controller.estimator import Estimator
from speclen.records import Limits, Profile, ProfileCell


@dataclass(frozen=True, slots=True)
class BatchAnalysis:
    """One batch size of a profile.

    ms_per_token: measured, by length. best_length: the least of them. estimator_length: what our estimator chooses from the
    same profile. estimator_excess: how much slower than the best that is, as measured; None where it was not measured.
    """

    batch_size: int
    ms_per_token: dict[int, float]
    best_length: int
    estimator_length: int
    estimator_excess: float | None

    @property
    def gain(self) -> float | None:
        """Speed of the best length over length 0."""
        return self.ms_per_token[0] / self.ms_per_token[self.best_length] if 0 in self.ms_per_token else None


def expected_tokens(profile: Profile, length: int) -> float:
    """Tokens per row and step at a length, bonus included. Raises IndexError past the profiled survival."""
    if length > len(profile.survival):
        raise IndexError(length)
    return 1.0 + sum(profile.survival[:length])


def ms_per_token(profile: Profile, cell: ProfileCell) -> float:
    return 1e3 * cell.step_s / expected_tokens(profile, cell.speculation_length)


def analyse(document: ProfileDocument) -> list[BatchAnalysis]:
    """All batch sizes, ascending: what was measured, and what the estimator makes of it."""
    profile, chosen = document.profile, estimator_lengths(document)
    found = []
    for size in sorted(chosen):
        cells = [cell for cell in profile.cells if cell.batch_size == size]
        times = {cell.speculation_length: ms_per_token(profile, cell) for cell in cells}
        best, length = min(times, key=lambda length: times[length]), chosen[size]
        excess = times[length] / times[best] - 1 if length in times else None
        found.append(BatchAnalysis(size, times, best, length, excess))
    return found


def estimator_lengths(document: ProfileDocument) -> dict[int, int]:
    """The choice of a fresh estimator, seeded with this profile alone, at every profiled batch size."""
    profile, key = document.profile, document.context
    sizes = {cell.batch_size for cell in profile.cells}
    longest = max(cell.speculation_length for cell in profile.cells)
    estimator = Estimator()
    estimator.add_context(key, Limits(max(sizes), max(longest, len(profile.survival))))
    estimator.seed_profile(key, profile)
    table = estimator.table(key)
    return {size: table.arm_for(size).speculation_length for size in sizes}


def analysis_json(document: ProfileDocument, batches: list[BatchAnalysis]) -> dict[str, Any]:
    """The profile with everything that `speclen profile show` says about it."""
    best = [asdict(batch) | {"gain_over_length_0": batch.gain} for batch in batches]
    return document.to_json() | {"best": best}
