"""What the command line says when the user can mend it."""

from __future__ import annotations


class UserError(Exception):
    """Bad input or a refused resource: one sentence that names the value and the way out. Exit code 2, no traceback."""
