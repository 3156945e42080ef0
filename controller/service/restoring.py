"""Restoring at the start: registry and estimator as of the last commits.

Contexts are added, stored profiles seed them, and the estimator's stored state replaces what follows from these. A state
that cannot be used is set aside as a store event, and its contexts start again from their profiles.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path

import structlog

from speclen.controller.estimator import Estimators
from speclen.controller.service.guards import Guards
from speclen.controller.service.journal import holds_of, worker_of
from speclen.controller.service.registry import Context, Registry
from speclen.records import Hold, Trial
from speclen.store import queries
from speclen.store.connection import connect_reader
from speclen.store.schema import ProfileRow, StoredState, StoreEventRow, WorkerRow

log = structlog.get_logger()


def restore(
    estimators: Estimators, registry: Registry, stored: StoredState, database: Path
) -> tuple[list[Context], list[StoreEventRow]]:
    """Continue from the stored state. Returns contexts that start from scratch, and events for what could not be used."""
    contexts = {
        row.context_id: registry.add_context(Context(row.context_id, row.key, row.limits, row.created_at))
        for row in stored.contexts
    }
    with closing(connect_reader(database)) as connection:
        profiles = queries.stored_profiles(connection)
    for context in contexts.values():
        estimators.add(context.key, context.limits)
        _seed(estimators, context, profiles)
    forgotten, aside = _restore_states(estimators, contexts, stored.states)
    for worker in stored.workers:
        aside += _restore_worker(registry, worker, contexts[worker.context_id])
    for context in forgotten:
        _seed(estimators, context, profiles)
    return forgotten, aside


def _restore_states(
    estimators: Estimators, contexts: Mapping[int, Context], states: Mapping[int, bytes]
) -> tuple[list[Context], list[StoreEventRow]]:
    """Give the estimator the state of every context. Returns those that start from scratch, and unusable states."""
    forgotten: list[Context] = []
    aside: list[StoreEventRow] = []
    for context_id, context in contexts.items():
        try:
            estimators[context.key].restore(states[context_id])
        except Exception as error:  # no stored value may prevent the controller from starting
            aside.append(set_aside(f"state of {context.key}", error, states.get(context_id, b"")))
            forgotten.append(context)
            estimators.reset(context.key, "its stored state cannot be used")
    return forgotten, aside


def _seed(estimators: Estimators, context: Context, profiles: Iterable[ProfileRow]) -> None:
    """Seed a context from its stored profiles."""
    for row in profiles:
        if row.context_id == context.context_id:
            estimators[context.key].seed(row.profile)


def restore_guards(guards: Guards, registry: Registry, database: Path) -> list[StoreEventRow]:
    """Continue with the verdicts of stored trials and with stored holds. Returns events for what could not be used."""
    contexts = {context.context_id: context for context in registry.contexts.values()}
    aside: list[StoreEventRow] = []
    with closing(connect_reader(database)) as connection:
        trials, held = queries.trials(connection), queries.holds(connection)
    by_context: dict[int, list[Trial]] = {}
    for row in trials:
        by_context.setdefault(row.context_id, []).append(row.trial)
    for context_id, context in contexts.items():
        holds: list[Hold] = []
        for each in held:
            if each.context_id == context_id:
                try:
                    holds = holds_of(each)
                except (ValueError, TypeError) as error:
                    aside.append(set_aside(f"what is held of {context.key}", error, each.holds.encode()))
        guards.restore(context.key, by_context.get(context_id, ()), holds)
    return aside


def _restore_worker(registry: Registry, row: WorkerRow, context: Context) -> list[StoreEventRow]:
    try:
        registry.add_worker(worker_of(row, context))
    except ValueError as error:
        registry.add_worker(worker_of(row._replace(missing_ranges="[]"), context))
        return [set_aside(f"numbers of worker {row.worker_id!r}", error, row.missing_ranges.encode())]
    return []


def set_aside(what: str, error: Exception, content: bytes) -> StoreEventRow:
    """An event that keeps something stored which is not used."""
    log.error("something stored cannot be used and is set aside", what=what, reason=str(error))
    return StoreEventRow("state_set_aside", 1, f"{what}: {error}", time.time(), content)
