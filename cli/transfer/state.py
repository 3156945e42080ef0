"""Learned state as a JSON document: made from a database, checked, and made into a commit for another.

The unit is a pair of models with all its contexts, as the estimator saves it.
"""

from __future__ import annotations

import base64
import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

from speclen.cli.support.errors import UserError
from speclen.store import queries
from speclen.store.connection import Connection
from speclen.store.database import Store
from speclen.store.records import (
    AcceptanceRow,
    ArmEstimateRow,
    Commit,
    ContextLimitsRow,
    ContextRow,
    StateRow,
    StoredState,
)

FORMAT = "speclen learned state"
VERSION = 2

Document = dict[str, Any]


def exported(connection: Connection, wanted: str) -> Document:
    """One moment of a database as a document. wanted: part of a context's name. Raises UserError if nothing matches."""
    connection.execute("BEGIN")  # one snapshot for all queries
    stored = queries.load_state(connection)
    pairs = sorted({row.key.pair for row in stored.contexts if wanted in str(row.key)} & stored.states.keys())
    if not pairs:
        raise UserError(f"no context contains {wanted!r}" if wanted else "nothing was learned yet: there is no context")
    document = {"format": FORMAT, "version": VERSION, "exported_at": time.time()}
    return document | {"pairs": [_pair(connection, stored, pair) for pair in pairs]}


def _pair(connection: Connection, stored: StoredState, pair: tuple[str, str]) -> Document:
    contexts = [
        row._asdict()
        | {"arm_estimates": [each._asdict() for each in queries.arm_estimates(connection, row.context_id)]}
        for row in stored.contexts
        if row.key.pair == pair
    ]
    return {
        "target": pair[0],
        "draft": pair[1],
        "state": base64.b64encode(stored.states[pair]).decode(),
        "acceptance": [row._asdict() for row in queries.acceptance(connection, *pair)],
        "contexts": contexts,
    }


def read_document(file: Path) -> Document:
    """The content of a file that `export` wrote. Raises UserError."""
    try:
        document = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}): it must be a file that `speclen export` wrote") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UserError(f"{file} is not a file that `speclen export` wrote")
    if document.get("version") != VERSION:
        found = document.get("version")
        raise UserError(f"{file} has version {found!r}, this speclen reads {VERSION}: export it with the same version")
    return document


def check_usable(document: Document) -> None:
    """Raises ValueError, KeyError or TypeError unless a controller could go on from the document."""
    from speclen.controller.estimator import Estimator

    for pair in document["pairs"]:
        estimator = Estimator()
        for row in map(context_row, pair["contexts"]):
            estimator.add_context(row.key, row.limits)
        estimator.restore((pair["target"], pair["draft"]), base64.b64decode(pair["state"]))


def context_row(values: Document) -> ContextRow:
    return ContextRow(*(values[name] for name in ContextRow._fields))


def commit_of(document: Document, stored: StoredState, replace_known: bool) -> Commit:
    """The commit that adds the document to a database. Raises UserError for a known pair that is not to be replaced."""
    now = time.time()
    known = {row.key: row.context_id for row in stored.contexts}
    ids = itertools.count(max(known.values(), default=0) + 1)
    contexts, estimates, limits, states, acceptance, replaced = [], [], [], [], [], []
    for values in document["pairs"]:
        pair = (values["target"], values["draft"])
        if pair in stored.states and not replace_known:
            raise UserError(f"{' + '.join(pair)} is known here already: give --replace to overwrite what was learned")
        replaced += [context_id for key, context_id in known.items() if key.pair == pair]
        states.append(StateRow(*pair, base64.b64decode(values["state"]), now))
        acceptance += [AcceptanceRow(**row) for row in values["acceptance"]]
        for content in values["contexts"]:
            row = context_row(content)
            row = row._replace(context_id=known.get(row.key) or next(ids), updated_at=now)
            contexts.append(row)
            limits.append(ContextLimitsRow(row.context_id, *row.limits, stored.last_group_id, now))
            estimates += [ArmEstimateRow(**{**each, "context_id": row.context_id}) for each in content["arm_estimates"]]
    return Commit(
        contexts=contexts,
        arm_estimates=estimates,
        states=states,
        acceptance=acceptance,
        replaced_contexts=replaced,
        context_limits=limits,
    )


def store_now(store: Store, commit: Commit) -> None:
    """Wait until the commit is on the disk. Raises UserError if it cannot be."""
    done, outcome = threading.Event(), []

    def on_done(error: Exception | None) -> None:
        outcome.append(error)
        done.set()

    store.submit(commit, on_done)
    if not done.wait(30.0):
        raise UserError(f"the database did not take the state within 30 s: {store.health().detail}")
    if outcome[0] is not None:
        raise UserError(f"the state cannot be stored: {outcome[0]}")
    if store.health().num_rows_refused:
        raise UserError("some rows of the file break the rules of the database and were left out: export it again")
