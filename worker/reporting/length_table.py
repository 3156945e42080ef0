"""The length to use at every batch size: what a step reads.

A table is an ordinary list indexed by batch size, replaced as a whole when a newer one arrives, so that reading it needs
no lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from speclen.worker.drafting.plan import PLAIN, Plan
from speclen.worker.reporting.length_mix import LengthMix

DEFAULT_LENGTH = 2  # what a worker speculates when nobody has told it anything: rarely best, rarely far off


@dataclass(frozen=True, slots=True)
class BucketLength:
    """Batch sizes batch_min..batch_max use speculation_length, or the plan, if there is one."""

    batch_min: int
    batch_max: int
    speculation_length: int
    plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class LengthTable:
    """plans[b] is what rows do at batch size b, and lengths[b] its speculation length; entry 0 is unused.

    source: "controller", "last table", "profile", "policy" or "default", for people. buckets: the same, as ranges. mix:
    where requests of several classes were seen, what finds the length for those in a step.
    """

    lengths: tuple[int, ...]
    decision_version: int
    source: str
    buckets: tuple[BucketLength, ...]
    plans: tuple[Plan, ...]
    mix: LengthMix | None = None

    def plan_for(self, batch_size: int, rows_by_class: tuple[int, ...]) -> Plan:
        """What rows do in a step with so many of them, and so many of each class where that is known.

        The numbers by class are of draft tokens alone: where rows copy, the plan of the batch size holds.
        """
        plan = self.plans[batch_size]
        if self.mix is None or not rows_by_class or plan.copies:
            return plan
        return Plan(self.mix.length_for(rows_by_class))

    @classmethod
    def from_buckets(
        cls,
        buckets: Iterable[BucketLength],
        max_batch_size: int,
        max_length: int,
        version: int,
        source: str,
        max_copied: int = 0,
        mix: LengthMix | None = None,
    ) -> LengthTable:
        """A table for batch sizes 1..max_batch_size. Lengths are cut to max_length, and copies to max_copied tokens.

        Raises ValueError if a batch size is in no bucket.
        """
        ranges = tuple(buckets)
        plans = [PLAIN] * (max_batch_size + 1)
        known = [False] * (max_batch_size + 1)
        for bucket in ranges:
            plan = bucket.plan or Plan(min(bucket.speculation_length, max_length))
            for batch_size in range(bucket.batch_min, min(bucket.batch_max, max_batch_size) + 1):
                plans[batch_size] = plan.within(max_length, max_copied)
                known[batch_size] = True
        if not all(known[1:]):
            raise ValueError(f"the length table says nothing about batch size {known.index(False, 1)}")
        return cls(tuple(plan.draft_length for plan in plans), version, source, ranges, tuple(plans), mix)

    @classmethod
    def constant(cls, length: int, max_batch_size: int, source: str) -> LengthTable:
        """The same length at every batch size."""
        return cls.from_buckets([BucketLength(1, max_batch_size, length)], max_batch_size, length, 0, source)


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """Mean whole-step time at one batch size and length, as a profile measured it."""

    batch_size: int
    speculation_length: int
    step_s: float


def table_from_profile(
    steps: Sequence[ProfiledStep], survival: Sequence[float], max_batch_size: int, max_length: int
) -> LengthTable:
    """The paper's table: per profiled batch size the length with the least time per token, frozen.

    A batch size between two profiled ones uses the larger one's length, as in the paper's look-up.
    survival[i]: probability that draft tokens 0..i are all accepted. Raises ValueError for an empty profile.
    """
    if not steps:
        raise ValueError("the profile has no cells")
    expected = [1.0]
    for probability in survival:
        expected.append(expected[-1] + probability)
    buckets, low = [], 1
    sizes = sorted({step.batch_size for step in steps})
    for size in sizes:
        allowed = [s for s in steps if s.batch_size == size and s.speculation_length <= min(max_length, len(survival))]
        if not allowed:
            continue
        best = min(allowed, key=lambda step: step.step_s / expected[step.speculation_length])
        high = max_batch_size if size == sizes[-1] else size
        buckets.append(BucketLength(low, high, best.speculation_length))
        low = size + 1
    return LengthTable.from_buckets(buckets, max_batch_size, max_length, 0, "profile")
