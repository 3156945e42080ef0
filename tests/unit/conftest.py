"""A store that several modules start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from speclen.store.database import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A new one, open in s.db."""
    store = Store.open(tmp_path / "s.db")
    yield store
    store.close()
