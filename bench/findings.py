"""The page that a check of the whole system writes: what was found, and what failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Report:
    """Every line is printed as it comes, and kept."""

    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def say(self, *lines: str) -> None:
        for line in lines:
            print(line, flush=True)
            self.lines.append(line)

    def check(self, true: bool, what: str) -> None:
        self.say(f"- {'passed' if true else '**FAILED**'}: {what}")
        if not true:
            self.failures.append(what)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], apart: bool = False) -> None:
        """apart: with an empty line before and after."""
        edge = [""] if apart else []
        self.say(*edge, f"| {' | '.join(head)} |", f"|{'---|' * len(head)}")
        self.say(*(f"| {' | '.join(row)} |" for row in rows), *edge)
