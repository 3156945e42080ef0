"""Errors that the user can mend, and sentences on stderr."""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import TextIO


class UserError(Exception):
    """Bad input or a refused resource: one sentence that names the value and the way out. Exit code 2, no traceback."""


@contextlib.contextmanager
def user_errors(kinds: type[Exception] | tuple[type[Exception], ...] = ValueError) -> Iterator[None]:
    """Raise errors of these kinds as UserErrors with the same sentence."""
    try:
        yield
    except kinds as error:
        raise UserError(str(error)) from error


def wrapped(sentence: str, stream: TextIO | None = None) -> str:
    """The sentence broken between words on a terminal; in one line for everything else. stream: default: stderr."""
    if not (stream or sys.stderr).isatty():
        return sentence
    width = shutil.get_terminal_size().columns
    return textwrap.fill(sentence, width, break_long_words=False, break_on_hyphens=False)


def say(sentence: str) -> None:
    """Tells the user how far a command is; stdout is for what it was asked for."""
    print(wrapped(sentence), file=sys.stderr, flush=True)
