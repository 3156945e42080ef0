"""One line on stderr about the work in hand."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.markup import escape

from speclen.cli.support.errors import say


class LiveLine:
    """One line about the work in hand on stderr: overwritten in a terminal, elsewhere a new line for each new text."""

    def __init__(self) -> None:
        self.console, self.text = Console(stderr=True, highlight=False), ""
        self.status = self.console.status("")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.status.stop()

    def show(self, text: str, detail: str = "") -> None:
        """Show both in a terminal, cut to its width; elsewhere the text alone, unless it is the same as before."""
        if self.console.is_interactive:
            self.status.update(escape(f"{text}{detail}"[: self.console.width - 3]))
            self.status.start()
        elif text != self.text:
            self.text = text
            say(text)
