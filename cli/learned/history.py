"""Rows of a database as the values that `explain` and `replay` of speclen.controller.analysis take."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import groupby
from operator import attrgetter

from speclen.cli.learned.tables import is_meant
from speclen.cli.support.errors import UserError
from speclen.controller.analysis.explain import Change
from speclen.controller.analysis.replay import ContextAdded, Event, GroupObserved, ProfileImported
from speclen.controller.wire.stored import record_of
from speclen.records import Arm, ArmEstimate, ContextKey, Limits
from speclen.store.connection import Connection
from speclen.store.queries import (
    arm_estimates,
    context_limits,
    contexts,
    newest_decision,
    stored_profiles,
    stored_reports,
    workers,
)
from speclen.store.records import ContextRow, filled

MAX_REPORTS = 200_000  # the newest that are read at once: as events they take about 2 kB of memory each


def find_context(known: tuple[ContextRow, ...], text: str) -> ContextRow:
    """The context that is meant; without text, the one that changed last. UserError if there is none, or more than one."""
    if not known:
        raise UserError("the database holds no context yet: start a worker with this controller first")
    if not text:
        return max(known, key=attrgetter("updated_at"))
    found = [row for row in known if is_meant(text, row.context_id, str(row.key))]
    names = "; ".join(f"{row.context_id}: {row.key}" for row in known)
    if not found:
        raise UserError(f"no context is called {text!r}; known are {names}")
    if len(found) > 1:
        raise UserError(f"{text!r} matches several contexts; give the number of one with --context: {names}")
    return found[0]


def estimates_of(connection: Connection, context_id: int) -> list[ArmEstimate]:
    """The learned table of a context."""
    return [
        filled(
            ArmEstimate,
            row,
            arm=Arm(row.speculation_length, row.ngram),
            ms_per_token=1e3 * row.step_s / row.expected_tokens,
        )
        for row in arm_estimates(connection, context_id)
    ]


def last_change(connection: Connection, context_id: int, batch_size: int) -> Change | None:
    """The newest change of the choice for a batch size."""
    row = newest_decision(connection, context_id, batch_size)
    if row is None:
        return None
    first = row.previous_speculation_length is None
    previous = None if first else Arm(row.previous_speculation_length or 0, bool(row.previous_ngram))
    when = datetime.fromtimestamp(row.decided_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Change(previous, Arm(row.speculation_length, row.ngram), row.reason, when)


def events(connection: Connection, max_reports: int = MAX_REPORTS) -> Iterator[Event]:
    """Everything that the controller met, in order: contexts made and widened, profiles, groups of reports.

    max_reports: older ones are left out. Raises UserError for a row that no controller writes.
    """
    try:
        yield from _events(connection, max_reports)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(
            f"the reports in the database cannot be read, one of them is damaged ({error!r}): look at the file with "
            "`speclen doctor`, and restore a backup"
        ) from error


def _events(connection: Connection, max_reports: int) -> Iterator[Event]:
    keys = {row.context_id: row.key for row in contexts(connection)}
    names = {worker.worker_key: worker.worker_id for worker in workers(connection)}
    beside = deque(_beside(connection, keys))
    reports = deque(stored_reports(connection), maxlen=max_reports)
    # Pairs of models commit apart: groups of one may be stored after later ones of another.
    for group_id, members in groupby(sorted(reports, key=attrgetter("group_id")), attrgetter("group_id")):
        group = list(members)
        while beside and beside[0][0] < group_id:
            yield beside.popleft()[2]
        whose = keys[group[0].context_id], names[group[0].worker_key]
        yield GroupObserved(group_id, *whose, tuple(map(record_of, group)))
    for *_, event in beside:
        yield event


def _beside(connection: Connection, keys: dict[int, ContextKey]) -> list[tuple[int, float, Event]]:
    """Contexts made and widened, and profiles: each with the last group before it and its time, in order."""
    found: list[tuple[int, float, Event]] = []
    for row in context_limits(connection):
        limits = Limits(row.max_batch_size, row.max_speculation_length, row.ngram)
        found.append((row.after_group_id, row.added_at, ContextAdded(keys[row.context_id], limits)))
    for stored in stored_profiles(connection):
        event = ProfileImported(keys[stored.context_id], stored.profile)
        found.append((stored.after_group_id, stored.imported_at, event))
    return sorted(found, key=lambda each: each[:2])
