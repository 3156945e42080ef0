"""Standard output of the command line: it takes any text, and reports a failed write in one sentence."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import Any

from speclen.cli.support.errors import UserError


class Output(io.FileIO):
    """A file that takes nothing more once a write has failed: what waits in buffers would fail again at the end."""

    has_failed = False

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        """Raises UserError, or BrokenPipeError when the reader has gone."""
        if self.has_failed:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            self.has_failed = True
            if isinstance(error, BrokenPipeError):
                raise
            words = f"cannot write to standard output: {error.strerror}; send it to where there is room"
            raise UserError(words) from error


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Print through `Output` for the length of the block. Characters that the encoding lacks are escaped."""
    usual: Any = sys.stdout
    try:
        number = usual.fileno()
    except (AttributeError, OSError):  # closed by the parent process, or no file
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
