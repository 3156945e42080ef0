"""Rounds, in which every policy serves the same block in random order, and the ratios of policies over paired blocks.

Requests that arrive close together wait in the same queue, so single requests are not independent samples. Blocks are: each
begins with an idle worker, and both policies of a ratio serve the same ones within the same minute or two.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from speclen.bench.serving.load import BlockFigures
from speclen.controller.baseline.gain import t_quantile

LEAST_BLOCKS = 6  # with fewer, the interval is reported as too short
RESOLUTION = 0.03  # half the width of the intervals at which the rounds end


class PolicyFailedError(Exception):
    """One policy cannot serve any more; the others can."""


class WorkerEndedError(Exception):
    """The worker has ended, so no policy can serve any more."""


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


def mean_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Geometric mean of the ratios of paired blocks, with Student's interval of the mean logarithm.

    One block has no width. Raises ValueError when there is nothing.
    """
    logs = [math.log(above / below) for above, below in zip(numerators, denominators, strict=True)]
    if not logs:
        raise ValueError("no blocks to compare")
    value, number = statistics.fmean(logs), len(logs)
    reach = student_quantile(number - 1) * statistics.stdev(logs) / math.sqrt(number) if number > 1 else 0.0
    return Interval(math.exp(value), math.exp(value - reach), math.exp(value + reach))


def student_quantile(freedom: int) -> float:
    """The 97.5% quantile of Student's distribution, within 1%."""
    exact = {1: 12.706, 2: 4.303}
    return exact[freedom] if freedom in exact else t_quantile(0.975, freedom)


@dataclass(frozen=True, slots=True)
class Round:
    """One block, served by the policies in this order. number: of the block. blocks: of those that have served it."""

    number: int
    order: tuple[str, ...]
    blocks: dict[str, BlockFigures] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Speed of `policy` relative to `reference`; above 1: faster.

    num_blocks: blocks that both served without failure; interval: None for fewer than two.
    """

    policy: str
    reference: str
    interval: Interval | None
    num_blocks: int


@dataclass(slots=True)
class Comparison:
    """All rounds of a workload. policies: the first is compared with the others.

    closed: True for a closed loop, where speed is tokens per second of the block; otherwise it is the inverse of the mean
    latency. failures: why a policy has stopped serving, by name. ending: why the rounds have ended early, or "".
    """

    policies: tuple[str, ...]
    closed: bool = False
    rounds: list[Round] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    ending: str = ""

    def speed(self, block: BlockFigures) -> float:
        return block.tokens_per_s if self.closed else 1 / block.mean_latency_s

    def ratio(self, policy: str, reference: str) -> Ratio:
        """Ratio over the blocks that both policies served without failure."""
        pairs = [
            (self.speed(one.blocks[policy]), self.speed(one.blocks[reference]))
            for one in self.rounds
            if all(name in one.blocks and not one.blocks[name].num_failed for name in (policy, reference))
        ]
        interval = mean_ratio([a for a, _ in pairs], [b for _, b in pairs]) if len(pairs) > 1 else None
        return Ratio(policy, reference, interval, len(pairs))

    def whole(self, policy: str) -> list[BlockFigures]:
        """The policy's blocks without failures."""
        found = [one.blocks[policy] for one in self.rounds if policy in one.blocks]
        return [block for block in found if not block.num_failed]

    def best_fixed(self) -> str | None:
        """The fastest fixed length, relative to the first one on the same blocks."""
        fixed = [name for name in self.policies if name == "none" or name.startswith("fixed:")]
        against = {name: ratio.interval.value for name in fixed if (ratio := self.ratio(name, fixed[0])).interval}
        return max(against, key=lambda name: against[name]) if against else None

    def unresolved(self) -> list[str]:
        """Ratios to the first policy whose intervals are too wide, in words."""
        first, *others = self.policies
        found = {name: self.ratio(first, name).interval for name in others}
        return [
            f"{name} ±{100 * interval.half_width:.1f}%" if interval else name
            for name, interval in found.items()
            if name not in self.failures and (interval is None or interval.half_width > RESOLUTION)
        ]

    def notes(self) -> list[str]:
        """Remarks on the limits of the figures."""
        found = [f"{name} has failed and serves no more: {reason}" for name, reason in self.failures.items()]
        if self.ending:
            found.append(f"{self.ending}: the blocks that were served are kept")
        if len(self.rounds) < LEAST_BLOCKS:
            found.append(f"too short for its intervals: {len(self.rounds)} rounds, fewer than {LEAST_BLOCKS}")
        if wide := self.unresolved():
            found.append(f"not resolved to {100 * RESOLUTION:g}%: {', '.join(wide)}")
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
    serve: Callable[[int, str], BlockFigures],
    clock: Callable[[], float],
    time_is_up: float,
    max_rounds: int,
    keep: Callable[[], None],
    seed: int = 0,
) -> None:
    """Add rounds until all ratios are resolved, or until time_is_up. keep: called after each round.

    A round is not started if, by the mean duration so far, it would end after time_is_up. A policy that fails is left out
    from then on; with the first, which the others are compared with, the rounds end. Ctrl-C and a worker that ends keep all
    blocks that were served.
    """
    begun = clock()
    for number in range(1, max_rounds + 1):
        order = [name for name in comparison.policies if name not in comparison.failures]
        is_late = number > 1 and clock() + (clock() - begun) / (number - 1) > time_is_up
        is_resolved = number > LEAST_BLOCKS and not comparison.unresolved()
        if is_late or is_resolved or comparison.ending or comparison.policies[0] not in order:
            break
        random.Random(f"{seed}:{number}").shuffle(order)
        comparison.rounds.append(one := Round(number, tuple(order)))
        serve_round(comparison, one, serve)
        if not one.blocks:
            comparison.rounds.pop()
        keep()


def serve_round(comparison: Comparison, one: Round, serve: Callable[[int, str], BlockFigures]) -> None:
    """Serve one block by every policy of the round, and note what fails or ends it."""
    for name in one.order:
        try:
            one.blocks[name] = serve(one.number, name)
        except PolicyFailedError as error:
            comparison.failures[name] = str(error)
        except WorkerEndedError as error:
            comparison.ending = f"the worker ended while {name} served ({error})"
            return
        except KeyboardInterrupt:
            comparison.ending = "interrupted"
            return
