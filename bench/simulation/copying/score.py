"""How near the estimator comes to a clairvoyant's plans in simulated texts.

`python -m speclen.bench.simulation.copying.score --seeds 20`.

The clairvoyant knows for every batch size and part of a run which plan of the grid takes the least mean time per token in
the long run. Score: its time for the tokens that were made over the mean time of the steps that were taken, in percent.
Tokens are those that came, so a score has some noise of its own, and can exceed 100.
"""

from __future__ import annotations

import argparse
import json
from statistics import median

import numpy as np

from speclen.bench.simulation.copying.machine import CopyingMachine, Outcome, report_of, time_of
from speclen.bench.simulation.copying.recorded import RecordedTexts
from speclen.bench.simulation.copying.world import SCENARIOS, CopyWorld, Text
from speclen.controller.estimator.core import ContextKey, Limits, Probe, StepObservation
from speclen.controller.estimator.estimator import Estimator
from speclen.controller.estimator.plans.plan import Plan
from speclen.controller.estimator.plans.prediction import MATCHES, MOSTS

KEY = ContextKey("target", "draft", "simulated", "float32")
MAX_LENGTH, MOST_COPIED, GROUP = 8, 16, 8
# Rows and steps by which the clairvoyant knows a plan, and the share of steps that take much longer for no reason.
KNOWN_ROWS, WARM_STEPS, KNOWN_STEPS = 256, 30, 50
SLOW_SHARE, SLOW_FACTOR = 0.01, (5.0, 20.0)


def plans_of(draft: bool) -> list[Plan]:
    """All lengths, and the plans that the estimator chooses among."""
    lengths = range(MAX_LENGTH + 1) if draft else (0,)
    copying = [Plan(drafted, match, most) for match in MATCHES for most in MOSTS for drafted in lengths]
    return [Plan(length) for length in lengths] + copying


def best_rates(text: Text | RecordedTexts, machine: CopyingMachine, sizes: list[int], draft: bool) -> dict[int, float]:
    """Least mean seconds per token and row at each batch size."""
    rng, best = np.random.default_rng(1), dict.fromkeys(sizes, float("inf"))
    for plan in plans_of(draft):
        rows = text.rows(KNOWN_ROWS, rng)
        for _ in range(WARM_STEPS):
            rows.step(plan, KNOWN_ROWS)
        steps = [rows.step(plan, KNOWN_ROWS) for _ in range(KNOWN_STEPS)]
        tokens = float(np.mean([done.tokens.mean() for done in steps]))
        for size in sizes:
            seconds = [time_of(machine, _some(done, size, rng))[0] for done in steps for _ in range(4)]
            best[size] = min(best[size], float(np.mean(seconds)) / tokens)
    return best


def _some(done: Outcome, size: int, rng: np.random.Generator) -> Outcome:
    chosen = rng.integers(0, len(done.match), size)
    return done._replace(**{name: getattr(done, name)[chosen] for name in Outcome._fields[:-1]})  # nobody reads it


class Play:
    """One run of the estimator. Reports arrive GROUP steps at a time; a probe is done as soon as its batch size is there.

    reads: whether workers tell what they read of all output, copied or not.
    """

    def __init__(self, world: CopyWorld, seed: int, reads: bool = True) -> None:
        self.world, self.rng, self.reads = world, np.random.default_rng(seed), reads
        draft = world.scenario.draft
        self.limits = Limits(world.max_batch, MAX_LENGTH if draft else 0, MOST_COPIED)
        self.estimator = Estimator()
        self.estimator.add_context(KEY, self.limits)
        sizes = sorted(set(world.batches.tolist()))
        self.best = [best_rates(*world.part(number), sizes, draft) for number in range(world.parts)]
        self.probe: Probe | None = None
        self.steps_left = 0  # of the probe

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
            spent_s += mean_s
            work_s += self.best[part][batch] * float(done.tokens.mean())
            report = report_of(plan, done, mean_s * self._noise(), machine)
            waiting.append(report if self.reads else report._replace(read=()))
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
            self.steps_left -= 1
            if self.steps_left <= 0:
                self.probe = None
            return probe.plan or Plan(probe.speculation_length)
        choice = self.estimator.table(KEY).choices[self.estimator.bucket_index(KEY, batch)]
        return choice.plan or Plan(choice.speculation_length)

    def _learn(self, group: list[StepObservation], batch: int) -> None:
        self.estimator.observe(KEY, group, "w")
        most = self.limits.max_speculation_length, "w", self.limits.max_copied_tokens
        if self.probe is None or self.steps_left <= 1:
            self.probe = self.estimator.take_probe(KEY, batch, *most)
            self.steps_left = 0 if self.probe is None else max(self.probe.num_steps, 1)


def main() -> None:
    """Print scores by scenario, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--scenario", default="", help="only those whose name contains this")
    parser.add_argument("--unread", action="store_true", help="workers tell of what they copied alone")
    options = parser.parse_args()
    for scenario in SCENARIOS:
        if options.scenario in scenario.name:
            worlds = [(seed, CopyWorld(scenario, seed, options.steps)) for seed in range(options.seeds)]
            scores = [Play(world, seed, not options.unread).score() for seed, world in worlds]
            shown = {"median": round(median(scores), 1), "worst": round(min(scores), 1)}
            print(
                json.dumps({"scenario": scenario.name, **shown, "scores": [round(score, 1) for score in scores]}),
                flush=True,
            )


if __name__ == "__main__":
    main()
