"""`speclen backup`: copies of the database, whole and consistent, while the controller goes on writing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from speclen.cli.support.database import DB_OPTION, copy_database
from speclen.cli.support.errors import UserError, say
from speclen.cli.support.processes import end_as_by_ctrl_c
from speclen.store.backup import is_empty
from speclen.store.connection import StoreError

if TYPE_CHECKING:
    from speclen.store.backup_place import BackupPlace

FEWEST_S = 1.0


def backup(
    target: Path | None = typer.Argument(None, help="File to write. It must not exist, unless --overwrite is given."),
    db: Path = DB_OPTION,
    to: str = typer.Option(
        "",
        help="In place of a file: folder, or a URL that fsspec knows (s3://bucket/path), for copies with a time each.",
    ),
    every: float = typer.Option(
        0.0, min=0, max=1e6, help="With --to: a copy every so many seconds, until Ctrl-C; 0: one."
    ),
    keep: int = typer.Option(
        24, min=1, max=100_000, help="With --to: copies to keep, the newest; one that is further stays besides."
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace the file."),
    as_json: bool = typer.Option(False, "--json", help="Print what was written as JSON."),
) -> None:
    """Copy the database while the controller runs, and check the copy: to a file, or again and again to a place.

    What the controller acknowledged since the last copy is lost with the disk: at most --every and the time a copy takes.
    `speclen restore` puts a copy back.

    Example: speclen backup --every 60 --to /mnt/backups
    """
    if (target is None) == (not to):
        raise UserError("give a file to write, or a place with --to: one of them")
    if every and not to:
        raise UserError(f"--every {every:g} needs a place for the copies: give it with --to")
    if 0 < every < FEWEST_S:
        raise UserError(f"--every {every:g} is too often: give {FEWEST_S:g} s or more")
    try:
        if target is not None:
            to_file(target, db, overwrite, as_json)
        else:
            to_place(to, db, every, keep, as_json)
    except StoreError as error:
        raise UserError(str(error)) from error


def to_file(target: Path, db: Path, overwrite: bool, as_json: bool) -> None:
    if target.exists() and db.exists() and target.samefile(db):
        raise UserError(f"{target} is the database itself: name another file for its copy")
    if target.exists() and not overwrite:
        raise UserError(f"{target} exists: name another file, or give --overwrite")
    num_bytes = copy_database(db, target)
    if as_json:
        print(json.dumps({"file": str(target), "bytes": num_bytes}))
    else:
        print(f"{target}: {num_bytes:,} bytes, checked")


def to_place(to: str, db: Path, every: float, keep: int, as_json: bool) -> None:
    """Copy once, or until Ctrl-C. A copy that fails later than the first look at the place is told, and tried again."""
    from speclen.store.backup_place import BackupPlace  # here: fsspec takes time to import

    place = BackupPlace(to, db.stem, keep)
    if not every:
        tell_made(place, db, -1, as_json)
        return
    say(f"copying {db} to {to} every {every:g} s: that, and the time a copy takes, is what can be lost with the disk")
    end_as_by_ctrl_c()
    last_commit = -1
    try:
        while True:
            started = time.monotonic()
            try:
                last_commit = last_commit if is_empty(db) else tell_made(place, db, last_commit, as_json)
            except StoreError as error:
                say(f"no copy was made, the next is tried in {every:g} s: {error}")
            time.sleep(max(0.0, every - (time.monotonic() - started)))
    except KeyboardInterrupt:
        say("stopping")


def tell_made(place: BackupPlace, db: Path, last_commit: int, as_json: bool) -> int:
    """Make a copy, unless nothing was committed since the last; the number of the newest commit in the newest copy."""
    from speclen.store.backup_place import commit_of

    started = time.monotonic()
    if commit_of(db) == last_commit:
        return last_commit
    made = place.add(db)
    took_s = time.monotonic() - started
    if made.warning:
        say(made.warning)
    if as_json:
        print(
            json.dumps({"name": made.name, "bytes": made.num_bytes, "commit": made.commit, "took_s": took_s}),
            flush=True,
        )
    else:
        print(f"{made.name}: {made.num_bytes:,} bytes in {took_s:.1f} s, checked", flush=True)
    return made.commit
