"""The page that scripts/fleet_check writes."""

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

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.say("", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}")
        self.say(*(f"| {' | '.join(row)} |" for row in rows), "")
