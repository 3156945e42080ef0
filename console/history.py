"""What a database remembers, as the values that `explain` and `replay` of speclen.controller.analysis take."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from speclen.console.errors import UserError
from speclen.controller.analysis.explain import Change
from speclen.controller.analysis.replay import ContextAdded, Event, GroupObserved, ProfileImported
from speclen.controller.estimator.core import ContextKey, Limits
from speclen.controller.estimator.estimator import Estimator
from speclen.controller.wire.stored import observation_of, profile_of
from speclen.store.connection import Connection
from speclen.store.profiles import StoredProfile, stored_profiles
from speclen.store.queries import context_limits, contexts, stored_reports, view_rows, workers
from speclen.store.records import ContextRow, StoredState

MOST_NAMED = 20  # workers in one sentence
MAX_REPORTS = 200_000  # the newest that are read at once: as events they take about 2 kB of memory each


def key_of(row: ContextRow) -> ContextKey:
    """The context of a row."""
    return ContextKey(row.target, row.draft, row.device, row.dtype, row.engine_fingerprint)


def limits_of(row: ContextRow) -> Limits:
    """The largest limits of its workers."""
    return Limits(row.max_batch_size, row.max_speculation_length, row.max_copied_tokens)


def name_of(key: ContextKey) -> str:
    """A context in one line."""
    return f"{key.target} + {key.draft or 'no draft'} on {key.device}, {key.dtype}"


def find_context(stored: StoredState, text: str) -> ContextRow:
    """The context whose id is, or whose name contains, the text. UserError if there is none, or more than one.

    Digits alone are an id: the hashes in names may hold any.
    """
    if text.isdecimal():
        found = [row for row in stored.contexts if text == str(row.context_id)]
    else:
        found = [row for row in stored.contexts if text in name_of(key_of(row))]
    known = "; ".join(f"{row.context_id}: {name_of(key_of(row))}" for row in stored.contexts)
    if not stored.contexts:
        raise UserError("the database holds no context yet: start a worker with this controller first")
    if not found:
        raise UserError(f"no context is called {text!r}; known are {known}")
    if len(found) > 1:
        raise UserError(f"{text!r} fits several contexts; give the number of one with --context: {known}")
    return found[0]


def stored_state(stored: StoredState, row: ContextRow) -> dict[str, Any]:
    """The estimator's state of a context. UserError if none was written yet."""
    text = stored.states.get(("context", str(row.context_id)))
    if text is None:
        raise UserError(f"nothing was learned about context {row.context_id} yet: let a worker decode a few steps")
    try:
        state: dict[str, Any] = json.loads(text)
        policy_of(state), bucket_spec(state)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(
            f"what context {row.context_id} learned cannot be read ({error!r}): start a controller on this database "
            "once, which learns it again from the reports kept"
        ) from error
    return state


def bucket_spec(state: dict[str, Any]) -> str:
    """The buckets that a state was learned with, as `speclen.controller.estimator.buckets` reads them."""
    return ",".join(str(end) for end in state["buckets"])


def policy_of(state: dict[str, Any]) -> str:
    """The policy that chose."""
    policy = state["policy"]
    return str(policy[0] if isinstance(policy, list) else policy)


def restored(stored: StoredState, row: ContextRow) -> Estimator:
    """A controller that believes what the database says about one context."""
    state, key = stored_state(stored, row), key_of(row)
    pair = stored.states.get(("pair", json.dumps(key.pair)))
    try:
        estimator = Estimator(bucket_spec(state), policy_of(state))
        estimator.restore(key, limits_of(row), state, None if pair is None else json.loads(pair))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"what context {row.context_id} learned was stored by another version of speclen ({error}): start a "
            "controller on this database once, which learns it again from the reports kept"
        ) from error
    return estimator


def check_worker(stored: StoredState, row: ContextRow, worker_id: str) -> None:
    """Raises UserError naming the workers of a context unless one of them is called so."""
    known = list(dict.fromkeys(worker.worker_id for worker in stored.workers if worker.context_id == row.context_id))
    if worker_id not in known:
        more = f" and {len(known) - MOST_NAMED} more" if len(known) > MOST_NAMED else ""
        raise UserError(
            f"no worker of context {row.context_id} is called {worker_id!r}; known are {', '.join(known[:MOST_NAMED])}{more}"
        )


def last_change(connection: Connection, context_id: int, batch_min: int) -> Change | None:
    """The newest decision about a bucket."""
    for row in reversed(view_rows(connection, "decisions")):
        if (row["context_id"], row["batch_min"]) == (context_id, batch_min):
            when = datetime.fromtimestamp(row["decided_at"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            plans = row.get("previous_plan"), row.get("plan")  # a file of an older version lacks them
            return Change(row["previous_length"], row["speculation_length"], row["reason"], when, *plans)
    return None


def events(connection: Connection, max_reports: int = MAX_REPORTS) -> Iterator[Event]:
    """Everything that the controller met, in order: contexts made and widened, profiles, groups of reports.

    max_reports: older ones are left out, as if they were no longer kept. Raises UserError where a row is none that a
    controller writes.
    """
    try:
        yield from _events(connection, max_reports)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(
            f"the reports in the database cannot be read, one of them is damaged ({error!r}): look at the file with "
            "`speclen doctor`, and restore a backup"
        ) from error


def _events(connection: Connection, max_reports: int) -> Iterator[Event]:
    keys = {row.context_id: key_of(row) for row in contexts(connection)}
    names = {worker.worker_key: worker.worker_id for worker in workers(connection)}
    newest = deque(stored_reports(connection), maxlen=max_reports)
    reports = sorted(newest, key=lambda report: report.group_id)
    groups = [(group_id, list(members)) for group_id, members in groupby(reports, key=lambda report: report.group_id)]
    beside = deque(_beside(connection, [(group_id, group[0].received_at) for group_id, group in groups]))
    for group_id, group in groups:
        while beside and beside[0][0] < group_id:
            yield beside.popleft()[2]
        senders = [names[report.worker_key] for report in group]
        yield GroupObserved(group_id, keys[group[0].context_id], senders, [observation_of(report) for report in group])
    for *_, event in beside:
        yield event


def _beside(connection: Connection, groups: list[tuple[int, float]]) -> list[tuple[int, float, Event]]:
    """Contexts made and widened, and profiles: each with the last group before it and its time, in order.

    groups: id and time of each group of reports.
    """
    rows = {row.context_id: row for row in contexts(connection)}
    found: list[tuple[int, float, Event]] = []
    limits = context_limits(connection)
    for made in limits:
        wanted = Limits(made.max_batch_size, made.max_speculation_length, made.max_copied_tokens)
        found.append((made.after_group_id, made.added_at, ContextAdded(key_of(rows[made.context_id]), wanted)))
    for context_id in rows.keys() - {
        made.context_id for made in limits
    }:  # of an older version, which kept the last ones
        row = rows[context_id]
        before = max((group_id for group_id, at in groups if at < row.created_at), default=0)
        found.append((before, row.created_at, ContextAdded(key_of(row), limits_of(row))))
    for stored in stored_profiles(connection):
        found.append((stored.profile.after_group_id, stored.profile.imported_at, _imported(stored)))
    return sorted(found, key=lambda each: each[:2])


def _imported(stored: StoredProfile) -> ProfileImported:
    return ProfileImported(key_of(stored.context), profile_of(stored.profile))
