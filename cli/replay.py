"""`speclen replay`: repeat the decisions of a controller from its stored reports."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import typer
from rich.console import Console

from speclen.cli.support.database import DB_OPTION, reading
from speclen.cli.support.output import UserError
from speclen.controller.analysis.replay import ContextAdded, Event, GroupObserved, ProfileImported, Replay
from speclen.controller.analysis.replay import replay as replay_events
from speclen.controller.wire.stored import record_of
from speclen.records import Arm, ContextKey, Limits
from speclen.store.connection import Connection
from speclen.store.queries import context_limits, contexts, decisions, stored_profiles, stored_reports, workers
from speclen.store.schema import ContextRow, DecisionRow

MAX_REPORTS = 200_000  # reports read at once; each takes about 2 kB of memory


def replay(
    db: Path = DB_OPTION,
    newest: int = typer.Option(
        MAX_REPORTS, min=1, metavar="N", help="Replay only the newest N reports; each takes about 2 kB of memory."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Repeat what the controller decided from the stored reports, and compare it with the stored decisions.

    Example: speclen replay --db .speclen/speclen.db
    """
    with reading(db) as connection:
        connection.execute("BEGIN")  # one snapshot, although the controller keeps writing
        known = contexts(connection)
        history = list(events(connection, newest))
        stored = decisions(connection)
    groups = [event for event in history if isinstance(event, GroupObserved)]
    if not groups:
        raise UserError(f"{db} holds no reports: let a worker decode a few steps first")
    result = replay_events(history)
    agreement = compare(result, stored, known)
    # Groups before the first one were deleted by retention or left out, so the replay starts too late to agree exactly.
    num_missing = groups[0].group_id - 1
    changes = dict(sorted(Counter(event.factor for event in result.drift_events).items()))
    if as_json:
        facts = {"num_reports": result.num_reports, "num_missing_groups": num_missing, "changes": changes}
        print(json.dumps(agreement | facts))
        return
    console = Console(markup=False, highlight=False)
    exactly = ", to the last bit" if agreement["exact"] else ""
    console.print(
        f"{result.num_reports} reports in {result.num_groups} groups: {agreement['num_equal']} of {agreement['num_stored']} "
        f"stored decisions came out the same{exactly}."
    )
    if num_missing:
        console.print(
            f"The first {num_missing:,} groups were left out by --newest or are no longer kept: the replay lacks them."
        )
    detected = ", ".join(f"{number} of {factor}" for factor, number in changes.items()) or "none"
    console.print(f"Changes detected: {detected}.")
    console.print(f"Contexts: {', '.join(map(str, result.estimators))}.")


def compare(result: Replay, stored: Sequence[DecisionRow], known: Sequence[ContextRow]) -> dict[str, int]:
    """Compare replayed with stored decisions of the estimator, without those for isolated workers, which are not stored.

    Verdicts of trials are left out: they have a previous arm, but no estimates. exact: every decision is the same, to the
    last bit of its estimates.
    """
    ids = {row.key: row.context_id for row in known}
    again = {
        (after_group_id, ids[of.context], of.batch_min, of.version, str(of.arm), of.ms_per_token)
        for after_group_id, of in result.decisions
        if not of.isolated
    }
    before = {
        (row.after_group_id, row.context_id, row.batch_min, row.decision_version)
        + (str(Arm(row.speculation_length, row.ngram)), row.ms_per_token)
        for row in stored
        if row.previous_speculation_length is None or row.ms_per_token is not None
    }
    numbers = {"num_stored": len(before), "num_replayed": len(again), "num_equal": len(again & before)}
    return numbers | {"exact": again == before}


def events(connection: Connection, max_reports: int = MAX_REPORTS) -> Iterator[Event]:
    """Everything that the controller processed, in order: new and widened contexts, profiles, groups of reports.

    max_reports: only the newest are read. Raises UserError for a row that no controller writes.
    """
    try:
        yield from _events(connection, max_reports)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(
            f"a report in the database is damaged and cannot be read ({error!r}): check the file with `speclen doctor`, "
            "and restore a backup"
        ) from error


def _events(connection: Connection, max_reports: int) -> Iterator[Event]:
    keys = {row.context_id: row.key for row in contexts(connection)}
    names = {worker.worker_key: worker.worker_id for worker in workers(connection)}
    others = deque(_other_events(connection, keys))
    reports = deque(stored_reports(connection), maxlen=max_reports)
    # Contexts commit separately: a group of one may be stored after later groups of another.
    for group_id, members in groupby(sorted(reports, key=attrgetter("group_id")), attrgetter("group_id")):
        group = list(members)
        while others and others[0][0] < group_id:
            yield others.popleft()[2]
        sender = keys[group[0].context_id], names[group[0].worker_key]
        yield GroupObserved(group_id, *sender, tuple(map(record_of, group)))
    for *_, event in others:
        yield event


def _other_events(connection: Connection, keys: dict[int, ContextKey]) -> list[tuple[int, float, Event]]:
    """New and widened contexts, and profiles, each after the id of the group that precedes it and its time, in order."""
    found: list[tuple[int, float, Event]] = []
    for row in context_limits(connection):
        limits = Limits(row.max_batch_size, row.max_speculation_length, row.ngram)
        event = ContextAdded(row.after_group_id, keys[row.context_id], limits, json.loads(row.first_survival))
        found.append((row.after_group_id, row.added_at, event))
    for stored in stored_profiles(connection):
        seeded = ProfileImported(stored.after_group_id, keys[stored.context_id], stored.profile)
        found.append((stored.after_group_id, stored.imported_at, seeded))
    return sorted(found, key=lambda each: each[:2])
