"""What a context learned before its stored state became unusable, taught again at start by the reports that are kept.

The profiles come first, then the newest reports in the groups in which they were learned from. Older ones have faded from
every estimate by then anyway. Where a part of them lies on a damaged page, what can be read teaches alone.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import structlog

from speclen.controller.estimator.estimator import Estimator
from speclen.controller.service.registry import RegisteredContext
from speclen.controller.wire.stored import observation_of, profile_of
from speclen.store import queries
from speclen.store.connection import Connection, FileErrors, connect_reader, in_one_line
from speclen.store.files import note_damage
from speclen.store.profiles import stored_profiles
from speclen.store.records import ReportRow

log = structlog.get_logger()

# Reports of one context that are read, the newest: some seconds, and far more than an estimate remembers.
MOST_REPORTS = 100_000
# Seconds between two lines of progress.
PROGRESS_S = 2.0


def relearn(estimator: Estimator, contexts: Collection[RegisteredContext], database: Path) -> int:
    """Teach contexts that know nothing; returns how many reports did. Raises StoreError."""
    connection = connect_reader(database)
    try:
        names = {row.worker_key: row.worker_id for row in queries.workers(connection)}
        reported = _reported(connection, contexts, database)
        return sum(
            _relearn_one(estimator, each, connection, names, MOST_REPORTS * (each.context_id in reported))
            for each in contexts
        )
    finally:
        connection.close()


def seed_policies(estimator: Estimator, contexts: Iterable[RegisteredContext], database: Path) -> None:
    """Give policies that choose in the estimator's stead the profiles that are stored. Raises StoreError.

    They were imported when another policy chose, or before the controller was started again.
    """
    of = {context.context_id: context.key for context in contexts}
    connection = connect_reader(database)
    try:
        for stored in stored_profiles(connection):
            if stored.profile.context_id in of:
                estimator.seed_policy(of[stored.profile.context_id], profile_of(stored.profile))
    finally:
        connection.close()


def _reported(connection: Connection, contexts: Iterable[RegisteredContext], database: Path) -> set[int]:
    """Contexts of which reports are kept; all, where not all reports can be read."""
    try:
        return queries.contexts_with_reports(connection)
    except FileErrors as error:
        log.error("not all reports that are kept can be read", reason=in_one_line(error), advice="speclen doctor")
        note_damage(database)
        return {context.context_id for context in contexts}


def _readable(connection: Connection, context_id: int, most: int) -> list[ReportRow]:
    """The newest reports of a context, oldest first, as far back as they can be read."""
    found: list[ReportRow] = []
    try:
        found.extend(queries.newest_reports(connection, context_id, most))
    except FileErrors as error:
        reason = in_one_line(error)
        log.error("older reports cannot be read", context=context_id, num_read=len(found), reason=reason)
    return found[::-1]


def _relearn_one(
    estimator: Estimator, context: RegisteredContext, connection: Connection, names: dict[int, str], most: int
) -> int:
    """most: reports that are read."""
    for stored in stored_profiles(connection):
        if stored.profile.context_id == context.context_id:
            estimator.seed_profile(context.key, profile_of(stored.profile))
    reports = _readable(connection, context.context_id, most)
    log.info("learning again from the reports that are kept", context=context.context_id, num_reports=len(reports))
    done, told_at = 0, time.monotonic()
    for _, members in groupby(reports, key=attrgetter("group_id")):
        done += _observe(estimator, context, list(members), names)
        if time.monotonic() - told_at > PROGRESS_S:
            log.info("learning again", context=context.context_id, done=done, of=len(reports))
            told_at = time.monotonic()
    return done


def _observe(estimator: Estimator, context: RegisteredContext, group: list[ReportRow], names: dict[int, str]) -> int:
    """A group that breaks a rule of today teaches nothing, and is told."""
    senders = [names.get(report.worker_key, "") for report in group]
    try:
        estimator.observe(context.key, [observation_of(report) for report in group], senders)
    except Exception as error:  # what was stored can be wrong in any way, and must not keep a controller from starting
        log.error("a stored group cannot be learned from", group_id=group[0].group_id, reason=str(error))
        return 0
    return len(group)
