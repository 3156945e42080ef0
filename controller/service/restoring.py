"""The way back at start: registry and estimator as of the last commits.

A state that cannot be used is set aside as a store event, and its contexts learn again: from the stored profiles, then from
the newest reports that are kept, in the groups in which they were learned from.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

import structlog

from speclen.controller.estimator import Estimator
from speclen.controller.service import rows
from speclen.controller.service.registry import Context, Registry
from speclen.controller.wire.stored import StoredGroup, groups_of, profile_of
from speclen.records import ContextKey, Limits
from speclen.store import queries
from speclen.store.connection import Connection, FileErrors, connect_reader, in_one_line
from speclen.store.files import note_damage
from speclen.store.profiles import stored_profiles
from speclen.store.records import ContextRow, ReportRow, StoredState, StoreEventRow, WorkerRow

log = structlog.get_logger()

# Reports that are read, the newest: some seconds, and far more than an estimate remembers.
MAX_REPORTS = 100_000


def restore(estimator: Estimator, registry: Registry, stored: StoredState) -> tuple[list[Context], list[StoreEventRow]]:
    """Go on where the stored state stopped; returns contexts that are to learn again, and what could not be used."""
    aside: list[StoreEventRow] = []
    for pair, state in stored.states.items():
        try:
            estimator.restore(pair, state)
        except Exception as error:  # whatever is stored must not keep a controller from starting
            aside.append(set_aside(f"state of {pair[0]} + {pair[1]}", error, state))
    contexts = {row.context_id: _restored_context(registry, row) for row in stored.contexts}
    forgotten = [context for context in contexts.values() if not estimator.knows(context.key)]
    for context in contexts.values():
        estimator.add_context(context.key, context.limits)
    for worker in stored.workers:
        aside += _restore_worker(registry, worker, contexts[worker.context_id])
    return forgotten, aside


def _restored_context(registry: Registry, row: ContextRow) -> Context:
    key = ContextKey(*(getattr(row, name) for name in ContextKey._fields))
    limits = Limits(row.max_batch_size, row.max_speculation_length, row.ngram)
    return registry.add_context(Context(row.context_id, key, limits, row.created_at))


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


def relearn(estimator: Estimator, contexts: Collection[Context], database: Path) -> int:
    """Teach contexts that were forgotten; returns the number of reports that did. Raises StoreError."""
    keys = {context.context_id: context.key for context in contexts}
    connection = connect_reader(database)
    try:
        names = {row.worker_key: row.worker_id for row in queries.workers(connection)}
        for stored in stored_profiles(connection):
            if stored.profile.context_id in keys:
                estimator.seed_profile(keys[stored.profile.context_id], profile_of(stored.profile))
        reports = _readable(connection, keys, database)
    finally:
        connection.close()
    log.info("learning again from the reports that are kept", num_contexts=len(keys), num_reports=len(reports))
    return sum(_observe(estimator, keys, group, names) for group in groups_of(reports))


def _readable(connection: Connection, context_ids: Collection[int], database: Path) -> list[ReportRow]:
    """The newest reports of the contexts, oldest first, as far back as they can be read."""
    found: list[ReportRow] = []
    try:
        found.extend(queries.newest_reports(connection, context_ids, MAX_REPORTS))
    except FileErrors as error:
        log.error("older reports cannot be read", num_read=len(found), reason=in_one_line(error))
        note_damage(database)
    return found[::-1]


def _observe(estimator: Estimator, keys: dict[int, ContextKey], group: StoredGroup, names: dict[int, str]) -> int:
    try:
        estimator.observe(keys[group.context_id], group.steps, names.get(group.worker_key, ""))
    except Exception as error:  # what was stored can be wrong in any way
        log.error("a stored group cannot be learned from", group_id=group.group_id, reason=str(error))
        return 0
    return len(group.steps)
