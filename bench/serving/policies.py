"""Policies that a comparison can name: those of a worker."""

from __future__ import annotations

import re
from dataclasses import replace

from speclen.cli.support.output import UserError
from speclen.worker.config import WorkerConfig


def parse_policies(text: str, settings: WorkerConfig) -> list[str]:
    """The names of "adaptive,none,fixed:1-8,n-gram". Raises UserError naming one that the worker would not take."""
    names = [expanded for name in text.split(",") if name.strip() for expanded in expand(name.strip())]
    if not names:
        raise UserError("--compare names no policy: use for example adaptive,none,fixed:3")
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"--compare names {repeated} twice: name each policy once")
    for name in names:
        try:
            replace(settings, policy=name)
        except ValueError as error:
            raise UserError(f"--compare {name}: {error}") from error
    return names


def expand(name: str) -> list[str]:
    """ "fixed:0-3" is none, fixed:1, fixed:2 and fixed:3; everything else is itself."""
    match = re.fullmatch(r"fixed:(\d{1,2})(?:-(\d{1,2}))?", name)
    if not match:
        return [name]
    return [f"fixed:{n}" if n else "none" for n in range(int(match[1]), int(match[2] or match[1]) + 1)]
