"""The table of faults: on the terminal, and in docs/explanation/robustness.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chaos.run import Finding

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "robustness.md"
BEGIN, END = "<!-- faults: made by scripts/chaos --write-page -->", "<!-- faults: end -->"
MARKS = {True: "held", False: "**broken**", None: "not run"}


def markdown(findings: Sequence[Finding]) -> str:
    lines = ["| Fault | Promise | Found | Again with |", "|---|---|---|---|"]
    for each in findings:
        cells = (
            f"**{each.fault}**. {each.does}",
            each.promise,
            f"{MARKS[each.passed]}: {each.found}",
            f"`{each.command}`",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def write_page(findings: Sequence[Finding]) -> None:
    """Put the table where the page keeps it."""
    table = f"{BEGIN}\n{markdown(findings)}\n{END}"
    PAGE.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: table, PAGE.read_text(), flags=re.DOTALL))
