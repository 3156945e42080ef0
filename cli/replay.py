"""`speclen replay`: from stored reports, the same decisions again, and what other policies would have cost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from speclen.console.database import DB_OPTION, reading
from speclen.console.errors import UserError
from speclen.console.history import MAX_REPORTS, events, key_of, name_of, policy_of, stored_state
from speclen.controller.analysis.accuracy import Spread, spread
from speclen.controller.analysis.replay import Event, GroupObserved, PolicyCost, Replay, cost_of
from speclen.controller.analysis.replay import replay as replay_events
from speclen.controller.estimator.policies import is_policy
from speclen.store.queries import load_state, view_rows
from speclen.store.records import StoredState

COMPARED = "adaptive,profile,fixed:1,fixed:2,fixed:4,none"


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far replayed and stored decisions agree. first_difference: in words, "" if there is none."""

    num_stored: int
    num_replayed: int
    num_equal: int
    first_difference: str

    @property
    def exact(self) -> bool:
        """Every decision came out the same, to the last bit of its estimates."""
        return self.num_stored == self.num_replayed == self.num_equal


def replay(
    db: Path = DB_OPTION,
    policies: str = typer.Option(COMPARED, help="Policies to estimate the cost of, separated by commas; '' for none."),
    seed: int = typer.Option(0, help="Seed of the controller, and of policies that draw."),
    newest: int = typer.Option(
        MAX_REPORTS, min=1, metavar="N", help="Reports to replay at most, the newest; each takes about 2 kB of memory."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Repeat what the controller decided from the stored reports, and estimate what other policies would have cost.

    Example: speclen replay --db .speclen/speclen.db --policies profile,fixed:3,none
    """
    names = [name.strip() for name in policies.split(",") if name.strip()]
    for name in names:
        if not is_policy(name):
            raise UserError(f"policy {name!r} is unknown: see `speclen controller --help`")
    with reading(db) as connection:
        connection.execute("BEGIN")  # all of one moment, though the controller goes on
        stored = load_state(connection)
        history = list(events(connection, newest))
        num_kept = connection.execute("SELECT count(*) FROM step_reports").fetchone()[0]
        decisions = view_rows(connection, "decisions")
    if not any(isinstance(event, GroupObserved) for event in history):
        raise UserError(f"{db} holds no reports: let a worker decode a few steps first")
    state = stored_state(stored, next(row for row in stored.contexts))
    result = replay_events(history, policy_of(state), seed)
    agreement = compare(result, decisions, stored)
    num_left_out = max(0, num_kept - newest)
    again = track(history, "Estimating costs", console=Console(stderr=True))
    costs = cost_of(again, names, seed) if names else []
    if as_json:
        document = asdict(agreement) | {"exact": agreement.exact, "num_reports": result.num_reports}
        document["num_left_out"] = num_left_out
        document["accuracy"] = {name: each and asdict(each) for name, each in told_beforehand(result).items()}
        document["changes"] = changes_found(result)
        document["costs"] = [asdict(cost) | {"policy_s": cost.policy_s, "ratio": cost.ratio} for cost in costs]
        print(json.dumps(document))
    else:
        show(result, agreement, costs, missing_groups(history), num_left_out)


def compare(result: Replay, stored_decisions: Sequence[dict[str, Any]], stored: StoredState) -> Agreement:
    """Stored against replayed decisions, in order; none are stored of workers that were set apart."""
    ids = {key_of(row): row.context_id for row in stored.contexts}
    again = [
        (
            *(each.after_group_id, ids[each.decision.context], each.decision.bucket.batch_min),
            *(each.decision.version, each.decision.speculation_length, each.decision.ms_per_token),
            None if each.decision.plan is None else str(each.decision.plan),
        )
        for each in result.decisions
        if each.decision.of_all
    ]
    columns = (
        "after_group_id",
        "context_id",
        "batch_min",
        "decision_version",
        "speculation_length",
        "ms_per_token",
        "plan",
    )
    before = [tuple(row.get(column) for column in columns) for row in stored_decisions]
    again.sort(key=lambda values: values[:4])
    before.sort(key=lambda values: values[:4])
    equal = len(set(again) & set(before))
    different = next((pair for pair in zip(before, again, strict=False) if pair[0] != pair[1]), None)
    words = ""
    if different is not None:
        old, new = (dict(zip(columns, values, strict=True)) for values in different)
        words = f"stored {old}, replayed {new}"
    return Agreement(len(before), len(again), equal, words)


def missing_groups(history: Sequence[Event]) -> int:
    """Groups before the first one: deleted by retention, or left out, so the replay starts too late to agree exactly."""
    return next((event.group_id - 1 for event in history if isinstance(event, GroupObserved)), 0)


def told_beforehand(result: Replay) -> dict[str, Spread | None]:
    """Errors of step times relative to each other: of cells (batch sizes x length) seen before, and of new ones."""
    return {"seen before": spread(result.accuracy.later), "new": spread(result.accuracy.first)}


def changes_found(result: Replay) -> dict[str, int]:
    """How often a change was said, by factor."""
    return dict(sorted(Counter(event.factor for event in result.drift_events).items()))


def foresight(result: Replay) -> str:
    """How well step times were told beforehand, and how often a change was said."""
    told = [
        f"of cells {name} half within {each.median_percent:.1f}%, nine tenths within {each.p90_percent:.1f}%"
        for name, each in told_beforehand(result).items()
        if each is not None
    ]
    changes = ", ".join(f"{number} of {factor}" for factor, number in changes_found(result).items()) or "none"
    return (
        f"Step times relative to each other, as told beforehand: {'; '.join(told) or 'none'}. Changes found: {changes}."
    )


def compared(costs: Sequence[PolicyCost]) -> str:
    """Which part of what was reported the costs are of."""
    steps = sum(each.num_steps for each in costs) / max(sum(each.num_reported_steps for each in costs), 1)
    seconds = sum(each.actual_s for each in costs) / (sum(each.reported_s for each in costs) or 1.0)
    others = "; the others copied, did more than decode, or came before anything was known" if steps < 1.0 else ""
    return f"{100 * steps:.3g}% of the reported steps ({100 * seconds:.3g}% of their time{others})"


def show(result: Replay, agreement: Agreement, costs: list[PolicyCost], num_missing: int, num_left_out: int) -> None:
    """Agreement in words, costs as a table. num_missing: groups; num_left_out: reports that --newest left out."""
    console = Console()
    console.print(
        f"{result.num_reports} reports in {result.num_groups} groups: {agreement.num_equal} of {agreement.num_stored} "
        f"stored decisions came out the same{', to the last bit' if agreement.exact else ''}."
    )
    if num_left_out:
        console.print(
            f"The {num_left_out:,} oldest reports are left out, so the replay starts without what they taught: "
            "--newest takes more, with 2 kB of memory each."
        )
    elif num_missing:
        console.print(
            f"The first {num_missing} groups are no longer kept, so the replay starts without what they taught."
        )
    if agreement.first_difference:
        console.print(f"First difference: {agreement.first_difference}.")
    console.print(foresight(result))
    if not costs:
        return
    console.print(f"Time for the tokens that were generated in {compared(costs)}, by the estimates:")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("policy", "seconds", "of the actual"):
        table.add_column(heading, justify="right")
    for cost in costs:
        table.add_row(cost.policy, f"{cost.policy_s:.1f}", f"{100 * cost.ratio:.1f}%")
    console.print(table)
    contexts = ", ".join(name_of(key) for key in result.estimator.contexts)
    console.print(f"Contexts: {contexts}.")
