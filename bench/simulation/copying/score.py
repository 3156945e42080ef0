"""One run of the estimator in simulated texts, and how near it comes to a clairvoyant's plans.

The clairvoyant knows for every batch size and part of a run which plan of the grid takes the least mean time per token in
the long run. Score: its time for the tokens that the played plans make in the long run over the time that they take, in
percent: what a run happened to meet has no say in it, but for what was learned from it.
"""

from __future__ import annotations

import numpy as np

from speclen.bench.simulation.copying.machine import report_of, time_of
from speclen.bench.simulation.copying.truth import worth_of
from speclen.bench.simulation.copying.world import CopyWorld
from speclen.controller.estimator.core import ContextKey, Limits, Probe, StepObservation
from speclen.controller.estimator.estimator import Estimator
from speclen.controller.estimator.plans.plan import Plan, grid_of, plans_of_lengths

KEY = ContextKey("target", "draft", "simulated", "float32")
MAX_LENGTH, MOST_COPIED, GROUP = 8, 16, 8
# Share of steps that take much longer for no reason.
SLOW_SHARE, SLOW_FACTOR = 0.01, (5.0, 20.0)


def plans_of(draft: bool) -> list[Plan]:
    """All lengths, and the plans that the estimator chooses among."""
    num_lengths = MAX_LENGTH + 1 if draft else 1
    return plans_of_lengths(num_lengths) + grid_of(num_lengths)


class Play:
    """One run of the estimator. Reports arrive GROUP steps at a time; a probe is done as soon as its batch size is there.

    reads: whether workers tell what they read of all output, copied or not; reviews: whether of some outputs how every plan
    would have got through them.
    """

    def __init__(self, world: CopyWorld, seed: int, reads: bool = True, reviews: bool = True) -> None:
        self.world, self.rng, self.reads, self.reviews = world, np.random.default_rng(seed), reads, reviews
        draft = world.scenario.draft
        self.limits = Limits(world.max_batch, MAX_LENGTH if draft else 0, MOST_COPIED)
        self.estimator = Estimator()
        self.estimator.add_context(KEY, self.limits)
        sizes = sorted(set(world.batches.tolist()))
        self.worth = [worth_of(*world.part(number), sizes, plans_of(draft)) for number in range(world.parts)]
        self.best = [{size: worth.best(size) for size in sizes} for worth in self.worth]
        self.probe: Probe | None = None

    def score(self) -> tuple[float, float]:
        """In percent, over all steps and over the later half."""
        world, spent_s, work_s = self.world, np.zeros(2), np.zeros(2)
        rows, waiting = world.part(0)[0].rows(world.max_batch, self.rng), list[StepObservation]()
        for step, batch in enumerate(world.batches.tolist()):
            part = step * world.parts // world.num_steps
            rows.text, machine = world.part(part)
            plan = self._plan(batch)
            done = rows.step(plan, batch)
            mean_s = time_of(machine, done)[0]
            half = int(2 * step >= world.num_steps)
            spent_s[half] += self.worth[part].seconds[plan, batch]
            work_s[half] += self.best[part][batch] * self.worth[part].tokens[plan]
            report = report_of(plan, done, mean_s * self._noise(), machine)
            report = report if self.reads else report._replace(read=())
            waiting.append(report if self.reviews else report._replace(reviews=()))
            if len(waiting) == GROUP:
                self._learn(waiting, batch)
                waiting = []
        return 100.0 * float(work_s.sum() / spent_s.sum()), 100.0 * float(work_s[1] / spent_s[1])

    def score_of(self, plan: Plan) -> float:
        """Of one plan at all batch sizes, in percent."""
        world, spent_s, work_s = self.world, 0.0, 0.0
        for step, batch in enumerate(world.batches.tolist()):
            part = step * world.parts // world.num_steps
            spent_s += self.worth[part].seconds[plan, batch]
            work_s += self.best[part][batch] * self.worth[part].tokens[plan]
        return 100.0 * work_s / spent_s

    def _noise(self) -> float:
        factor = float(np.exp(self.world.scenario.noise * self.rng.standard_normal()))
        return factor * (float(self.rng.uniform(*SLOW_FACTOR)) if self.rng.random() < SLOW_SHARE else 1.0)

    def _plan(self, batch: int) -> Plan:
        probe = self.probe
        if probe is not None and probe.bucket.batch_min <= batch <= probe.bucket.batch_max:
            self.probe = None
            return probe.plan or Plan(probe.speculation_length)
        choice = self.estimator.table(KEY).choices[self.estimator.bucket_index(KEY, batch)]
        return choice.plan or Plan(choice.speculation_length)

    def _learn(self, group: list[StepObservation], batch: int) -> None:
        self.estimator.observe(KEY, group, "w")
        most = self.limits.max_speculation_length, "w", self.limits.max_copied_tokens
        self.probe = self.estimator.take_probe(KEY, batch, *most)
