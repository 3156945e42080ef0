"""Rounds: every policy serves the same block, in random order; and what follows from many of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from speclen.bench.comparison.stats import LEAST_BLOCKS, Interval, ratio_of_sums
from speclen.bench.serving.block import BlockFigures


@dataclass(frozen=True, slots=True)
class Round:
    """One block, served by every policy. number: which block. order: of the policies."""

    number: int
    order: tuple[str, ...]
    blocks: dict[str, BlockFigures]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Mean latency of `policy` over that of `reference`; below 1: faster.

    num_blocks: that both served without failure; interval: None for fewer than two of them.
    """

    policy: str
    reference: str
    interval: Interval | None
    num_blocks: int


@dataclass(slots=True)
class Comparison:
    """All rounds of a track. policies: the one it is about first. turns: kinds of blocks that take turns, judged apart."""

    policies: tuple[str, ...]
    rounds: list[Round] = field(default_factory=list)
    turns: int = 1

    @property
    def parts(self) -> list[Comparison]:
        """Of the rounds of each kind, in order of their numbers' remainders; all of them where there is one kind."""
        if self.turns == 1:
            return [self]
        kinds = [[one for one in self.rounds if one.number % self.turns == turn] for turn in range(self.turns)]
        return [Comparison(self.policies, rounds) for rounds in kinds]

    def ratio(self, policy: str, reference: str) -> Ratio:
        """Of the blocks that both served without failure."""
        above, below = [], []
        for one in self.rounds:
            a, b = one.blocks[policy], one.blocks[reference]
            if not (a.num_failed or b.num_failed):
                above.append(a.latency_sum_s)
                below.append(b.latency_sum_s)
        return Ratio(policy, reference, ratio_of_sums(above, below) if len(above) > 1 else None, len(above))

    def mean_latency_s(self, policy: str) -> float | None:
        """Over all requests of the blocks that it served; None when it served none without failure."""
        whole = [one.blocks[policy] for one in self.rounds if not one.blocks[policy].num_failed]
        if not whole:
            return None
        return sum(block.latency_sum_s for block in whole) / sum(block.num_requests for block in whole)

    def best_fixed(self) -> str | None:
        """The fixed length with the least latency over the blocks that the first of them served as well."""
        fixed = [name for name in self.policies if name == "none" or name.startswith("fixed:")]
        against = {name: ratio.interval.value for name in fixed if (ratio := self.ratio(name, fixed[0])).interval}
        return min(against, key=lambda name: against[name]) if against else None

    def notes(self) -> list[str]:
        """Limits of the figures, in words."""
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
    """Add rounds until time is up; Ctrl-C keeps those that are complete.

    A round is not begun that would, by the mean of those before, end after time_is_up (by clock).
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
