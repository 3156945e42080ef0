"""`speclen` whose store is killed at a step of a commit: `KILL_AT='COMMIT:3' python -m tests.support.doomed controller`.

KILL_AT: the beginning of an SQL statement and a number n: SIGKILL follows the n-th such statement.
"""

import os
import signal
from pathlib import Path
from typing import Any

from speclen.cli import app
from speclen.store import database

# What one commit's statements begin with, in their order; the last one follows the answers to callers.
STEPS = (
    *("BEGIN", "SAVEPOINT", "INSERT INTO contexts", "INSERT INTO workers", "INSERT INTO step_reports"),
    *("DELETE FROM arm_estimates", "INSERT INTO arm_estimates", "INSERT INTO learned_states"),
    *("INSERT INTO prediction_windows", "RELEASE", "PRAGMA user_version", "COMMIT", "PRAGMA freelist_count"),
)


class Doomed:
    """A connection that counts down."""

    def __init__(self, connection: Any, kill_at: str) -> None:
        self._connection = connection
        self._begins, _, number = kill_at.partition(":")
        self._left = int(number)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._connection, name)
        return self._counting(found) if name in ("execute", "executemany", "executescript") else found

    def _counting(self, run: Any) -> Any:
        def counted(sql: str, *values: Any) -> Any:
            result = run(sql, *values)
            self._left -= sql.strip().startswith(self._begins)
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return counted


def doom() -> None:
    """Let the store of this process open such connections."""
    connect = database.connect_writer
    if kill_at := os.environ.get("KILL_AT", ""):

        def connect_doomed(path: Path) -> Any:
            return Doomed(connect(path), kill_at)

        database.connect_writer = connect_doomed


if __name__ == "__main__":
    doom()
    app.main()
