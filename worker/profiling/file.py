"""Profiles as JSON files: written by `speclen profile run` and `export`, read by `import` and by a worker's --profile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from speclen.records import Arm, Choice, ContextKey, Limits, Profile, ProfileCell
from speclen.v1 import control_pb2 as pb
from speclen.worker.arms import ArmTable

FORMAT, VERSION = "speclen-profile", 1


@dataclass(frozen=True, slots=True)
class ProfileDocument:
    """A profile and the context in which it was measured.

    details: machine, settings, command and commit of the measurement, for people only.
    """

    context: ContextKey
    profile: Profile
    measured_at: str
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The content of the file."""
        profile = self.profile
        return {
            "format": FORMAT,
            "version": VERSION,
            "context": self.context._asdict(),
            "measured_at": self.measured_at,
            "source": profile.source,
            "cells": [cell._asdict() for cell in profile.cells],
            "survival": list(profile.survival),
            "num_survival_rows": list(profile.num_survival_rows),
            "details": self.details,
        }


def read_document(path: Path) -> ProfileDocument:
    """Read a profile. Raises ValueError naming the file and what is wrong; bounds of numbers are not checked."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the profile {path} ({error.strerror}): name a file, an id or latest") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): name a file of `speclen profile run`") from error
    try:
        if content["format"] != FORMAT or content["version"] != VERSION:
            known = f"format {content['format']!r} version {content['version']!r}, known is {FORMAT} {VERSION}"
            raise ValueError(f"it has {known}")
        profile = Profile(
            cells=tuple(ProfileCell(**cell) for cell in content["cells"]),
            survival=tuple(map(float, content["survival"])),
            num_survival_rows=tuple(content["num_survival_rows"]),
            source=str(content.get("source", "")),
        )
        context, details = ContextKey(**content["context"]), dict(content.get("details", {}))
        return ProfileDocument(context, profile, str(content.get("measured_at", "")), details)
    except (KeyError, TypeError, ValueError) as error:
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} is not a profile of `speclen profile run`: {what}") from error


def table_from_file(path: Path, limits: Limits) -> ArmTable:
    """The table of `table_from_profile` from a file. Raises ValueError naming the file if it is not a profile."""
    profile = read_document(path).profile
    return table_from_profile(profile.cells, profile.survival, limits)


def table_from_profile(cells: Sequence[ProfileCell], survival: Sequence[float], limits: Limits) -> ArmTable:
    """The frozen table of Su et al. 2023: for each profiled batch size the length with the least time per token.

    A batch size between two profiled ones uses the larger one's length, as in the paper's look-up.
    survival[i]: probability that draft tokens 0..i are all accepted. Raises ValueError if the profile is empty.
    """
    if not cells:
        raise ValueError("the profile has no cells")
    expected = list(accumulate(survival, initial=1.0))
    longest = min(limits.max_speculation_length, len(survival))
    choices: list[Choice] = []
    sizes = sorted({cell.batch_size for cell in cells if cell.speculation_length <= longest})
    for low, size in zip([1, *(size + 1 for size in sizes)], sizes, strict=False):
        allowed = [cell for cell in cells if cell.batch_size == size and cell.speculation_length <= longest]
        best = min(allowed, key=lambda cell: cell.step_s / expected[cell.speculation_length])
        high = limits.max_batch_size if size == sizes[-1] else size
        choices.append(Choice(low, high, Arm(best.speculation_length)))
    return ArmTable.of(choices, limits, "profile")


def foreign_parts(path: Path, context: pb.ContextKey) -> list[str]:
    """Differences between the context of a profile and that of this worker, in words; empty if there are none."""
    theirs = read_document(path).context
    return [
        f"{name} {getattr(theirs, name)!r} instead of {getattr(context, name)!r}"
        for name in ContextKey._fields
        if getattr(theirs, name) != getattr(context, name)
    ]
