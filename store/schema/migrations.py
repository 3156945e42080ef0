"""The schema, as the steps that lead to it. `schema.sql` shows the result; a test keeps the two the same.

A step is never edited once released: a later one changes what it made. Every step commits together with the record that
it was applied (table `_sqlite_migrations`), so one that fails leaves no trace. Comments stand inside the statements,
where SQLite keeps them: `.schema step_reports` shows them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speclen.store.connection import APPLICATION_ID, Connection, StoreError, is_new, require_ours, sqlite3
from speclen.store.schema.steps import STEPS

if TYPE_CHECKING:
    from sqlite_utils.migrations import Migrations

MIGRATION_SET = "speclen"

SCHEMA_HEADER = """\
-- The schema of a speclen database, for reading. Written by `python -m speclen.store.schema.migrations > store/schema.sql`.
-- Seconds end in _s, times that end in _at are seconds since 1970 (UTC), counts begin with num_.

"""


def migrate(path: Path, connection: Connection, stop_before: str | None = None) -> None:
    """Bring a database to the newest schema; an empty file becomes one.

    stop_before: name of the first step not to apply (for tests of old versions).
    Raises StoreError if the file is another program's, or newer than this program.
    """
    new = is_new(connection)
    if not new:
        require_ours(path, connection)
        applied = applied_steps(connection)
        refuse_newer(path, applied)
        if len(applied) == len(STEPS):
            return
    # Imported here because it costs more than all the rest of a restart, and almost no start needs it.
    from sqlite_utils import Database

    steps, database = migrations(), Database(connection, recursive_triggers=False, execute_plugins=False)
    if not new:
        steps.apply(database, stop_before=stop_before)
        return
    # In one transaction: a start that is cut off leaves no file that says it is ours and has no tables.
    with database.atomic():
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        steps.apply(database, stop_before=stop_before)


def migrations() -> Migrations:
    """The steps as sqlite-utils' migrations."""
    from sqlite_utils.migrations import Migrations

    result = Migrations(MIGRATION_SET)
    for name, statements in STEPS.items():
        result(name=name)(_step(statements))
    return result


def applied_steps(connection: Connection) -> list[str]:
    """Names of the steps that made this database, in order; none for an empty file."""
    if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = '_sqlite_migrations'").fetchone():
        return []
    query = "SELECT name FROM _sqlite_migrations WHERE migration_set = ? ORDER BY id"
    return [row[0] for row in connection.execute(query, (MIGRATION_SET,))]


def refuse_newer(path: Path, applied: list[str]) -> None:
    """Raises StoreError if a step was applied that this program does not know."""
    unknown = [name for name in applied if name not in STEPS]
    if unknown:
        raise StoreError(
            f"{path} was written by a newer speclen (it has the schema step {unknown[0]!r}, this one ends at "
            f"{list(STEPS)[-1]!r}): upgrade speclen, or use another file."
        )


def schema_text(connection: Connection) -> str:
    """Every table, index and view of the database as it was created, comments included, oldest first."""
    query = "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL AND tbl_name <> '_sqlite_migrations' ORDER BY rowid"
    return "\n\n".join(f"{row[0]};" for row in connection.execute(query)) + "\n"


def newest_schema() -> str:
    """The schema that all steps lead to, as `schema.sql` shows it."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(Path(":memory:"), connection)
    text = schema_text(connection)
    connection.close()
    return SCHEMA_HEADER + text


def _step(statements: tuple[str, ...]) -> Callable[[Any], None]:
    def apply(db: Any) -> None:
        for statement in statements:
            db.execute(statement)

    return apply


if __name__ == "__main__":
    print(newest_schema(), end="")
