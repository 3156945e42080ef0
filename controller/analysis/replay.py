"""Replay of the estimator's decisions from a database. Verdicts of trials, holds and resets are not replayed.

Events are plain values in the order in which a controller met them; the caller reads them from a database.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from speclen.controller.estimator import Estimators
from speclen.records import ContextKey, Decision, DriftEvent, Limits, Profile, StepRecord


class ContextAdded(NamedTuple):
    """A worker registered that was the first of this context or had larger limits. first_survival: see `Estimators.add`."""

    after_group_id: int
    key: ContextKey
    limits: Limits
    first_survival: Sequence[float]


class ProfileImported(NamedTuple):
    """A profile seeded a context."""

    after_group_id: int
    key: ContextKey
    profile: Profile


class GroupObserved(NamedTuple):
    """Consecutive steps of one worker, learned from in one call."""

    group_id: int
    key: ContextKey
    worker_id: str
    steps: Sequence[StepRecord]


Event = ContextAdded | ProfileImported | GroupObserved


@dataclass(slots=True)
class Replay:
    """The estimators after the events. decisions: pairs of the last group's id (0: none yet) and the decision.

    After a crash that group may be missing from the events, if it was of another context.
    """

    estimators: Estimators
    decisions: list[tuple[int, Decision]] = field(default_factory=list)
    drift_events: list[DriftEvent] = field(default_factory=list)
    num_groups: int = 0
    num_reports: int = 0


def replay(events: Iterable[Event]) -> Replay:
    """Feed events to a new estimator. Raises KeyError if a context reports before it was added."""
    result = Replay(Estimators())
    for event in events:
        match event:
            case ContextAdded():
                decisions = result.estimators.add(event.key, event.limits, event.first_survival)
            case ProfileImported():
                decisions = result.estimators[event.key].seed(event.profile)
            case GroupObserved():
                outcome = result.estimators[event.key].observe(event.steps, event.worker_id)
                decisions = outcome.decisions
                result.drift_events += outcome.drift_events
                result.num_groups += 1
                result.num_reports += len(event.steps)
        after_group_id = event.group_id if isinstance(event, GroupObserved) else event.after_group_id
        result.decisions += [(after_group_id, decision) for decision in decisions]
    return result
