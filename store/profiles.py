"""Offline profiles as they were imported, with the context that each belongs to."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass

from speclen.store.connection import Connection
from speclen.store.queries import contexts
from speclen.store.records import ContextRow, ProfileCellRow, ProfileRow


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """A profile and its context."""

    context: ContextRow
    profile: ProfileRow


def stored_profiles(connection: Connection) -> list[StoredProfile]:
    """Every profile of the database, in order of profile_id."""
    known = {context.context_id: context for context in contexts(connection)}
    cells = _cells(connection)
    columns = ProfileRow._fields[:-1]
    found = []
    for row in connection.execute(f"SELECT {', '.join(columns)} FROM profiles ORDER BY profile_id"):
        values = dict(zip(columns, row, strict=True))
        values["as_prior"] = bool(values["as_prior"])
        for name in ("survival", "num_survival_rows"):
            values[name] = tuple(json.loads(values[name]))
        profile = ProfileRow(**values, cells=tuple(cells[values["profile_id"]]))
        found.append(StoredProfile(known[profile.context_id], profile))
    return found


def _cells(connection: Connection) -> dict[int, list[ProfileCellRow]]:
    """Cells by profile_id, ordered by batch size and length."""
    columns = ", ".join(ProfileCellRow._fields)
    order = "profile_id, batch_size, speculation_length"
    cells: dict[int, list[ProfileCellRow]] = defaultdict(list)
    for profile_id, *values in connection.execute(f"SELECT profile_id, {columns} FROM profile_cells ORDER BY {order}"):
        cells[profile_id].append(ProfileCellRow(*values))
    return cells
