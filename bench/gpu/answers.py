"""The answer to one question of `scripts/gpu_check`: checks and figures, written one by one, and a final line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from speclen.cli.support.machine import provenance
from speclen.cli.support.output import write_whole


class Answer:
    """Checks of one question. out: JSON file, complete after every change."""

    def __init__(self, question: str, out: Path) -> None:
        self.out = out
        self.document: dict[str, Any] = provenance("scripts/gpu_check") | {"question": question, "checks": {}}
        self.skipped: list[str] = []

    def note(self, **figures: Any) -> None:
        self.document |= figures
        print(", ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
        self._write()

    def check(self, name: str, passed: bool, detail: object = "") -> None:
        self.document["checks"][name] = bool(passed)
        print(f"{'ok    ' if passed else 'FAILED'}  {name} {detail}".rstrip(), flush=True)
        self._write()

    def skip(self, name: str, reason: str) -> None:
        self.skipped.append(f"{name}: {reason}")
        self.document["skipped"] = self.skipped
        print(f"skipped  {self.skipped[-1]}", flush=True)
        self._write()

    def end(self) -> int:
        """Print the last line. Returns 0 unless a check failed, or there was no check and nothing was skipped."""
        checks = self.document["checks"]
        failed = [name for name, passed in checks.items() if not passed]
        rest = f"; skipped: {'; '.join(self.skipped)}" if self.skipped else ""
        if failed or not (checks or self.skipped):
            print(f"fail: {', '.join(failed) or 'nothing was checked'}{rest}")
            return 1
        print(f"pass: {', '.join(checks)}{rest}" if checks else f"skipped: {'; '.join(self.skipped)}")
        return 0

    def _write(self) -> None:
        write_whole(self.out, json.dumps(self.document, indent=1, default=str) + "\n")
