"""The bearer tokens that a server takes, and whose they are."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any


class Keyring:
    """Digests are compared, all of them and in constant time, so that neither a token's length nor its beginning leaks."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._expected = [digest(f"Bearer {token}") for token in tokens]

    def caller(self, header: str | bytes) -> str | None:
        """The sender of this `authorization`: None for a wrong one, "" where all callers share one token."""
        given, found = digest(as_expected(header)), None
        for expected in self._expected:
            if hmac.compare_digest(given, expected):
                found = f"token:{expected.hex()[:16]}"
        return found if found is None or len(self._expected) > 1 else ""

    def accepts(self, metadata: Any) -> bool:
        """True if the metadata of a call holds one `authorization`, and that one of the tokens."""
        given = [value for key, value in metadata or () if key == "authorization"]
        return len(given) == 1 and self.caller(given[0]) is not None


def as_expected(header: str | bytes) -> bytes:
    """The header with its scheme as the digests have it: case does not matter there, nor spaces behind (RFC 9110, 11.4)."""
    given = header.encode() if isinstance(header, str) else header
    scheme, _, token = given.partition(b" ")
    return b"Bearer " + token.lstrip(b" ") if scheme.lower() == b"bearer" else given


def digest(text: str | bytes) -> bytes:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).digest()
