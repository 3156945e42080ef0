"""A simulated machine and texts in which rows repeat themselves: what plans that copy are worth, and whether that is found.

Texts are simulated by tokens, not by steps: stretches that repeat earlier text begin at random and have random lengths, so
a plan that gets through them faster has fewer steps in them, as in the engine. Beside them there are matches by chance,
whose continuation is mostly wrong. Or texts are recorded ones (`recorded.py`). A step's time is that of a machine
(`machine.py`): draft passes, and verified tokens up to a knee and beyond.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from speclen.bench.simulation.copying.machine import FLAT, TWO_CORES, UNEVEN, CopyingMachine, Outcome
from speclen.bench.simulation.copying.recorded import RecordedTexts, recorded_texts
from speclen.controller.estimator.plans.plan import MAX_MATCH, Plan


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

    def rows(self, count: int, rng: np.random.Generator) -> Rows:
        """Rows outside of stretches."""
        return Rows(self, count, rng)


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
        read = self._read(match, left, lucky > 0, copied + accepted + 1)
        self._advance(here, copied + accepted + 1)
        return Outcome(match, proposed, copied, drafted, accepted, read, np.zeros_like(match))

    def _read(self, match: np.ndarray, left: np.ndarray, lucky: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Matches and copies of the new tokens: in a stretch they grow, until one is wrong; outside they come by chance."""
        rows = np.repeat(np.arange(len(match)), tokens)
        place = np.arange(len(rows)) - np.repeat(tokens.cumsum() - tokens, tokens)
        inside = (place <= left[rows]) & (left[rows] > 0)
        by_chance = np.where(place == 0, match[rows], self._draw(len(rows)))
        right = np.where(place == 0, lucky[rows], self.rng.random(len(rows)) < self.text.chance_right)
        here = np.where(inside, np.minimum(match[rows] + place, MAX_MATCH), by_chance)
        return np.stack([here, np.where(inside, place < left[rows], right & (here > 0))])

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
    mixes: tuple[str, ...] = ()  # of recorded texts, in each part; none: texts are made up
    machine: CopyingMachine | None = None  # None: one is made up


SCENARIOS = (
    CopyScenario("copying and drafting"),
    CopyScenario("no draft model", draft=False),
    CopyScenario("texts repeat less, and again", repeating=(1.0, 0.1, 1.0)),
    CopyScenario("the draft becomes three times as slow, and back", slow_draft=(1.0, 3.0, 1.0)),
    CopyScenario("nothing repeats", repeating=(0.02,)),
    CopyScenario("steady batch of 8", steady=8),
    CopyScenario("recorded: completions", mixes=("code",), machine=TWO_CORES),
    CopyScenario("recorded: mixed", mixes=("mixed",), machine=TWO_CORES),
    CopyScenario("recorded: mixed, flat machine", mixes=("mixed",), machine=FLAT),
    CopyScenario("recorded: mixed, uneven machine", mixes=("mixed",), machine=UNEVEN),
    CopyScenario("recorded: copying", mixes=("copying",), machine=TWO_CORES),
    CopyScenario("recorded: completions, then sampled", mixes=("code", "sampled"), machine=TWO_CORES),
)


class CopyWorld:
    """One seed of one scenario."""

    def __init__(self, scenario: CopyScenario, seed: int, num_steps: int, max_batch: int = 32) -> None:
        self.scenario, self.num_steps, self.max_batch = scenario, num_steps, max_batch
        self.rng = rng = np.random.default_rng([seed, sum(map(ord, scenario.name))])
        plain = 0.01
        self.machine = scenario.machine or CopyingMachine(
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
        self.parts = max(len(scenario.repeating), len(scenario.slow_draft), len(scenario.mixes))
        self.recorded = [recorded_texts(mix) for mix in scenario.mixes]
        self.batches = self._batches()

    def _batches(self) -> np.ndarray:
        if self.scenario.steady:
            return np.full(self.num_steps, self.scenario.steady)
        stays = self.rng.geometric(1.0 / 40.0, self.num_steps)
        sizes = np.round(np.exp(self.rng.uniform(0.0, np.log(self.max_batch), self.num_steps)))
        return np.repeat(sizes, stays)[: self.num_steps].astype(int)

    def part(self, number: int) -> tuple[Text | RecordedTexts, CopyingMachine]:
        """Texts and machine of a part of the run."""
        repeating, slow = self.scenario.repeating, self.scenario.slow_draft
        factor = slow[number % len(slow)]
        machine = self.machine
        slower = replace(machine, draft_s=machine.draft_s * factor, draft_row_s=machine.draft_row_s * factor)
        if self.recorded:
            return self.recorded[number % len(self.recorded)], slower
        return replace(self.text, begins=self.text.begins * repeating[number % len(repeating)]), slower
