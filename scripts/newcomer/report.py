"""Everything that was seen, as text, and every fault."""

from __future__ import annotations

from pathlib import Path

from terminal import Seen

ROOT = Path(__file__).resolve().parents[2]


class Report:
    """Everything that was seen, and the faults among it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lines, self.faults = folder, [], []

    def say(self, text: str) -> None:
        text = text.replace(str(self.folder), "FOLDER").replace(str(ROOT), "CHECKOUT")
        print(text, flush=True)
        self.lines.append(text)

    def show(self, seen: Seen, columns: int = 80, code: int | None = 0, quiet: bool = False) -> None:
        """Record a command, and what is wrong with it."""
        if not quiet:
            self.say(f"\n$ {seen.line}\n{seen.text}\n[{seen.took_s:.1f} s, exit code {seen.code}]")
        for fault in seen.faults(columns):
            self.fault(seen.line, fault)
        if seen.code != code:
            self.fault(seen.line, f"exit code {seen.code} instead of {code}")

    def fault(self, line: str, fault: str) -> None:
        self.faults.append(f"{line}: {fault}")
        self.say(f"FAULT: {line}: {fault}")

    def must(self, line: str, fact: bool, fault: str) -> None:
        if not fact:
            self.fault(line, fault)
