"""`speclen restore`: a backup becomes the database again."""

from __future__ import annotations

from pathlib import Path

import typer

from speclen.cli.support.database import DB_OPTION
from speclen.cli.support.errors import UserError, say
from speclen.store.backup import check_file, is_empty, put_in_place
from speclen.store.connection import StoreError


def restore(
    source: str = typer.Argument(
        help="Backup file, or its URL; or the place of backups: the newest that is sound is taken."
    ),
    db: Path = DB_OPTION,
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace the database."),
    if_missing: bool = typer.Option(
        False, "--if-missing", help="Do nothing where there is a database, or no backup yet: for every start."
    ),
) -> None:
    """Make a backup the database again, while no controller runs on it.

    Workers register anew by themselves. Reports acknowledged after the backup are gone; the controller says how many commits
    that were.

    Example: speclen restore /mnt/backups --db .speclen/speclen.db
    """
    if not is_empty(db) and not overwrite:
        if if_missing:
            say(f"{db} is there: nothing to restore")
            return
        raise UserError(f"{db} exists: name another file with --db, or give --overwrite")
    try:
        if Path(source).is_file():
            check_file(Path(source))
            put_in_place(Path(source), db)
            say(f"{db}: restored from {source}")
        else:
            from_place(source, db, if_missing)
    except StoreError as error:
        raise UserError(str(error)) from error


def from_place(source: str, db: Path, if_missing: bool) -> None:
    from speclen.store.backup_place import NAME, BackupPlace, restore_newest  # here: fsspec takes time to import

    url, _, file = source.rpartition("/")
    if "://" in url and (match := NAME.fullmatch(file)):
        with BackupPlace(url, match["stem"]).fetched(file) as copy:
            put_in_place(copy, db)
        say(f"{db}: restored from {source}")
        return
    if "://" not in source and not Path(source).is_dir() and not if_missing:
        raise UserError(
            f"there is no backup at {source}: name a file, or the place that `speclen backup --to` was given"
        )
    name = restore_newest(BackupPlace(source, db.stem), db, say)
    if name:
        say(f"{db}: restored from {name} in {source}")
    elif if_missing:
        say(f"there is no backup of {db.stem} in {source} yet: the controller begins anew")
    else:
        raise UserError(
            f"there is no backup of {db.stem} in {source}: is that the place that `speclen backup --to` has?"
        )
