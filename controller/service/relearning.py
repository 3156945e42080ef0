"""What a context learned before its stored state became unusable, taught again at start by the reports that are kept.

The profiles come first, then the newest reports in the groups in which they were learned from. Older ones have faded from
every estimate by then anyway.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import structlog

from speclen.controller.estimator.estimator import Estimator
from speclen.controller.service.registry import RegisteredContext
from speclen.controller.wire.stored import observation_of, profile_of
from speclen.store import queries
from speclen.store.connection import Connection, connect_reader
from speclen.store.profiles import stored_profiles
from speclen.store.records import ReportRow

log = structlog.get_logger()

# Reports of one context that are read, the newest: some seconds, and far more than an estimate remembers.
MOST_REPORTS = 100_000
# Seconds between two lines of progress.
PROGRESS_S = 2.0


def relearn(estimator: Estimator, contexts: Iterable[RegisteredContext], database: Path) -> int:
    """Teach contexts that know nothing; returns how many reports did. Raises StoreError."""
    connection = connect_reader(database)
    try:
        names = {row.worker_key: row.worker_id for row in queries.workers(connection)}
        reported = queries.contexts_with_reports(connection)
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


def _relearn_one(
    estimator: Estimator, context: RegisteredContext, connection: Connection, names: dict[int, str], most: int
) -> int:
    """most: reports that are read."""
    for stored in stored_profiles(connection):
        if stored.profile.context_id == context.context_id:
            estimator.seed_profile(context.key, profile_of(stored.profile))
    reports = queries.newest_reports(connection, context.context_id, most)
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
    except (ValueError, KeyError, TypeError) as error:
        log.error("a stored group cannot be learned from", group_id=group[0].group_id, reason=str(error))
        return 0
    return len(group)
