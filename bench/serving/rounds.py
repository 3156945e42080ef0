"""Rounds, in which every policy serves the same block in random order, and the ratios of policies over paired blocks.

Requests that arrive close together wait in the same queue, so single requests are not independent samples. Blocks are: each
begins with an idle worker, and both policies of a ratio serve the same ones within the same minute or two.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from speclen.bench.serving.load import BlockFigures

NUM_DRAWS = 2000
CONFIDENCE = 0.95
NORMAL_QUANTILE = 1.959964
LEAST_BLOCKS = 6  # with fewer, the interval is reported as too short


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95% confidence interval."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the width relative to the ratio: 0.03 for 3%."""
        return math.sqrt(self.high / self.low) - 1.0


def ratio_of_sums(numerators: Sequence[float], denominators: Sequence[float], seed: int = 0) -> Interval:
    """sum(numerators) / sum(denominators) over paired blocks, with a bootstrap interval over blocks.

    Few blocks underestimate their own spread: the deviations of the draws are widened by sqrt(n / (n - 1)) and by what
    Student's quantile has over the normal one. One block has no width. Raises ValueError when there is nothing.
    """
    if not numerators or not sum(denominators):
        raise ValueError("no blocks to compare")
    above, below = np.array(numerators, float), np.array(denominators, float)
    number = len(above)
    value = math.log(above.sum() / below.sum())
    if number == 1:
        return Interval(*[math.exp(value)] * 3)
    picks = np.random.default_rng(seed).integers(number, size=(NUM_DRAWS, number))
    draws = np.log(above[picks].sum(axis=1) / below[picks].sum(axis=1)) - value
    widening = math.sqrt(number / (number - 1)) * student_quantile(number - 1) / NORMAL_QUANTILE
    low, high = value + widening * np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(math.exp(value), math.exp(low), math.exp(high))


def student_quantile(freedom: int) -> float:
    """The 97.5% quantile of Student's distribution, within 1% (Cornish and Fisher)."""
    if freedom in (exact := {1: 12.706, 2: 4.303}):
        return exact[freedom]
    z, v = NORMAL_QUANTILE, freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


@dataclass(frozen=True, slots=True)
class Round:
    """One block, served by every policy in this order. number: of the block."""

    number: int
    order: tuple[str, ...]
    blocks: dict[str, BlockFigures]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Mean latency of `policy` over that of `reference`; below 1: faster.

    num_blocks: blocks that both served without failure; interval: None for fewer than two.
    """

    policy: str
    reference: str
    interval: Interval | None
    num_blocks: int


@dataclass(slots=True)
class Comparison:
    """All rounds of a workload. policies: the first is compared with the others. turns: kinds of blocks, kept apart."""

    policies: tuple[str, ...]
    rounds: list[Round] = field(default_factory=list)
    turns: int = 1

    @property
    def parts(self) -> list[Comparison]:
        """A comparison for each kind of block, in order of the remainders of their numbers."""
        if self.turns == 1:
            return [self]
        kinds = [[one for one in self.rounds if one.number % self.turns == turn] for turn in range(self.turns)]
        return [Comparison(self.policies, rounds) for rounds in kinds]

    def ratio(self, policy: str, reference: str) -> Ratio:
        """Ratio over the blocks that both policies served without failure."""
        above, below = [], []
        for one in self.rounds:
            a, b = one.blocks[policy], one.blocks[reference]
            if not (a.num_failed or b.num_failed):
                above.append(a.latency_sum_s)
                below.append(b.latency_sum_s)
        return Ratio(policy, reference, ratio_of_sums(above, below) if len(above) > 1 else None, len(above))

    def mean_latency_s(self, policy: str) -> float | None:
        """Mean over all requests of the blocks without failures; None if there are none."""
        whole = [one.blocks[policy] for one in self.rounds if not one.blocks[policy].num_failed]
        if not whole:
            return None
        return sum(block.latency_sum_s for block in whole) / sum(block.num_requests for block in whole)

    def best_fixed(self) -> str | None:
        """The fixed length with the least latency, relative to the first fixed length on the same blocks."""
        fixed = [name for name in self.policies if name == "none" or name.startswith("fixed:")]
        against = {name: ratio.interval.value for name in fixed if (ratio := self.ratio(name, fixed[0])).interval}
        return min(against, key=lambda name: against[name]) if against else None

    def notes(self) -> list[str]:
        """Remarks on the limits of the figures."""
        found = list[str]()
        if (fewest := min(len(part.rounds) for part in self.parts)) < LEAST_BLOCKS:
            found.append(f"too short for its intervals: {fewest} rounds, fewer than {LEAST_BLOCKS}")
        late = max((block.late_s for one in self.rounds for block in one.blocks.values()), default=0.0)
        if late > 0.1:
            found.append(f"the load generator itself was late by {late:.2f} s (99th percentile of a block)")
        return found

    def errors(self) -> dict[str, int]:
        """Failed requests by policy and reason."""
        found = Counter[str]()
        for one in self.rounds:
            for name, block in one.blocks.items():
                found.update({f"{name}: {reason}": count for reason, count in block.errors.items()})
        return dict(found)


def run_rounds(
    comparison: Comparison,
    serve_round: Callable[[int, Sequence[str]], Round],
    clock: Callable[[], float],
    time_is_up: float,
    max_rounds: int,
    say: Callable[[str], None],
    seed: int = 0,
) -> None:
    """Add rounds until time_is_up; Ctrl-C keeps the complete ones.

    A round is not started if, by the mean duration so far, it would end after time_is_up.
    """
    begun = clock()
    for number in range(1, max_rounds + 1):
        if number > 1 and clock() + (clock() - begun) / (number - 1) > time_is_up:
            break
        order = list(comparison.policies)
        random.Random(f"{seed}:{number}").shuffle(order)
        try:
            comparison.rounds.append(serve_round(number, order))
        except KeyboardInterrupt:
            if not comparison.rounds:
                raise
            say("interrupted: the rounds that are complete are kept")
            break
