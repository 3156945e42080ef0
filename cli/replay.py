"""`speclen replay`: from stored reports, the same decisions again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from speclen.cli.learned.history import MAX_REPORTS, events
from speclen.cli.support.database import DB_OPTION, reading
from speclen.cli.support.errors import UserError
from speclen.controller.analysis.replay import Event, GroupObserved, Replay
from speclen.controller.analysis.replay import replay as replay_events
from speclen.records import Arm
from speclen.store.queries import contexts, decisions
from speclen.store.records import ContextRow, DecisionRow


def replay(
    db: Path = DB_OPTION,
    newest: int = typer.Option(
        MAX_REPORTS, min=1, metavar="N", help="Reports to replay at most, the newest; each takes about 2 kB of memory."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Repeat what the controller decided from the stored reports, and compare it with the stored decisions.

    Example: speclen replay --db .speclen/speclen.db
    """
    with reading(db) as connection:
        connection.execute("BEGIN")  # all of one moment, though the controller goes on
        known = contexts(connection)
        history = list(events(connection, newest))
        stored = decisions(connection)
    if not any(isinstance(event, GroupObserved) for event in history):
        raise UserError(f"{db} holds no reports: let a worker decode a few steps first")
    result = replay_events(history)
    agreement = compare(result, stored, known)
    if as_json:
        facts = {"num_missing_groups": missing_groups(history), "changes": changes_of(result)}
        print(json.dumps(agreement | {"num_reports": result.num_reports} | facts))
    else:
        show(result, agreement, missing_groups(history))


def compare(result: Replay, stored: Sequence[DecisionRow], known: Sequence[ContextRow]) -> dict[str, int]:
    """Compare stored with replayed decisions; those for isolated workers are not stored.

    exact: every decision came out the same, to the last bit of its estimates.
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
    }
    numbers = {"num_stored": len(before), "num_replayed": len(again), "num_equal": len(again & before)}
    return numbers | {"exact": again == before}


def missing_groups(history: Sequence[Event]) -> int:
    """Groups before the first one: deleted by retention, or left out, so the replay starts too late to agree exactly."""
    return next((event.group_id - 1 for event in history if isinstance(event, GroupObserved)), 0)


def changes_of(result: Replay) -> dict[str, int]:
    """Number of drift events by factor."""
    return dict(sorted(Counter(event.factor for event in result.drift_events).items()))


def show(result: Replay, agreement: dict[str, int], num_missing: int) -> None:
    """Agreement in words. num_missing: groups before the first one."""
    console = Console(markup=False, highlight=False)
    console.print(
        f"{result.num_reports} reports in {result.num_groups} groups: {agreement['num_equal']} of {agreement['num_stored']} "
        f"stored decisions came out the same{', to the last bit' if agreement['exact'] else ''}."
    )
    if num_missing:
        console.print(
            f"The first {num_missing:,} groups are left out by --newest, or no longer kept: the replay starts without them."
        )
    changes = ", ".join(f"{number} of {factor}" for factor, number in changes_of(result).items()) or "none"
    console.print(f"Changes detected: {changes}.")
    console.print(f"Contexts: {', '.join(map(str, result.estimator.contexts))}.")
