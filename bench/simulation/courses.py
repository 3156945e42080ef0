"""Steps of one simulated worker, drawn beforehand, and their reports at any length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from speclen.bench.simulation.world import FloatArray, Machine
from speclen.records import Arm, StepFlag, StepRecord

FIRST_USE_FACTOR = 1.25  # of a step whose shape the engine meets for the first time


@dataclass(frozen=True)
class Course:
    """One worker's steps, drawn beforehand. [steps] or [steps, lengths].

    seconds: true mean of every length at each step. tokens: true mean over all requests, by which the oracle selects;
    tokens_now: given the requests in the batch, by which everybody is scored. runs: sequences by the run that they would
    accept at the largest length. factor: noise of the step. joined: True if a request has just come.
    """

    batch: np.ndarray
    context: FloatArray
    seconds: FloatArray
    tokens: FloatArray
    tokens_now: FloatArray
    runs: np.ndarray
    factor: FloatArray
    joined: np.ndarray
    runs_by_class: np.ndarray  # [steps, classes, lengths]

    def best_rate(self) -> FloatArray:
        """The oracle's seconds per token and sequence at each step."""
        steps, lengths = np.arange(len(self.batch)), (self.tokens / self.seconds).argmax(axis=1)
        rate: FloatArray = self.seconds[steps, lengths] / self.tokens_now[steps, lengths]
        return rate

    def record(self, step: int, arm: Arm, probe_id: int, with_classes: bool) -> StepRecord:
        """The report of one step with an arm."""
        batch, length = int(self.batch[step]), arm.speculation_length
        taken = max(self.seconds[step, length] * self.factor[step], 1e-5)
        classes: tuple[tuple[int, tuple[int, ...]], ...] = ()
        if with_classes:
            runs = enumerate(self.runs_by_class[step])
            classes = tuple((kind, histogram_of(mine, length)) for kind, mine in runs if mine.any())
        return StepRecord(
            *(step + 1, batch, arm, float(taken), histogram_of(self.runs[step], length), float(self.context[step]), 1),
            probe_id=probe_id,
            class_histograms=classes,
            num_drafted_sequences=batch if length else 0,
            num_verified_tokens=batch * (1 + length),
        )


class Engine:
    """Flags of a worker's steps, and the time that a choice of arm adds to them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.used: set[tuple[int, int]] = set()
        self.last_length = -1

    def flagged(self, record: StepRecord, joined: bool, mean_s: float) -> tuple[StepRecord, float]:
        """The report as a worker sends it, and the seconds that the choice of its arm added to the step.

        mean_s: true mean of such a step.
        """
        batch, length = record.batch_size, record.arm.speculation_length
        found, extra_s = {StepFlag.PREFILL} if joined else set(), 0.0
        if (batch, length) not in self.used:
            self.used.add((batch, length))
            found.add(StepFlag.FIRST_USE)
            extra_s += (FIRST_USE_FACTOR - 1.0) * mean_s
        if self.last_length == 0 < length:
            found.add(StepFlag.CATCH_UP)
            extra_s += self.machine.draft_s + self.machine.draft_row_s * batch
        self.last_length = length
        return record._replace(latency_s=record.latency_s + extra_s, flags=frozenset(found)), extra_s


def histogram_of(runs: np.ndarray, length: int) -> tuple[int, ...]:
    """Rows by accepted run at a length, from rows by the run that they would accept at the largest."""
    return (*runs[:length].tolist(), int(runs[length:].sum()))
