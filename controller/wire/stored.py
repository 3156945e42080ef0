"""Reports and profiles as the store keeps them, read into the estimator's values."""

from __future__ import annotations

import json
from typing import Any, Protocol

from speclen.controller.estimator.core import Profile, ProfileCell, StepObservation
from speclen.controller.wire.copies import stored_copies
from speclen.controller.wire.flags import named_flags
from speclen.controller.wire.ingest import CLASSES
from speclen.controller.wire.sums import geometric_mean


class StoredReport(Protocol):
    """The part of speclen.store.records.ReportRow that is used here."""

    @property
    def batch_size(self) -> int: ...
    @property
    def speculation_length(self) -> int: ...
    @property
    def latency_s(self) -> float: ...
    @property
    def accepted_histogram(self) -> str: ...
    @property
    def mean_context_length(self) -> float: ...
    @property
    def flags(self) -> str: ...
    @property
    def class_histograms(self) -> str | None: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def latency_sd_s(self) -> float | None: ...
    @property
    def copying(self) -> str | None: ...
    @property
    def draft_prompt_s(self) -> float: ...
    @property
    def num_new_rows(self) -> int: ...


def observation_of(report: StoredReport) -> StepObservation:
    """A stored report as the estimator saw it."""
    flags = named_flags(report.flags)
    by_class = json.loads(report.class_histograms) if report.class_histograms else {}
    told = stored_copies(report.copying, flags)
    return StepObservation(
        report.batch_size,
        report.speculation_length,
        geometric_mean(report.latency_s, report.latency_sd_s) if report.latency_sd_s else report.latency_s,
        tuple(json.loads(report.accepted_histogram)),
        report.mean_context_length,
        flags.teaches_latency,
        flags.teaches_acceptance,
        tuple((CLASSES.index(name), tuple(runs)) for name, runs in by_class.items()),
        report.num_steps,
        told.copies,
        told.read,
        report.draft_prompt_s,
        told.reviews,
        report.num_new_rows,
    )


def profile_of(row: Any) -> Profile:
    """A stored profile. row: a speclen.store.records.ProfileRow."""
    cells = tuple(
        ProfileCell(
            *(cell.batch_size, cell.speculation_length, cell.step_s),
            *(cell.step_s_stderr, cell.num_steps, cell.mean_context_length),
        )
        for cell in row.cells
    )
    return Profile(cells, row.survival, row.num_survival_rows, row.as_prior, row.source)
