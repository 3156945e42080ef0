"""The page that a check of the whole system prints: what was found, and what failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Report:
    """Every line is printed as it comes; failures are kept."""

    failures: list[str] = field(default_factory=list)

    def say(self, *lines: str) -> None:
        print(*lines, sep="\n", flush=True)

    def check(self, true: bool, what: str) -> None:
        self.say(f"- {'passed' if true else '**FAILED**'}: {what}")
        if not true:
            self.failures.append(what)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.say(*(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)))
