"""Steps of one worker, drawn beforehand, and the reports of them at any length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from speclen.bench.simulation.world import FloatArray
from speclen.records import Arm, StepRecord

# Mean lengths of a neighbour's bursts and of the quiet between them, in steps: what a shared core shows.
NEIGHBOUR_STEPS, NEIGHBOUR_AWAY_STEPS = 50.0, 100.0


@dataclass(frozen=True)
class Course:
    """One worker's steps, drawn beforehand. [steps] or [steps, lengths].

    seconds: true mean of every length at each step. tokens: true mean over all requests, by which the oracle
    chooses; tokens_now: given which requests are in the batch, by which everybody is scored. runs: rows
    by the run that they would accept at the largest length. factor: noise of the step. regime: phase.
    """

    batch: np.ndarray
    context: FloatArray
    seconds: FloatArray
    tokens: FloatArray
    tokens_now: FloatArray
    runs: np.ndarray
    factor: FloatArray
    regime: np.ndarray
    joined: np.ndarray  # True where a request has just come and is prefilled
    runs_by_class: np.ndarray  # as runs, [steps, classes, lengths]

    def best(self) -> np.ndarray:
        """The oracle's length at each step: the most tokens per second by true means."""
        lengths: np.ndarray = (self.tokens / self.seconds).argmax(axis=1)
        return lengths

    def best_rate(self) -> FloatArray:
        """The oracle's seconds per token and row at each step."""
        steps, lengths = np.arange(len(self.batch)), self.best()
        rate: FloatArray = self.seconds[steps, lengths] / self.tokens_now[steps, lengths]
        return rate


def neighbour_at_work(rng: np.random.Generator, num_steps: int) -> np.ndarray:
    """By step, True while a neighbour uses the device too: for 50 steps on average, after 100 without it."""
    active = rng.random() < NEIGHBOUR_STEPS / (NEIGHBOUR_STEPS + NEIGHBOUR_AWAY_STEPS)
    stays: list[np.ndarray] = []
    missing = num_steps
    while missing > 0:
        mean = NEIGHBOUR_STEPS if active else NEIGHBOUR_AWAY_STEPS
        stays.append(np.full(int(rng.geometric(1.0 / mean)), active))
        missing, active = missing - len(stays[-1]), not active
    return np.concatenate(stays)[:num_steps]


def observe(course: Course, step: int, length: int, classes_told: bool = False) -> StepRecord:
    """The report of one step at one length."""
    batch, by_class = int(course.batch[step]), tuple[tuple[int, tuple[int, ...]], ...]()
    if classes_told:
        runs = course.runs_by_class[step]
        by_class = tuple((kind, histogram_of(mine, length)) for kind, mine in enumerate(runs) if mine.any())
    return StepRecord(
        *(step + 1, batch, Arm(length), float(course.seconds[step, length] * course.factor[step])),
        histogram_of(course.runs[step], length),
        mean_context_length=float(course.context[step]),
        class_histograms=by_class,
        num_drafted_sequences=batch if length else 0,
        num_verified_tokens=batch * (length + 1),
    )


def histogram_of(runs: np.ndarray, length: int) -> tuple[int, ...]:
    """Rows by accepted run at a length, from rows by the run that they would accept at the largest."""
    return (*runs[:length].tolist(), int(runs[length:].sum()))
