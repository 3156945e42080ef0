"""A profile as a JSON file: what `speclen profile run` writes, another machine imports, and a worker starts from."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from speclen.cli.support.database import reading
from speclen.cli.support.errors import UserError
from speclen.cli.support.files import write_whole
from speclen.controller.wire.validation import InvalidMessageError, read_profile
from speclen.records import ContextKey, Profile
from speclen.store.queries import contexts, stored_profiles
from speclen.v1 import control_pb2 as pb

FORMAT, VERSION = "speclen-profile", 1


@dataclass(frozen=True, slots=True)
class ProfileDocument:
    """A whole profile and the context it was measured in.

    details: how it was measured, for people: machine,
    settings, command and commit; nothing of it is needed to use the profile.
    """

    context: ContextKey
    profile: Profile
    measured_at: str
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """cells, survival and num_survival_rows are what a worker reads; the rest says where they come from."""
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

    def to_request(self, context: ContextKey) -> pb.ImportProfileRequest:
        """The call that seeds `context` with this profile."""
        return pb.ImportProfileRequest(
            context=pb.ContextKey(**context._asdict()),
            cells=[pb.ProfileCell(**cell._asdict()) for cell in self.profile.cells],
            survival=self.profile.survival,
            num_survival_rows=self.profile.num_survival_rows,
            source=self.profile.source[:256],
        )


def read_document(path: Path) -> ProfileDocument:
    """The profile in a JSON file, every number checked. Raises UserError naming the file and what is wrong."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the profile {path} ({error.strerror}): name a file, an id or latest") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): name a file of `speclen profile run`") from error
    try:
        return parse_document(content)
    except (InvalidMessageError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not a profile of `speclen profile run`: {describe(error)}") from error


def parse_document(content: dict[str, Any]) -> ProfileDocument:
    """Raises InvalidMessageError, KeyError, TypeError or ValueError."""
    if content["format"] != FORMAT or content["version"] != VERSION:
        raise ValueError(
            f"it has format {content['format']!r} version {content['version']!r}, known is {FORMAT} {VERSION}"
        )
    request = pb.ImportProfileRequest(
        cells=[pb.ProfileCell(**cell) for cell in content["cells"]],
        survival=content["survival"],
        num_survival_rows=content["num_survival_rows"],
        source=content.get("source", ""),
    )
    return ProfileDocument(
        context=ContextKey(**content["context"]),
        profile=read_profile(request),
        measured_at=str(content.get("measured_at", "")),
        details=dict(content.get("details", {})),
    )


def describe(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)


def write_document(path: Path, content: dict[str, Any]) -> None:
    """Raises UserError naming the file."""
    write_whole(path, json.dumps(content, indent=1))


def find_profile(profile: str, db: Path) -> ProfileDocument:
    """A profile by file name, id or "latest". Raises UserError saying which there are."""
    if profile != "latest" and not profile.isdecimal():
        return read_document(Path(profile))
    with reading(db) as connection:
        profiles = {row.profile_id: row for row in stored_profiles(connection)}
        keys = {row.context_id: row.key for row in contexts(connection)}
    if not profiles:
        raise UserError(f"{db} holds no profile: make one with `speclen profile run`")
    wanted = max(profiles) if profile == "latest" else int(profile)
    if wanted not in profiles:
        raise UserError(f"{db} holds no profile {wanted}; there are {', '.join(map(str, profiles))}")
    row = profiles[wanted]
    imported_at = datetime.fromtimestamp(row.imported_at, UTC).isoformat(timespec="seconds")
    return ProfileDocument(keys[row.context_id], row.profile, imported_at)  # how it was measured is not kept there
