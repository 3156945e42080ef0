"""Machines that steps with copies are simulated on, and what such a step says of itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.core import StepObservation
from speclen.controller.estimator.plans.plan import CopiedRun, Copies, Plan
from speclen.controller.estimator.plans.reviews import OutputReview


@dataclass(frozen=True)
class CopyingMachine:
    """Seconds: overhead, of a draft pass and of a row in it, of verified tokens up to the knee, and of each beyond it.

    bumps: relative time of batch size x verified tokens per row that no smooth formula sees.
    """

    overhead_s: float
    draft_s: float
    draft_row_s: float
    token_s: float
    knee: float
    beyond_s: float
    bumps: FloatArray

    def seconds(self, batch: int, passes: np.ndarray, drafting: np.ndarray, verified: np.ndarray) -> FloatArray:
        """Mean times of steps of so many rows."""
        seconds = self.overhead_s + passes * (self.draft_s + drafting * self.draft_row_s) + verified * self.token_s
        seconds += np.maximum(verified - self.knee, 0.0) * self.beyond_s
        width = np.minimum(np.rint(verified / batch), self.bumps.shape[1] - 1).astype(int)
        mean: FloatArray = seconds * self.bumps[batch, width]
        return mean


class Outcome(NamedTuple):
    """What each row of a step did: longest match, proposed and accepted copies, drafted tokens and accepted ones, [rows].

    read: of its new tokens, row after row, the match that each stood behind, and whether a copy was right, [2, tokens].
    kinds: classes of the rows' requests, [rows]. reviews: of outputs that ended.
    """

    match: np.ndarray
    proposed: np.ndarray
    copied: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    read: np.ndarray
    kinds: np.ndarray
    reviews: tuple[OutputReview, ...] = ()

    @property
    def tokens(self) -> np.ndarray:
        """New tokens of each row."""
        return 1 + self.copied + self.accepted


def time_of(machine: CopyingMachine, done: Outcome) -> tuple[float, int, int, int]:
    """Mean seconds, draft passes, drafting rows and verified tokens of a step, on a backend that is fed ragged rows."""
    drafting = int((done.drafted > 0).sum())
    passes, batch = int(done.drafted.max()), len(done.match)
    verified = batch + int(done.proposed.sum() + done.drafted.sum())
    seconds = machine.seconds(batch, np.array(passes), np.array(drafting), np.array(verified))
    return float(seconds), passes, drafting, verified


def report_of(plan: Plan, done: Outcome, latency_s: float, machine: CopyingMachine) -> StepObservation:
    """The step as a worker reports it."""
    _, passes, drafting, verified = time_of(machine, done)
    histogram = np.bincount(done.accepted, minlength=passes + 1)
    by_class = classes_of(done, passes)
    read = reading_of(done)
    if not plan.copy_min_match:
        step = len(done.match), passes, latency_s, tuple(histogram.tolist()), 100.0
        return StepObservation(*step, by_class=by_class, read=read, reviews=done.reviews)
    copied = done.proposed > 0
    runs, counts = np.unique(np.array([done.match, done.proposed, done.copied])[:, copied], axis=1, return_counts=True)
    told = tuple(
        CopiedRun(run[0], run[1], run[2], rows) for run, rows in zip(runs.T.tolist(), counts.tolist(), strict=True)
    )
    copies = Copies(plan, len(done.match), drafting, verified, told)
    return StepObservation(
        *(len(done.match), passes, latency_s, tuple(histogram.tolist()), 100.0, False, False),
        by_class=by_class,
        copying=copies,
        read=read,
        reviews=done.reviews,
    )


def classes_of(done: Outcome, passes: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Accepted runs by class of request; nothing where all are greedy."""
    if not done.kinds.any():
        return ()
    return tuple(
        (kind, tuple(np.bincount(done.accepted[done.kinds == kind], minlength=passes + 1).tolist()))
        for kind in np.unique(done.kinds).tolist()
    )


def reading_of(done: Outcome) -> tuple[tuple[int, int, int], ...]:
    """What the rows' indexes read of the step's new tokens."""
    match, right = done.read
    tokens, hits = np.bincount(match), np.bincount(match, right)
    return tuple((int(at), int(tokens[at]), int(hits[at])) for at in tokens.nonzero()[0])


EVEN = np.ones((65, 40))  # up to 64 rows
# A pair of 60 million parameters on two cores (docs/results/serve/profile.json, within 7%), and a machine
# with a tenth of its time per verified token, as accelerators have. UNEVEN: kernels that are not made for every shape alike.
TWO_CORES = CopyingMachine(0.0094, 0.00023, 0.0, 0.00042, 4.0, 0.0001, EVEN)
FLAT = CopyingMachine(0.0094, 0.0010, 0.00001, 0.00002, 100.0, 0.00006, EVEN)
UNEVEN = replace(TWO_CORES, bumps=np.exp(0.12 * np.random.default_rng(0).standard_normal((65, 40))))
