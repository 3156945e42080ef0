"""Everything a command writes: errors, standard output, progress on stderr, and files."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TextIO

from speclen.store.connection import DATABASE_BEGINS


class UserError(Exception):
    """An error that the user can fix: one sentence naming the value and the way out. Exit code 2, no traceback."""


@contextlib.contextmanager
def user_errors(kinds: type[Exception] | tuple[type[Exception], ...] = ValueError) -> Iterator[None]:
    """Raise errors of these kinds as UserErrors with the same sentence."""
    try:
        yield
    except kinds as error:
        raise UserError(str(error)) from error


def wrapped(sentence: str, stream: TextIO | None = None) -> str:
    """Wrap a sentence if the stream (default: stderr) is a terminal; otherwise leave it on one line."""
    if not (stream or sys.stderr).isatty():
        return sentence
    width = shutil.get_terminal_size().columns
    return textwrap.fill(sentence, width, break_long_words=False, break_on_hyphens=False)


def say(sentence: str) -> None:
    """Report progress on stderr; stdout carries only the result."""
    print(wrapped(sentence), file=sys.stderr, flush=True)


class LiveLine:
    """A progress line on stderr: overwritten in place on a terminal, otherwise one line for each new text."""

    def __init__(self) -> None:
        from rich.console import Console  # imported here because most commands show no progress

        self.console, self.text = Console(stderr=True, highlight=False), ""
        self.status = self.console.status("")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.status.stop()

    def show(self, text: str, detail: str = "") -> None:
        """Show text and detail on a terminal, cut to its width; elsewhere print the text if it has changed."""
        if self.console.is_interactive:
            from rich.markup import escape

            self.status.update(escape(f"{text}{detail}"[: self.console.width - 3]))
            self.status.start()
        elif text != self.text:
            self.text = text
            say(text)


class Output(io.FileIO):
    """Standard output that ignores writes after one has failed, so that flushing at exit does not fail again."""

    has_failed = False

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        """Raises UserError, or BrokenPipeError if the reader has closed the pipe."""
        if self.has_failed:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            self.has_failed = True
            if isinstance(error, BrokenPipeError):
                raise
            words = f"cannot write to standard output: {error.strerror}; redirect it to a disk with free space"
            raise UserError(words) from error


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Replace sys.stdout by an `Output` within the block. Characters that the encoding lacks are escaped."""
    usual: Any = sys.stdout
    try:
        number = usual.fileno()
    except (AttributeError, OSError):  # closed by the parent process, or not a file
        yield
        return
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(Output(number, "w", closefd=False)),
        usual.encoding,
        "backslashreplace",
        line_buffering=usual.line_buffering or usual.write_through,  # or PYTHONUNBUFFERED, as in containers
    )
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        finally:
            sys.stdout = usual


def check_place(file: Path, of_database: bool = False) -> None:
    """Raise UserError if the file cannot be created or replaced; called before the work whose result goes there.

    of_database: the result is a database, so an existing database may be replaced.
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
    """Raise UserError if the output file is a database: its name was probably meant as the input."""
    with contextlib.suppress(OSError):  # the write itself reports what is wrong
        if not file.is_file():
            return
        with file.open("rb") as opened:
            begins = opened.read(len(DATABASE_BEGINS))
        if begins == DATABASE_BEGINS:
            raise UserError(f"{file} is a database and is not overwritten: name another file for the output")


def write_whole(file: Path, text: str) -> None:
    """Write text and a newline atomically, creating parent folders. Raises UserError naming the file."""
    refuse_database(file)
    try:
        if file.exists() and not file.is_file():  # a pipe or a device cannot be replaced
            file.write_text(text + "\n", "utf-8")
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(file.name + ".tmp")
        try:
            temporary.write_text(text + "\n", "utf-8")
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)  # left behind if the disk was full
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}): choose another place") from error
