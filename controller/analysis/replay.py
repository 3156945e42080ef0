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
    """A worker registered that was the first of this context or had larger limits."""

    key: ContextKey
    limits: Limits


class ProfileImported(NamedTuple):
    """A profile seeded a context."""

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
    """The estimators after the events. decisions: each after the id of the last group learned from; 0: none."""

    estimators: Estimators
    decisions: list[tuple[int, Decision]] = field(default_factory=list)
    drift_events: list[DriftEvent] = field(default_factory=list)
    num_groups: int = 0
    num_reports: int = 0


def replay(events: Iterable[Event]) -> Replay:
    """Feed events to a new estimator. Raises KeyError if a context reports before it was added."""
    result = Replay(Estimators())
    last_group_id = 0
    for event in events:
        match event:
            case ContextAdded():
                decisions = result.estimators.add(event.key, event.limits)
            case ProfileImported():
                decisions = result.estimators[event.key].seed(event.profile)
            case GroupObserved():
                outcome = result.estimators[event.key].observe(event.steps, event.worker_id)
                decisions = outcome.decisions
                result.drift_events += outcome.drift_events
                result.num_groups += 1
                result.num_reports += len(event.steps)
                last_group_id = event.group_id
        result.decisions += [(last_group_id, decision) for decision in decisions]
    return result
