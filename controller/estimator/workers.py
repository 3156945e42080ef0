"""Workers of a context. They share evidence; one that differs from most of the others is isolated.

Every COMPARED reports a worker's own step times and tokens are compared with those of each other worker.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

import numpy as np

from speclen.controller.estimator.grid import Array, Cells, shares
from speclen.controller.estimator.settings import EstimatorSettings
from speclen.controller.estimator.step_time import COLD, Believed, Evidence, solve
from speclen.controller.estimator.tokens import (
    ALL_ARM_OUTPUTS,
    COMPARED_LENGTH,
    DRAFT_STEPS,
    NGRAM_OUTPUTS,
    NGRAM_STEPS,
    TokenEvidence,
    ratios_of,
)
from speclen.records import StepRecord

MOST_TRACKED = 16  # workers compared with each other; evidence of further workers is pooled
COMPARED = 64  # reports of a worker between two comparisons
EXPIRED = 20_000  # reports of others after which a worker without any has expired
SIGNIFICANT = 3.0  # standard deviations


@dataclass(eq=False)
class Worker:
    """Evidence of one worker.

    apart: differs from the others in step times, in tokens. theta, precision: own step times by cell at the last
    comparison. speed: own log tokens per step by class, drafted and with n-grams alone, and its variance,
    [2, 2 * classes]. batch_size: of its newest step. spare: exploration budget, in steps. is_probing: in the steps of a
    probe and in the slow ones after it. waiting: reports not yet learned from.
    """

    times: Evidence
    tokens: TokenEvidence
    num_reports: int = 0
    compared_at: int = 0
    last_seen: int = 0
    batch_size: int = 0
    spare: float = 0.0
    is_probing: bool = False
    waiting: list[StepRecord] = field(default_factory=list)
    apart: tuple[bool, bool] = (False, False)
    theta: Array = field(default_factory=lambda: np.zeros(0))
    precision: Array = field(default_factory=lambda: np.zeros(0))
    speed: Array = field(default_factory=lambda: np.zeros((2, 0)))

    @property
    def is_due(self) -> bool:
        """True if the next comparison is due."""
        return self.num_reports - self.compared_at >= COMPARED

    def note(self, features: np.ndarray, unseen: np.ndarray, settings: EstimatorSettings) -> None:
        """Estimate step times and tokens from this worker's reports alone. features: of all cells."""
        self.compared_at = self.num_reports
        self.times.grow(len(features))
        solution, none = COLD, np.zeros(len(features))
        for _ in range(2):
            evidence = self.times.information, self.times.moment, features
            solution = solve(*evidence, solution, None, none, settings.worker_difference)
        self.theta = shares(features, solution.phi)[0] + solution.rho
        self.precision = np.diag(self.times.information).copy()
        ratios = ratios_of(self.tokens, unseen, settings.prior_tokens, settings)
        length = min(COMPARED_LENGTH, ratios.expected.shape[2] - 1)
        drafted, whole = self.tokens.requests[0][:, [DRAFT_STEPS, ALL_ARM_OUTPUTS]].T
        matched, alone = self.tokens.requests[0][:, [NGRAM_STEPS, NGRAM_OUTPUTS]].T
        requests = np.concatenate([drafted + whole, matched + alone])
        speed = np.concatenate([ratios.expected[:, 0, length], ratios.expected[:, 1, 0]])
        self.speed = np.stack([np.log(speed), settings.request_sd**2 / np.maximum(requests, 1e-3)])

    def agrees_in_times(self, other: Worker, most: float) -> bool:
        """True unless the step times of the two differ by more than a factor in cells that both have seen.

        An isolated worker stays isolated until there is enough evidence that it agrees.
        """
        count = min(len(self.theta), len(other.theta))
        weight = np.minimum(self.precision[:count], other.precision[:count])
        num_shared = np.count_nonzero(weight)
        if num_shared < 2:
            return not self.apart[0]
        difference = self.theta[:count] - other.theta[:count]
        difference = difference - float(weight @ difference) / float(weight.sum())
        mean_square = float(weight @ difference**2) / float(weight.sum())
        chance = 2 * num_shared / float(weight.sum())  # mean square that noise alone explains
        if self.apart[0] and SIGNIFICANT * chance > most**2:
            return False
        return mean_square < max(most**2, SIGNIFICANT * chance)

    def agrees_in_tokens(self, other: Worker, most: float) -> bool:
        """True unless accepted tokens of some class differ significantly."""
        if not self.speed.size or not other.speed.size:
            return True
        difference = np.abs(self.speed[0] - other.speed[0])
        spread = np.sqrt(self.speed[1] + other.speed[1])
        return bool((difference <= most + SIGNIFICANT * spread).all())

    def differs(self, others: Sequence[Worker], most: float) -> tuple[bool, bool]:
        """True if it differs from more than half of the others: in step times, in tokens."""
        known = [other for other in others if other is not self and other.compared_at]
        if not known:
            return self.apart
        times = sum(self.agrees_in_times(other, most) for other in known)
        tokens = sum(self.agrees_in_tokens(other, most) for other in known)
        return 2 * times < len(known), 2 * tokens < len(known)


@dataclass(eq=False)
class Workers:
    """All workers of a context.

    tracked: compared with each other. untracked: further ones. shared: evidence of untracked and expired workers.
    """

    shared: Worker
    tracked: dict[str, Worker] = field(default_factory=dict)
    untracked: dict[str, Worker] = field(default_factory=dict)

    @property
    def everyone(self) -> list[Worker]:
        """All workers and the shared evidence."""
        return [self.shared, *self.tracked.values(), *self.untracked.values()]

    def find(self, name: str, num_reports: int, isolated: Container[str], new: Callable[[], Worker]) -> Worker:
        """The worker of this name. A new one is added after expired ones were removed."""
        known = self.tracked.get(name) or self.untracked.get(name)
        if known is not None:
            return known
        for workers in (self.tracked, self.untracked):
            for gone in [name for name, each in workers.items() if num_reports - each.last_seen > EXPIRED]:
                worker = workers.pop(gone)
                if gone not in isolated:
                    self.shared.times.absorb(worker.times)
                    self.shared.tokens.absorb(worker.tokens)
        among = self.tracked if len(self.tracked) < MOST_TRACKED else self.untracked
        among[name] = new()
        return among[name]

    def add_times(
        self, worker: Worker, places: np.ndarray, log_s: np.ndarray, believed: Believed, settings: EstimatorSettings
    ) -> None:
        """Learn from usable samples of a worker; those of an untracked one go to the shared evidence."""
        own, times = worker.times, worker.times
        if worker in self.untracked.values():
            times = self.shared.times
            times.cells, times.log_s, times.level = own.cells, own.log_s, own.level
        times.grow(len(believed.theta))
        times.add(places, log_s, believed, settings)
        own.cells, own.log_s, own.level = times.cells, times.log_s, times.level

    def agreeing(self, part: int) -> list[Worker]:
        """Workers whose evidence is shared: of step times (0) or of tokens (1)."""
        return [self.shared, *(each for each in self.tracked.values() if not each.apart[part])]

    def trim(self, cells: Cells, most: int) -> Cells:
        """Forget the cells with the least evidence if there are too many; returns those that are left."""
        if len(cells.numbers) <= most:
            return cells
        times = [worker.times for worker in (self.shared, *self.tracked.values())]
        for each in times:
            each.grow(len(cells.numbers))
        kept = np.sort(np.argsort(-np.sum([each.count for each in times], axis=0), kind="stable")[: most * 3 // 4])
        for worker in self.everyone:
            worker.times.grow(len(cells.numbers))
            worker.times.keep(kept)
            worker.theta, worker.precision = np.zeros(0), np.zeros(0)
        return Cells(cells.numbers[kept], cells.features[kept])
