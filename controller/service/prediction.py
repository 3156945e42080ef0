"""Predicted against observed step times, and the cost of steps at other arms than the one in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from speclen.records import Choice, StepRecord, Table


@dataclass(slots=True)
class Compared:
    """Sums over the compared steps of one range of batch sizes, in seconds. Their ratio over a while is the error."""

    num_steps: int = 0
    observed_s: float = 0.0
    predicted_s: float = 0.0

    def add(self, observed_s: float, predicted_s: float) -> None:
        self.num_steps += 1
        self.observed_s += observed_s
        self.predicted_s += predicted_s


class PredictionError:
    """Step times of one context beside what the table predicted for the tokens that the steps made.

    A ratio of sums, as the objective is. compared: by range of batch sizes, of usable steps at the arm in use.
    elsewhere_s: time of usable steps at other arms: probes, tables that had not arrived, workers with a policy of their
    own. regret_s: how much of that the arm in use would have saved.
    """

    def __init__(self) -> None:
        self.compared: dict[tuple[int, int], Compared] = {}
        self.elsewhere_s = 0.0
        self.regret_s = 0.0
        self._table: Table | None = None
        self._choices: list[Choice] = []  # by batch size

    def add(self, table: Table, steps: Sequence[StepRecord]) -> None:
        """Compare steps with the table that was valid before they were learned from."""
        if table is not self._table:
            self._table, self._choices = table, _by_batch_size(table)
        for step in steps:
            if not step.flags:
                self._compare(step, self._choices[min(step.batch_size, len(self._choices) - 1)])

    def _compare(self, step: StepRecord, choice: Choice) -> None:
        if choice.ms_per_token is None:
            return
        promised_s = 1e-3 * choice.ms_per_token * step.tokens_per_sequence
        if step.arm == choice.arm:
            self.compared.setdefault((choice.batch_min, choice.batch_max), Compared()).add(step.latency_s, promised_s)
        else:
            self.elsewhere_s += step.latency_s
            self.regret_s += step.latency_s - promised_s


def _by_batch_size(table: Table) -> list[Choice]:
    """The choice at every batch size, beginning with size 0, which has none."""
    sizes = [choice for choice in table.choices for _ in range(choice.batch_min, choice.batch_max + 1)]
    return [table.choices[0], *sizes]
