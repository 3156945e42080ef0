"""A fault that is injected into a running system, the promise that must hold, and the findings."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path


class CannotRunError(Exception):
    """The fault cannot be made on this machine. One sentence that says why."""


@dataclass(slots=True)
class Place:
    """Folder and duration of a fault. folder: empty at the start. dice: the same for the same --seed."""

    folder: Path
    seconds: float
    dice: random.Random
    started: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        return self.seconds - (time.monotonic() - self.started)

    def rounds(self, least: int = 1) -> Iterator[int]:
        """0, 1, … until the time is over, and at least `least` of them."""
        number = 0
        while number < least or self.left_s > 0:
            yield number
            number += 1


@dataclass(frozen=True, slots=True)
class Fault:
    """name: for --only. does: the fault itself, one sentence."""

    name: str
    does: str
    promise: str
    run: Callable[[Place], str]


FAULTS: dict[str, Fault] = {}


def fault(promise: str) -> Callable[[Callable[[Place], str]], Callable[[Place], str]]:
    """Register a function as a fault: its docstring says what it does, its result what was found.

    It raises AssertionError for a broken promise, CannotRunError where the fault cannot be made.
    """

    def enter(run: Callable[[Place], str]) -> Callable[[Place], str]:
        name = run.__name__.replace("_", "-")
        does = " ".join((run.__doc__ or "").split("\n\n")[0].split())
        FAULTS[name] = Fault(name, does, promise, run)
        return run

    return enter
