"""`speclen import`: takes over what another fleet learned."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from speclen.cli.support.database import DB_OPTION
from speclen.cli.support.errors import UserError
from speclen.cli.transfer.state import check_usable, commit_of, read_document, store_now
from speclen.store.connection import StoreError
from speclen.store.database import Store, StoreConfig
from speclen.store.retention import KEEP_REPORTS


def import_state(
    file: Path = typer.Argument(help="File that `speclen export` wrote."),
    db: Path = DB_OPTION,
    replace_known: bool = typer.Option(
        False, "--replace", help="Replace what the database knows of the same pairs of models."
    ),
) -> None:
    """Read what another controller learned into a database, while no controller runs on it.

    Example: speclen import learned.json --db .speclen/speclen.db
    """
    document = read_document(file)
    try:
        check_usable(document)
        store = Store.open(db, StoreConfig(retention=KEEP_REPORTS))
        try:
            commit = commit_of(document, store.load(), replace_known)
            store_now(store, commit)
        finally:
            store.close()
    except StoreError as error:
        raise UserError(str(error)) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{file} is damaged ({error!r}): export it again") from error
    print(f"{db}: {len(commit.contexts)} contexts imported", file=sys.stderr)
