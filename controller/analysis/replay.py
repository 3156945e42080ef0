"""Replay of a database: the same events give the same decisions, and show what another policy would have cost.

Events are plain values in the order in which a controller met them; the caller reads them from a database.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from speclen.controller.estimator import Estimator
from speclen.records import Arm, ContextKey, Decision, DriftEvent, Limits, Profile, StepRecord

ADAPTIVE = "adaptive"


class ContextAdded(NamedTuple):
    """A worker of this context registered, the first one or one with larger limits."""

    key: ContextKey
    limits: Limits


class ProfileImported(NamedTuple):
    """A profile seeded a context."""

    key: ContextKey
    profile: Profile


class GroupObserved(NamedTuple):
    """Consecutive steps of one worker that were learned from in one call."""

    group_id: int
    key: ContextKey
    worker_id: str
    steps: Sequence[StepRecord]


Event = ContextAdded | ProfileImported | GroupObserved


class ReplayedDecision(NamedTuple):
    """A decision, and the last group that was learned from before it (0: none)."""

    after_group_id: int
    decision: Decision


@dataclass(slots=True)
class Replay:
    """The estimator after the events, and everything that it decided."""

    estimator: Estimator
    decisions: list[ReplayedDecision] = field(default_factory=list)
    drift_events: list[DriftEvent] = field(default_factory=list)
    num_groups: int = 0
    num_reports: int = 0


def replay(events: Iterable[Event], policy: str = ADAPTIVE) -> Replay:
    """Give the events to a fresh estimator. Raises KeyError if a context reports before it was added."""
    result = Replay(Estimator(policy))
    last_group_id = 0
    for event in events:
        match event:
            case ContextAdded():
                decisions = result.estimator.add_context(event.key, event.limits)
            case ProfileImported():
                decisions = result.estimator.seed_profile(event.key, event.profile)
            case GroupObserved():
                outcome = result.estimator.observe(event.key, event.steps, event.worker_id)
                decisions = outcome.decisions
                result.drift_events += outcome.drift_events
                result.num_groups += 1
                result.num_reports += len(event.steps)
                last_group_id = event.group_id
        result.decisions += [ReplayedDecision(last_group_id, decision) for decision in decisions]
    return result


@dataclass(slots=True)
class PolicyCost:
    """Estimated time of a policy for the tokens that were generated.

    num_steps, actual_s: usable samples and the time they took. predicted_s: expected for the arms that were used; policy_s:
    expected for those of the policy.
    """

    policy: str
    num_steps: int = 0
    actual_s: float = 0.0
    predicted_s: float = 0.0
    policy_s: float = 0.0

    @property
    def ratio(self) -> float:
        """Estimated time over the time it took; below 1 the policy would have been faster."""
        return self.policy_s / self.predicted_s if self.predicted_s else 1.0


def cost_of(events: Sequence[Event], result: Replay, policies: Sequence[str]) -> list[PolicyCost]:
    """Costs of other policies, by the estimates at the end of a replay. Adaptive: the table at that moment."""
    seeds = [event for event in events if not isinstance(event, GroupObserved)]
    expected = {key: _expected_ms(result.estimator, key) for key in result.estimator.contexts}
    costs = []
    for policy in policies:
        estimator = result.estimator if policy == ADAPTIVE else replay(seeds, policy).estimator
        tables = {key: estimator.table(key) for key in estimator.contexts}
        cost = PolicyCost(policy)
        for event in events:
            if isinstance(event, GroupObserved):
                for step in event.steps:
                    _add_step(cost, step, tables[event.key].arm_for(step.batch_size), expected[event.key])
        costs.append(cost)
    return costs


def _expected_ms(estimator: Estimator, key: ContextKey) -> dict[tuple[int, Arm], float]:
    """Milliseconds per token by batch size and arm."""
    return {
        (size, row.arm): row.ms_per_token
        for row in estimator.rows(key)
        for size in range(row.batch_min, row.batch_max + 1)
    }


def _add_step(cost: PolicyCost, step: StepRecord, arm: Arm, expected_ms: dict[tuple[int, Arm], float]) -> None:
    used, other = expected_ms.get((step.batch_size, step.arm)), expected_ms.get((step.batch_size, arm))
    if step.flags or used is None or other is None:
        return
    tokens = step.tokens_per_sequence
    cost.num_steps += 1
    cost.actual_s += step.latency_s
    cost.predicted_s += 1e-3 * tokens * used
    cost.policy_s += 1e-3 * tokens * other
