"""How well the estimates foretell the steps that follow: the metric that says whether the controller can be trusted."""

from __future__ import annotations

from dataclasses import dataclass

from speclen.controller.estimator.core import Bucket, StepObservation, Table

# Weight that an older sample keeps: the last hundred count.
MEMORY = 0.99


@dataclass(slots=True)
class _Sums:
    observed_ms: float = 0.0
    predicted_ms: float = 0.0


class PredictionError:
    """Per bucket of one context: observed step time over what the table had promised for it, minus one.

    Looks at single steps at the chosen length and compares their time with `ms_per_token` times the tokens they made:
    a ratio of sums, as the objective is.
    """

    def __init__(self) -> None:
        self._sums: dict[Bucket, _Sums] = {}

    def add(self, table: Table, step: StepObservation) -> None:
        """Compare one step with the table that was valid before it was learned from."""
        if not (step.teaches_latency and step.teaches_acceptance):
            return
        for choice in table.choices:
            if step.batch_size <= choice.bucket.batch_max:
                break
        if choice.ms_per_token is None or choice.speculation_length != step.speculation_length:
            return
        accepted = sum(run * rows for run, rows in enumerate(step.accepted_histogram))
        sums = self._sums.setdefault(choice.bucket, _Sums())
        sums.observed_ms = MEMORY * sums.observed_ms + 1e3 * step.latency_s
        sums.predicted_ms = MEMORY * sums.predicted_ms + choice.ms_per_token * (1.0 + accepted / step.batch_size)

    def by_bucket(self) -> dict[Bucket, float]:
        """0.1: steps take a tenth longer than predicted."""
        return {bucket: sums.observed_ms / sums.predicted_ms - 1.0 for bucket, sums in self._sums.items()}
