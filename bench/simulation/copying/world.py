"""A simulated machine and texts in which rows repeat themselves: what plans that copy are worth, and whether that is found.

Texts are simulated by tokens, not by steps: stretches that repeat earlier text begin at random and have random lengths, so
a plan that gets through them faster has fewer steps in them, as in the engine. Beside them there are matches by chance,
whose continuation is mostly wrong. A step's time is that of a machine as in `world.py`: draft passes, and verified tokens up
to a knee and beyond.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.core import StepObservation
from speclen.controller.estimator.plans.plan import MAX_MATCH, CopiedRun, Copies, Plan


@dataclass(frozen=True)
class Text:
    """begins: chance per token that a repeated stretch begins; mean_length: of a stretch, in tokens. by_chance: share of
    other tokens before which 1, 2, 3, ... tokens match nevertheless, each so much rarer; such copies are right at
    `chance_right` a token. draft_right: chance of a drafted token outside and inside of stretches.
    """

    begins: float
    mean_length: float
    by_chance: float
    chance_right: float
    draft_right: tuple[float, float]


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

    def seconds(self, batch: int, passes: int, drafting: int, verified: int) -> float:
        """Mean time of a step."""
        seconds = self.overhead_s + passes * (self.draft_s + drafting * self.draft_row_s) + verified * self.token_s
        seconds += max(verified - self.knee, 0.0) * self.beyond_s
        width = min(round(verified / batch), self.bumps.shape[1] - 1)
        return seconds * float(self.bumps[batch, width])


class Outcome(NamedTuple):
    """What each row of a step did: longest match, proposed and accepted copies, drafted tokens and accepted ones, [rows]."""

    match: np.ndarray
    proposed: np.ndarray
    copied: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray

    @property
    def tokens(self) -> np.ndarray:
        """New tokens of each row."""
        return 1 + self.copied + self.accepted


class Rows:
    """Rows in the middle of their texts. left: tokens until a stretch ends, 0 outside; depth: tokens of it so far."""

    def __init__(self, text: Text, count: int, rng: np.random.Generator) -> None:
        self.text, self.rng = text, rng
        self.left, self.depth = np.zeros((2, count), dtype=int)
        self.by_chance = self._draw(count)

    def _draw(self, count: int) -> np.ndarray:
        """Matches by chance."""
        return np.minimum(self.rng.geometric(1.0 - self.text.by_chance, count) - 1, MAX_MATCH)

    def step(self, plan: Plan, batch: int) -> Outcome:
        """One step of the first rows."""
        text, rng, here = self.text, self.rng, slice(0, batch)
        left, inside = self.left[here], self.left[here] > 0
        match = np.minimum(np.where(inside, self.depth[here], self.by_chance[here]), MAX_MATCH)
        copies = (match >= plan.copy_min_match) if plan.copy_min_match else np.zeros(batch, dtype=bool)
        proposed = np.where(copies, plan.copy_max_tokens, 0)
        lucky = rng.geometric(1.0 - text.chance_right, batch) - 1
        copied = np.minimum(np.where(inside, left, lucky), proposed)
        drafted = np.where(copies, 0, plan.draft_length)
        right = np.where(inside, text.draft_right[1], text.draft_right[0])
        accepted = np.minimum(rng.geometric(1.0 - right) - 1, drafted)
        self._advance(here, copied + accepted + 1)
        return Outcome(match, proposed, copied, drafted, accepted)

    def _advance(self, here: slice, tokens: np.ndarray) -> None:
        """Read on by so many tokens."""
        rng, text, left, depth = self.rng, self.text, self.left[here], self.depth[here]
        within = np.minimum(tokens, left)
        left -= within
        depth += within
        depth[left == 0] = 0
        outside = tokens - within
        begun = (left == 0) & (rng.random(len(left)) < 1.0 - (1.0 - text.begins) ** outside)
        left[begun] = rng.geometric(1.0 / text.mean_length, int(begun.sum()))
        depth[begun] = 1
        self.by_chance[here] = self._draw(len(left))


@dataclass(frozen=True)
class CopyScenario:
    """What a run is like. texts: of each part of it. noise: log-sd of a step."""

    name: str
    repeating: tuple[float, ...] = (1.0,)  # how often stretches begin, in each part, over the seed's own
    draft: bool = True
    slow_draft: tuple[float, ...] = (1.0,)
    noise: float = 0.05
    steady: int = 0  # batch size; 0: it wanders


SCENARIOS = (
    CopyScenario("copying and drafting"),
    CopyScenario("no draft model", draft=False),
    CopyScenario("texts repeat less, and again", repeating=(1.0, 0.1, 1.0)),
    CopyScenario("the draft becomes three times as slow, and back", slow_draft=(1.0, 3.0, 1.0)),
    CopyScenario("nothing repeats", repeating=(0.02,)),
    CopyScenario("steady batch of 8", steady=8),
)


class CopyWorld:
    """One seed of one scenario."""

    def __init__(self, scenario: CopyScenario, seed: int, num_steps: int, max_batch: int = 32) -> None:
        self.scenario, self.num_steps, self.max_batch = scenario, num_steps, max_batch
        self.rng = rng = np.random.default_rng([seed, sum(map(ord, scenario.name))])
        plain = 0.01
        self.machine = CopyingMachine(
            plain,
            plain * rng.uniform(0.05, 0.25),
            plain * rng.uniform(0.0005, 0.003),
            plain * rng.uniform(0.001, 0.02),
            rng.uniform(8.0, 80.0),
            plain * rng.uniform(0.005, 0.03),
            1.0 + 0.03 * rng.uniform(-1.0, 1.0, (max_batch + 1, 40)),
        )
        self.text = Text(
            float(rng.uniform(0.005, 0.06)),
            float(rng.uniform(8.0, 40.0)),
            float(rng.uniform(0.3, 0.7)),
            float(rng.uniform(0.1, 0.4)),
            (float(rng.uniform(0.4, 0.75)), float(rng.uniform(0.7, 0.95))),
        )
        self.parts = max(len(scenario.repeating), len(scenario.slow_draft))
        self.batches = self._batches()

    def _batches(self) -> np.ndarray:
        if self.scenario.steady:
            return np.full(self.num_steps, self.scenario.steady)
        stays = self.rng.geometric(1.0 / 40.0, self.num_steps)
        sizes = np.round(np.exp(self.rng.uniform(0.0, np.log(self.max_batch), self.num_steps)))
        return np.repeat(sizes, stays)[: self.num_steps].astype(int)

    def part(self, number: int) -> tuple[Text, CopyingMachine]:
        """Texts and machine of a part of the run."""
        repeating, slow = self.scenario.repeating, self.scenario.slow_draft
        text = replace(self.text, begins=self.text.begins * repeating[number % len(repeating)])
        factor = slow[number % len(slow)]
        machine = self.machine
        slower = replace(machine, draft_s=machine.draft_s * factor, draft_row_s=machine.draft_row_s * factor)
        return text, slower


def time_of(machine: CopyingMachine, done: Outcome) -> tuple[float, int, int, int]:
    """Mean seconds, draft passes, drafting rows and verified tokens of a step, on a backend that is fed ragged rows."""
    drafting = int((done.drafted > 0).sum())
    passes, batch = int(done.drafted.max()), len(done.match)
    verified = batch + int(done.proposed.sum() + done.drafted.sum())
    return machine.seconds(batch, passes, drafting, verified), passes, drafting, verified


def report_of(plan: Plan, done: Outcome, latency_s: float, machine: CopyingMachine) -> StepObservation:
    """The step as a worker reports it."""
    _, passes, drafting, verified = time_of(machine, done)
    histogram = np.bincount(done.accepted, minlength=passes + 1)
    if not plan.copy_min_match:
        return StepObservation(len(done.match), passes, latency_s, tuple(histogram.tolist()), 100.0)
    copied = done.proposed > 0
    runs, counts = np.unique(np.array([done.match, done.proposed, done.copied])[:, copied], axis=1, return_counts=True)
    told = tuple(
        CopiedRun(run[0], run[1], run[2], rows) for run, rows in zip(runs.T.tolist(), counts.tolist(), strict=True)
    )
    copies = Copies(plan, len(done.match), drafting, verified, told)
    flags = False, False
    return StepObservation(len(done.match), passes, latency_s, tuple(histogram.tolist()), 100.0, *flags, copying=copies)
