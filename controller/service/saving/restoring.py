"""The way back at start: registry and estimator as of the last commits.

Contexts are added, stored profiles seed them, and the estimator's state replaces what follows from these. A state that
cannot be used is set aside as a store event, and its contexts learn again from the newest reports that are kept, in the
groups in which they were learned from.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import structlog

from speclen.controller.estimator import Estimator
from speclen.controller.service.registry import Context, Registry
from speclen.controller.service.saving import rows
from speclen.controller.wire.stored import groups_of, profile_of
from speclen.store import queries
from speclen.store.connection import Connection, FileErrors, connect_reader, in_one_line
from speclen.store.files import note_damage
from speclen.store.queries import stored_profiles
from speclen.store.records import ProfileRow, ReportRow, StoredState, StoreEventRow, WorkerRow

log = structlog.get_logger()

# Reports that are read, the newest: some seconds, and far more than an estimate remembers.
MAX_REPORTS = 100_000


def restore(
    estimator: Estimator, registry: Registry, stored: StoredState, database: Path | None = None
) -> tuple[list[Context], list[StoreEventRow]]:
    """Go on where the stored state stopped; returns contexts that learned anew, and what could not be used."""
    contexts = {
        row.context_id: registry.add_context(Context(row.context_id, row.key, row.limits, row.created_at))
        for row in stored.contexts
    }
    profiles = _profiles_of(contexts, database)
    for context in contexts.values():
        estimator.add_context(context.key, context.limits)
        _seed(estimator, context, profiles)
    forgotten, aside = _restore_states(estimator, list(contexts.values()), stored.states)
    for worker in stored.workers:
        aside += _restore_worker(registry, worker, contexts[worker.context_id])
    for context in forgotten:
        _seed(estimator, context, profiles)
    if forgotten and database is not None:
        _relearn(estimator, forgotten, database)
    return forgotten, aside


def _restore_states(
    estimator: Estimator, contexts: Sequence[Context], states: Mapping[tuple[str, str], bytes]
) -> tuple[list[Context], list[StoreEventRow]]:
    """Give the estimator the state of every pair; returns contexts that are to learn anew, and unusable states."""
    forgotten: list[Context] = []
    aside: list[StoreEventRow] = []
    for pair in dict.fromkeys(context.key.pair for context in contexts):
        members = [context for context in contexts if context.key.pair == pair]
        try:
            estimator.restore(pair, states[pair])
        except Exception as error:  # whatever is stored must not keep a controller from starting
            aside.append(set_aside(f"state of {pair[0]} + {pair[1]}", error, states.get(pair, b"")))
            forgotten += members
            for context in members:
                estimator.start_anew(context.key, "its stored state cannot be used")
    return forgotten, aside


def _profiles_of(contexts: Collection[int], database: Path | None) -> list[ProfileRow]:
    if database is None or not contexts:
        return []
    with closing(connect_reader(database)) as connection:
        return [stored.profile for stored in stored_profiles(connection)]


def _seed(estimator: Estimator, context: Context, profiles: Iterable[ProfileRow]) -> None:
    """Seed a context from its profiles. Those of policies that do not learn are not in the estimator's state."""
    for profile in profiles:
        if profile.context_id == context.context_id:
            estimator.seed_profile(context.key, profile_of(profile))


def _restore_worker(registry: Registry, row: WorkerRow, context: Context) -> list[StoreEventRow]:
    try:
        registry.add_worker(rows.worker_of(row, context))
    except ValueError as error:
        registry.add_worker(rows.worker_of(row._replace(missing_ranges="[]"), context))
        return [set_aside(f"numbers of worker {row.worker_id!r}", error, row.missing_ranges.encode())]
    return []


def set_aside(what: str, error: Exception, content: bytes) -> StoreEventRow:
    """Note that something stored is not used, and keep it."""
    log.error("something stored cannot be used and is set aside", what=what, reason=str(error))
    return StoreEventRow("state_set_aside", 1, f"{what}: {error}", time.time(), content)


def _relearn(estimator: Estimator, contexts: Collection[Context], database: Path) -> None:
    """Teach contexts that were forgotten. Raises StoreError."""
    keys = {context.context_id: context.key for context in contexts}
    with closing(connect_reader(database)) as connection:
        names = {row.worker_key: row.worker_id for row in queries.workers(connection)}
        reports = _readable(connection, keys, database)
    log.info("learning again from the reports that are kept", num_contexts=len(keys), num_reports=len(reports))
    for group in groups_of(reports):
        try:
            estimator.observe(keys[group.context_id], group.steps, names.get(group.worker_key, ""))
        except Exception as error:  # what was stored can be wrong in any way
            log.error("a stored group cannot be learned from", group_id=group.group_id, reason=str(error))


def _readable(connection: Connection, context_ids: Collection[int], database: Path) -> list[ReportRow]:
    """The newest reports of the contexts, oldest first, as far back as they can be read."""
    found: list[ReportRow] = []
    try:
        found.extend(queries.newest_reports(connection, context_ids, MAX_REPORTS))
    except FileErrors as error:
        log.error("older reports cannot be read", num_read=len(found), reason=in_one_line(error))
        note_damage(database)
    return found[::-1]
