"""Workers of a context, and whose evidence is shared: that of all that agree, each with a fair share of the weight."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import numpy as np

from speclen.controller.estimator import settings
from speclen.controller.estimator.isolation import Worker
from speclen.controller.estimator.sizes import Cells
from speclen.controller.estimator.step_time import Evidence
from speclen.controller.estimator.tokens import TokenEvidence


@dataclass(eq=False)
class Workers:
    """tracked: told apart; untracked: others, with samples to compare with alone.

    times, tokens: evidence of these, of workers that have left, and of a profile.
    """

    tokens: TokenEvidence
    times: Evidence = field(default_factory=Evidence)
    tracked: dict[str, Worker] = field(default_factory=dict)
    untracked: dict[str, Worker] = field(default_factory=dict)

    @property
    def everyone(self) -> list[Worker]:
        """All of them."""
        return [*self.tracked.values(), *self.untracked.values()]

    def find(self, name: str, num_reports: int, isolated: Container[str]) -> Worker:
        """The worker of this name, which may be new; then those that have left make room."""
        known = self.tracked.get(name) or self.untracked.get(name)
        if known is not None:
            return known
        self._expire(num_reports, isolated)
        among = self.tracked if len(self.tracked) < settings.current.most_tracked else self.untracked
        return among.setdefault(name, Worker(TokenEvidence.none(self.tokens.reached.shape[1])))

    def _expire(self, num_reports: int, isolated: Container[str]) -> None:
        """Put the evidence of workers that have left together, but that of isolated ones."""
        for workers in (self.tracked, self.untracked):
            for name in [
                name for name, each in workers.items() if num_reports - each.last_seen > settings.current.expired
            ]:
                worker = workers.pop(name)
                if name not in isolated:
                    self.times.absorb(worker.times)
                    self.tokens.absorb(worker.tokens)

    def evidence_of(self, name: str) -> tuple[Evidence, TokenEvidence]:
        """Evidence that a worker's reports are added to: of its own if it is tracked, else of all others together."""
        worker = self.tracked.get(name, self)
        return worker.times, worker.tokens

    def shared_times(self) -> list[Evidence]:
        """Evidence of step times of the workers that agree."""
        return [self.times, *(worker.times for worker in self.tracked.values() if not worker.apart[0])]

    def shared_tokens(self) -> list[TokenEvidence]:
        """Evidence of tokens of the workers that agree."""
        return [self.tokens, *(worker.tokens for worker in self.tracked.values() if not worker.apart[1])]

    def extend_tokens(self, max_length: int) -> None:
        """Make room for longer lengths."""
        for each in [self.tokens, *(worker.tokens for worker in self.everyone)]:
            each.extend(max_length)

    def shared_level(self) -> float | None:
        """Mean level of the workers that agree; None before their first sample."""
        levels = [each.tail.level for each in self.everyone if not each.apart[0] and each.tail.num_samples]
        return float(np.mean(levels)) if levels else None

    def noise(self) -> float:
        """Standard deviation of a log step time."""
        return float(np.mean([worker.times.noise for worker in self.tracked.values()] or [self.times.noise]))

    def trim(self, cells: Cells) -> Cells:
        """Forget the cells with the least evidence where there are too many; returns those that are left."""
        evidence = [self.times, *(worker.times for worker in self.tracked.values())]
        for each in evidence:
            each.grow(len(cells.numbers))
        kept = cells.kept(np.sum([each.count for each in evidence], axis=0))
        if kept is None:
            return cells
        place = np.full(len(cells.numbers), -1)
        place[kept] = np.arange(len(kept))
        for each in evidence:
            each.keep(kept)
        for worker in self.everyone:
            worker.tail.keep(place)
            worker.theta, worker.precision = np.zeros(0), np.zeros(0)
        return Cells(cells.numbers[kept], cells.features[kept])


def fair_weights(amounts: Sequence[float]) -> list[float]:
    """Weight of each worker's evidence: none counts for more than FAIR_SHARE times the median."""
    most = settings.current.fair_share * float(np.median([amount for amount in amounts if amount > 0] or [1.0]))
    return [min(1.0, most / max(amount, 1e-9)) for amount in amounts]
