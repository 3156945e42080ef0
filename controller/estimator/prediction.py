"""How well the estimates foretell the steps that follow, and what steps at other lengths cost: whether the controller can
be trusted, and what its learning takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from speclen.controller.estimator.core import Bucket, Choice, StepObservation, Table

# Weight that an older sample keeps: the last hundred count.
MEMORY = 0.99


@dataclass(slots=True)
class Compared:
    """Sums over the steps of one bucket that were compared, in seconds of step time.

    predicted_s: what their tokens were promised to take. recent_*: the same, older steps forgotten.
    """

    num_steps: int = 0
    observed_s: float = 0.0
    predicted_s: float = 0.0
    recent_observed_s: float = 0.0
    recent_predicted_s: float = 0.0

    def add(self, observed_s: float, predicted_s: float) -> None:
        self.num_steps += 1
        self.observed_s += observed_s
        self.predicted_s += predicted_s
        self.recent_observed_s = MEMORY * self.recent_observed_s + observed_s
        self.recent_predicted_s = MEMORY * self.recent_predicted_s + predicted_s


class PredictionError:
    """Per bucket of one context: step times beside what the table had promised for the tokens that the steps made.

    A ratio of sums, as the objective is: `bare_ms_per_token` times tokens against the time of single steps. compared: of
    steps at the chosen length, one of each group. elsewhere_s: time of all steps at other lengths, whyever: probes, tables
    that had not arrived, workers with a policy of their own, ends of requests. regret_s: how much of that the chosen length
    would have saved, as far as its promise holds.
    """

    def __init__(self) -> None:
        self.compared: dict[Bucket, Compared] = {}
        self.elsewhere_s = 0.0
        self.regret_s = 0.0
        self._table: Table | None = None
        self._choices: list[Choice] = []  # by batch size
        self._in_use: set[tuple[int, int]] = set()  # batch sizes, each with its length

    def add(self, table: Table, steps: Sequence[StepObservation]) -> None:
        """Compare steps of one group with the table that was valid before they were learned from."""
        if table is not self._table:
            self._table = table
            self._choices = by_batch_size(table)
            self._in_use = {(size, choice.speculation_length) for size, choice in enumerate(self._choices)}
        self._compare(steps[-1])
        in_use = self._in_use
        self._regret(
            [step for step in steps if step[:2] not in in_use]
        )  # batch size and length; on every report's path

    def _compare(self, step: StepObservation) -> None:
        choice = self._choice(step)
        if choice.speculation_length != step.speculation_length:
            return
        if (promised := promised_s(choice, step)) is not None:
            self.compared.setdefault(choice.bucket, Compared()).add(step.latency_s, promised)

    def _regret(self, steps: Iterable[StepObservation]) -> None:
        for step in steps:
            if (promised := promised_s(self._choice(step), step)) is not None:
                self.elsewhere_s += step.latency_s * step.num_steps
                self.regret_s += (step.latency_s - promised) * step.num_steps

    def _choice(self, step: StepObservation) -> Choice:
        return self._choices[min(step.batch_size, len(self._choices) - 1)]

    def by_bucket(self) -> dict[Bucket, float]:
        """Error of recent steps. 0.1: they take a tenth longer than predicted."""
        return {
            bucket: sums.recent_observed_s / sums.recent_predicted_s - 1.0 for bucket, sums in self.compared.items()
        }


def promised_s(choice: Choice, step: StepObservation) -> float | None:
    """What the choice was expected to take for one step's tokens; None where nothing was, or it is no ordinary one."""
    if choice.ms_per_token is None or not (step.teaches_latency and step.teaches_acceptance):
        return None
    bare = choice.ms_per_token if choice.bare_ms_per_token is None else choice.bare_ms_per_token
    return 1e-3 * bare * (1.0 + step.num_accepted / (step.batch_size * step.num_steps))


def by_batch_size(table: Table) -> list[Choice]:
    """The choice at every batch size, beginning with 0, which is nobody's."""
    choices = [table.choices[0]]
    for choice in table.choices:
        choices.extend([choice] * (choice.bucket.batch_max - len(choices) + 1))
    return choices
