"""`speclen import`: takes over what another fleet learned."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from speclen.console.database import DB_OPTION
from speclen.console.errors import UserError
from speclen.console.learned.state import check_usable, commit_of, damaged, read_document, store_now
from speclen.store.connection import StoreError
from speclen.store.database import Store, StoreConfig
from speclen.store.retention import KEEP_REPORTS


def import_state(
    file: Path = typer.Argument(help="File that `speclen export` wrote."),
    db: Path = DB_OPTION,
    replace_known: bool = typer.Option(
        False, "--replace", help="Replace what the database knows of the same contexts."
    ),
) -> None:
    """Read what another controller learned into a database, while no controller runs on it.

    A pair of models that the database knows keeps its own acceptance, unless --replace is given.

    Example: speclen import learned.json --db .speclen/speclen.db
    """
    document = read_document(file)
    check_usable(file, document)
    try:
        store = Store.open(db, StoreConfig(retention=KEEP_REPORTS))
    except StoreError as error:
        raise UserError(str(error)) from error
    try:
        commit, kept = commit_of(document, store.load(), replace_known)
        store_now(store, commit)
    except (KeyError, TypeError) as error:
        raise damaged(file, error) from error
    finally:
        store.close()
    for pair in kept:
        print(f"{pair['target']} with {pair['draft']}: known here, its own acceptance was kept", file=sys.stderr)
    print(f"{db}: {len(commit.contexts)} contexts imported", file=sys.stderr)
