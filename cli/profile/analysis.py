"""Analysis of a profile: time per token, the best lengths, and two models of the same measurements."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from speclen.cli.profile.document import ProfileDocument
from speclen.cli.profile.paper_model import PaperModel, fit
from speclen.controller.estimator import Estimator
from speclen.records import Limits, Profile, ProfileCell


@dataclass(frozen=True, slots=True)
class BatchAnalysis:
    """One batch size of a profile.

    ms_per_token: measured, by length. best_length: the least of them. paper_length, estimator_length: what the paper's
    model and our estimator choose from the same profile, None where they cannot. *_excess: how much slower than the
    best measured length that choice is, by the measurements; None where it was not measured. paper_optimum,
    paper_ceiling: real lengths, see speclen.cli.profile.paper_model.
    """

    batch_size: int
    step_ms: dict[int, float]
    ms_per_token: dict[int, float]
    best_length: int
    paper_length: int | None
    paper_optimum: float | None
    paper_ceiling: float | None
    paper_excess: float | None
    estimator_length: int | None
    estimator_excess: float | None

    @property
    def gain(self) -> float | None:
        """Speed of the best length over length 0."""
        return self.ms_per_token[0] / self.ms_per_token[self.best_length] if 0 in self.ms_per_token else None


@dataclass(frozen=True, slots=True)
class Analysis:
    """All batch sizes, ascending, and the fitted model of the paper; None where the profile does not determine it."""

    batches: tuple[BatchAnalysis, ...]
    paper: PaperModel | None
    paper_failure: str = ""


def expected_tokens(profile: Profile, length: int) -> float:
    """Tokens per row and step at a length, bonus included. Raises IndexError past the profiled survival."""
    if length > len(profile.survival):
        raise IndexError(length)
    return 1.0 + sum(profile.survival[:length])


def ms_per_token(profile: Profile, cell: ProfileCell) -> float:
    return 1e3 * cell.step_s / expected_tokens(profile, cell.speculation_length)


def analyse(document: ProfileDocument) -> Analysis:
    """Compare what was measured with what the models make of it."""
    profile = document.profile
    paper, failure = None, ""
    try:
        paper = fit(profile.cells, profile.survival)
    except ValueError as error:
        failure = str(error)
    chosen = estimator_lengths(document)
    sizes = sorted({cell.batch_size for cell in profile.cells})
    return Analysis(tuple(_analyse_batch(profile, size, paper, chosen[size]) for size in sizes), paper, failure)


def _analyse_batch(profile: Profile, batch_size: int, paper: PaperModel | None, estimator: int) -> BatchAnalysis:
    cells = [cell for cell in profile.cells if cell.batch_size == batch_size]
    times = {cell.speculation_length: ms_per_token(profile, cell) for cell in cells}
    best = min(times, key=lambda length: times[length])
    paper_length = paper.best_length(batch_size, max(times)) if paper is not None else None

    def excess(length: int | None) -> float | None:
        return None if length is None or length not in times else times[length] / times[best] - 1

    return BatchAnalysis(
        batch_size=batch_size,
        step_ms={cell.speculation_length: 1e3 * cell.step_s for cell in cells},
        ms_per_token=times,
        best_length=best,
        paper_length=paper_length,
        paper_optimum=paper.optimum(batch_size) if paper is not None else None,
        paper_ceiling=paper.ceiling(batch_size) if paper is not None else None,
        paper_excess=excess(paper_length),
        estimator_length=estimator,
        estimator_excess=excess(estimator),
    )


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


def analysis_json(document: ProfileDocument, analysis: Analysis) -> dict[str, Any]:
    """The profile with everything that `speclen profile show` says about it. JSON has no infinity: such a length is null."""
    best = [asdict(batch) | {"gain_over_length_0": batch.gain} for batch in analysis.batches]
    for batch in best:
        batch |= {key: None for key, value in batch.items() if value == math.inf}
    paper = None if analysis.paper is None else asdict(analysis.paper)
    return document.to_json() | {"best": best, "paper_model": paper}
