"""Learned state as a JSON document: made from a database, checked, and made into a commit for another."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from speclen.console.errors import UserError
from speclen.store import queries
from speclen.store.connection import Connection
from speclen.store.database import Store
from speclen.store.records import AcceptanceRow, Commit, ContextRow, LatencyCellRow, StateRow, StoredState

FORMAT = "speclen learned state"
VERSION = 1
KEY = ("target", "draft", "device", "dtype", "engine_fingerprint")
CONTEXT_COLUMNS = [field.name for field in fields(ContextRow)]


def exported(connection: Connection, wanted: str) -> dict[str, Any]:
    """One moment of a database as a document. Raises UserError if nothing matches."""
    connection.execute("BEGIN")  # one snapshot for all queries
    stored = queries.load_state(connection)
    contexts = [row for row in stored.contexts if any(wanted in getattr(row, name) for name in KEY)]
    if not contexts:
        raise UserError(f"no context contains {wanted!r}" if wanted else "nothing was learned yet: there is no context")
    pairs = sorted({(row.target, row.draft) for row in contexts})
    return {
        "format": FORMAT,
        "version": VERSION,
        "exported_at": time.time(),
        "contexts": [
            {
                **asdict(row),
                "state": _state(stored, "context", str(row.context_id)),
                "latency_cells": [asdict(cell) for cell in queries.latency_cells(connection, row.context_id)],
            }
            for row in contexts
        ],
        "pairs": [
            {
                "target": target,
                "draft": draft,
                "state": _state(stored, "pair", json.dumps((target, draft))),
                "acceptance": [asdict(row) for row in queries.acceptance(connection, target, draft)],
            }
            for target, draft in pairs
        ],
    }


def _state(stored: StoredState, scope: str, key: str) -> Any:
    text = stored.states.get((scope, key))
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise UserError(
            f"what {scope} {key} learned cannot be read ({error}): start a controller on this database once, which learns "
            "it again from the reports kept"
        ) from error


def read_document(file: Path) -> dict[str, Any]:
    """The content of a file that `export` wrote. Raises UserError."""
    try:
        document = json.loads(file.read_text())
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}): it must be a file that `speclen export` wrote") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UserError(f"{file} is not a file that `speclen export` wrote")
    if document.get("version") != VERSION:
        raise UserError(
            f"{file} has version {document.get('version')!r}, this speclen reads {VERSION}: upgrade speclen"
        )
    return document


def check_usable(file: Path, document: dict[str, Any]) -> None:
    """Raises UserError unless a controller could go on from the document, so that no controller fails at its start."""
    from speclen.controller.estimator.core import ContextKey, Limits
    from speclen.controller.estimator.estimator import Estimator

    try:
        pairs = {(pair["target"], pair["draft"]): pair["state"] for pair in document["pairs"]}
        estimator = Estimator()
        for context in document["contexts"]:
            key = ContextKey(*(context[name] for name in KEY))
            copied = context.get("max_copied_tokens", 0)
            limits = Limits(context["max_batch_size"], context["max_speculation_length"], copied)
            estimator.restore(key, limits, context["state"], pairs[key.pair])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(file, error) from error


def damaged(file: Path, error: Exception) -> UserError:
    return UserError(f"{file} is damaged ({error!r}): export it again")


def commit_of(
    document: dict[str, Any], stored: StoredState, replace_known: bool
) -> tuple[Commit, list[dict[str, Any]]]:
    """The commit that adds the document to what is stored, and the pairs that keep their own acceptance.

    Raises UserError if a context is known already and is not to be replaced.
    """
    now = time.time()
    known = {key_of(asdict(row)): row.context_id for row in stored.contexts}
    next_id = max(known.values(), default=0) + 1
    contexts, cells, states, replaced = [], [], [], []
    for values in document["contexts"]:
        context_id = known.get(key_of(values))
        if context_id is None:
            context_id, next_id = next_id, next_id + 1
        elif replace_known:
            replaced.append(context_id)
        else:
            raise UserError(f"{' | '.join(key_of(values))} is known here already: give --replace to overwrite it")
        columns = {name: values[name] for name in CONTEXT_COLUMNS} | {"context_id": context_id, "updated_at": now}
        contexts.append(ContextRow(**columns))
        cells += [LatencyCellRow(**{**cell, "context_id": context_id}) for cell in values["latency_cells"]]
        states.append(StateRow("context", str(context_id), json.dumps(values["state"]), now))
    added, kept = new_pairs(document, stored, replace_known)
    states += [StateRow("pair", pair_key(pair), json.dumps(pair["state"]), now) for pair in added]
    commit = Commit(
        contexts=contexts,
        latency_cells=cells,
        states=states,
        acceptance=[AcceptanceRow(**row) for pair in added for row in pair["acceptance"]],
        replaced_contexts=replaced,
    )
    return commit, kept


def new_pairs(
    document: dict[str, Any], stored: StoredState, replace_known: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Pairs whose acceptance is taken from the document, and those that keep what is stored."""
    known = [pair for pair in document["pairs"] if ("pair", pair_key(pair)) in stored.states]
    kept = [] if replace_known else known
    return [pair for pair in document["pairs"] if pair not in kept], kept


def key_of(values: dict[str, Any]) -> tuple[str, ...]:
    """What identifies a context in every fleet."""
    return tuple(values[name] for name in KEY)


def pair_key(pair: dict[str, Any]) -> str:
    return json.dumps((pair["target"], pair["draft"]))


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
