"""How near the estimator comes to a clairvoyant's plans in simulated texts.

`python -m speclen.bench.simulation.copying.score --seeds 20`.

The clairvoyant knows for every batch size and part of a run which plan of the grid takes the least mean time per token in
the long run. Score: its time for the tokens that the played plans make in the long run over the time that they take, in
percent: what a run happened to meet has no say in it, but for what was learned from it.
"""

from __future__ import annotations

import argparse
import json
from statistics import median

import numpy as np

from speclen.bench.simulation.copying.machine import report_of, time_of
from speclen.bench.simulation.copying.truth import worth_of
from speclen.bench.simulation.copying.world import SCENARIOS, CopyWorld
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

    def score(self) -> float:
        """In percent."""
        world, spent_s, work_s = self.world, 0.0, 0.0
        rows, waiting = world.part(0)[0].rows(world.max_batch, self.rng), list[StepObservation]()
        for step, batch in enumerate(world.batches.tolist()):
            part = step * world.parts // world.num_steps
            rows.text, machine = world.part(part)
            plan = self._plan(batch)
            done = rows.step(plan, batch)
            mean_s = time_of(machine, done)[0]
            spent_s += self.worth[part].seconds[plan, batch]
            work_s += self.best[part][batch] * self.worth[part].tokens[plan]
            report = report_of(plan, done, mean_s * self._noise(), machine)
            report = report if self.reads else report._replace(read=())
            waiting.append(report if self.reviews else report._replace(reviews=()))
            if len(waiting) == GROUP:
                self._learn(waiting, batch)
                waiting = []
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


def main() -> None:
    """Print scores by scenario, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--scenario", default="", help="only those whose name contains this")
    parser.add_argument("--unread", action="store_true", help="workers tell of what they copied alone")
    parser.add_argument("--unreviewed", action="store_true", help="workers tell of steps, but of no output as a whole")
    options = parser.parse_args()
    for scenario in SCENARIOS:
        if options.scenario in scenario.name:
            worlds = [(seed, CopyWorld(scenario, seed, options.steps)) for seed in range(options.seeds)]
            scores = [Play(world, seed, not options.unread, not options.unreviewed).score() for seed, world in worlds]
            shown = {"median": round(median(scores), 1), "worst": round(min(scores), 1)}
            print(
                json.dumps({"scenario": scenario.name, **shown, "scores": [round(score, 1) for score in scores]}),
                flush=True,
            )


if __name__ == "__main__":
    main()
