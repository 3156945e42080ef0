"""Files that a command writes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from speclen.cli.support.errors import UserError
from speclen.store.connection import DATABASE_BEGINS


def check_place(file: Path, of_database: bool = False) -> None:
    """Check that a file can be made there, before the work whose result it takes. Raises UserError naming it.

    of_database: it is to be one, and may replace one.
    """
    if file.exists():
        if not of_database:
            refuse_database(file)
        fits = not file.is_dir() and os.access(file, os.W_OK)
    else:
        folder = next(folder for folder in file.absolute().parents if folder.exists())
        fits = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    if not fits:
        raise UserError(f"{file} cannot be written: choose another place")


def refuse_database(file: Path) -> None:
    """Raises UserError for a database: who names one where a result goes takes the name for that of what is read."""
    with contextlib.suppress(OSError):  # the write reports what is wrong
        if not file.is_file():
            return
        with file.open("rb") as opened:
            begins = opened.read(len(DATABASE_BEGINS))
        if begins == DATABASE_BEGINS:
            raise UserError(f"{file} is a database and stays: name another file for what is written")


def write_whole(file: Path, text: str) -> None:
    """The text and a line's end, whole or not at all: a reader never finds a part, nor is an old file lost to a full disk.

    Folders that lead there are made. Raises UserError naming the file, also where it is a database.
    """
    refuse_database(file)
    try:
        if file.exists() and not file.is_file():  # a pipe or a device takes it as it comes
            file.write_text(text + "\n", "utf-8")
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(file.name + ".tmp")
        try:
            temporary.write_text(text + "\n", "utf-8")
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)  # a part, where the disk was full
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}): choose another place") from error
