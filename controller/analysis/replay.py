"""What happened, again: the same events give the same decisions, and show what another policy would have cost.

Events are plain values in the order in which a controller met them; reading them from a database is the caller's job.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from speclen.controller.analysis.accuracy import Accuracy
from speclen.controller.estimator.acceptance import band_of
from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.buckets import FINE
from speclen.controller.estimator.contexts.context import Context
from speclen.controller.estimator.core import ContextKey, Decision, DriftEvent, Limits, Profile, StepObservation
from speclen.controller.estimator.estimator import Estimator
from speclen.controller.estimator.policies import ADAPTIVE, make_policy
from speclen.controller.estimator.policies.policy import Policy, Space
from speclen.controller.estimator.reports import typical


@dataclass(frozen=True, slots=True)
class ContextAdded:
    """A worker of this context registered, the first one or one with larger limits."""

    key: ContextKey
    limits: Limits


@dataclass(frozen=True, slots=True)
class ProfileImported:
    """A profile seeded a context."""

    key: ContextKey
    profile: Profile


@dataclass(frozen=True, slots=True)
class GroupObserved:
    """Reports that were learned from in one call. workers: who sent each of them."""

    group_id: int
    key: ContextKey
    workers: Sequence[str]
    observations: Sequence[StepObservation]


Event = ContextAdded | ProfileImported | GroupObserved


@dataclass(frozen=True, slots=True)
class ReplayedDecision:
    """A decision, and the last group that was learned from before it (0: none)."""

    after_group_id: int
    decision: Decision


@dataclass(slots=True)
class Replay:
    """What a controller did with the events."""

    estimator: Estimator
    decisions: list[ReplayedDecision] = field(default_factory=list)
    drift_events: list[DriftEvent] = field(default_factory=list)
    accuracy: Accuracy = field(default_factory=Accuracy)
    num_groups: int = 0
    num_reports: int = 0


def replay(events: Iterable[Event], policy: str = ADAPTIVE, seed: int = 0, buckets: str = FINE) -> Replay:
    """Give the events to a fresh estimator. Raises KeyError if a context reports before it was added."""
    result = Replay(Estimator(buckets, policy, seed))
    last_group_id = 0
    for event in events:
        decisions: list[Decision] = []
        match event:
            case ContextAdded():
                decisions = result.estimator.add_context(event.key, event.limits).decisions
            case ProfileImported():
                decisions = result.estimator.seed_profile(event.key, event.profile).decisions
            case GroupObserved():
                result.accuracy.add(result.estimator.context(event.key), event.observations, event.workers)
                outcome = result.estimator.observe(event.key, event.observations, event.workers)
                decisions = outcome.decisions
                result.drift_events += outcome.drift_events
                result.num_groups += 1
                result.num_reports += sum(each.num_steps for each in event.observations)
                last_group_id = event.group_id
        result.decisions += [ReplayedDecision(last_group_id, decision) for decision in decisions]
    return result


@dataclass(slots=True)
class PolicyCost:
    """Time that a policy would have needed for the tokens that were generated.

    actual_s: time that the observed steps took, and the same by the estimates (predicted_s); the quotient corrects
    policy_s, which is by the estimates as well. Left out are steps before anything was known, and those that do not say how
    long a length takes, as they copied or did more than decode. num_reported_steps, reported_s: with these.
    """

    policy: str
    num_reported_steps: int = 0
    reported_s: float = 0.0
    num_steps: int = 0
    actual_s: float = 0.0
    predicted_s: float = 0.0
    policy_raw_s: float = 0.0

    @property
    def policy_s(self) -> float:
        """Estimated time of the policy, in seconds."""
        return self.policy_raw_s * (self.actual_s / self.predicted_s) if self.predicted_s else 0.0

    @property
    def ratio(self) -> float:
        """Estimated time over the time it took; below 1 the policy would have been faster."""
        return self.policy_raw_s / self.predicted_s if self.predicted_s else 1.0


def cost_of(events: Iterable[Event], policies: Sequence[str], seed: int = 0, buckets: str = FINE) -> list[PolicyCost]:
    """What other policies would have cost: for each context, in order of appearance, one entry per policy.

    The adaptive estimator follows the events and says what each length would have taken at that moment. Another
    policy sees what it would have seen: for the length that it plays, accepted runs are cut from the real ones, or
    continued by chance with the estimated acceptance, and the real step's noise is put on the predicted time.
    """
    estimator = Estimator(buckets)
    shadows: dict[ContextKey, list[_Shadow]] = {}
    for event in events:
        match event:
            case ContextAdded():
                estimator.add_context(event.key, event.limits)
                context = estimator.context(event.key)
                if event.key not in shadows:
                    shadows[event.key] = [_Shadow(context, policy, seed) for policy in policies]
                for shadow in shadows[event.key]:
                    shadow.widen(context)
            case ProfileImported():
                estimator.seed_profile(event.key, event.profile)
                for shadow in shadows[event.key]:
                    if shadow.policy is not None:
                        shadow.policy.seed(event.profile)
            case GroupObserved():
                estimator.observe(event.key, event.observations, event.workers)
                for shadow in shadows[event.key]:
                    shadow.follow(event.observations)
    return [shadow.cost for some in shadows.values() for shadow in some]


class _Shadow:
    """A policy that plays along without being heard. policy: None for the estimator's own choice."""

    def __init__(self, context: Context, name: str, seed: int) -> None:
        self.context = context
        space = Space(context.limits, context.buckets)
        self.policy: Policy | None = None if name == ADAPTIVE else make_policy(name, space, seed)
        self.rng = np.random.default_rng(seed)
        self.cost = PolicyCost(name)

    def widen(self, context: Context) -> None:
        """The context has larger limits."""
        self.context = context
        if self.policy is not None:
            self.policy.space.limits, self.policy.space.buckets = context.limits, context.buckets
            self.policy.extend()

    def follow(self, observations: Sequence[StepObservation]) -> None:
        """Count what the policy would have cost in these steps, and let it learn from them."""
        main = self.context.main
        self.cost.num_reported_steps += sum(each.num_steps for each in observations)
        self.cost.reported_s += sum(each.latency_s * each.num_steps for each in observations)
        if not main.times.known:
            return
        rate: FloatArray = main.choice.step_s / main.choice.tokens
        buckets, seen = [], []
        for whole in observations:
            real = typical(whole)
            bucket = int(main.times.bucket_of[real.batch_size])
            length = main.lengths[bucket] if self.policy is None else self.policy.pull(bucket)
            if real.teaches_latency:
                tokens = whole.num_steps + whole.num_accepted / whole.batch_size  # of all its steps
                self.cost.num_steps += whole.num_steps
                self.cost.actual_s += whole.latency_s * whole.num_steps
                self.cost.predicted_s += tokens * float(rate[bucket, real.speculation_length])
                self.cost.policy_raw_s += tokens * float(rate[bucket, length])
            buckets.append(bucket)
            seen.append(self._imagine(real, bucket, length))
        if self.policy is not None:
            self.policy.update(np.array(buckets), seen)

    def _imagine(self, real: StepObservation, bucket: int, length: int) -> StepObservation:
        """The step as it would have been at another length."""
        histogram = list(real.accepted_histogram)
        if length < real.speculation_length:
            histogram = [*histogram[:length], sum(histogram[length:])]
        main = self.context.main
        band = band_of(real.batch_size)
        chances = self.context.mix[band] @ main.acceptance.acceptance[:, band]
        for position in range(real.speculation_length, length):
            passed = int(self.rng.binomial(histogram[-1], float(chances[position])))
            histogram[-1] -= passed
            histogram.append(passed)
        seconds = main.choice.step_s[bucket]
        taken = real.latency_s * float(seconds[length] / seconds[real.speculation_length])
        return real._replace(
            speculation_length=length, latency_s=taken, accepted_histogram=tuple(histogram), by_class=()
        )
