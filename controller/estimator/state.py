"""What was learned of a pair as bytes, and back: an .npz file without pickled objects."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np

FORMAT = 1
UNUSABLE = (KeyError, TypeError, IndexError, ValueError, AttributeError, OSError, EOFError, zipfile.BadZipFile)


def pack(header: dict[str, Any], parts: dict[str, Any]) -> bytes:
    """The header and, by prefix, the attributes that each object names in STATE."""
    arrays = {
        f"{prefix}/{name}": np.asarray(getattr(part, name)) for prefix, part in parts.items() for name in part.STATE
    }
    buffer = io.BytesIO()
    arrays["header"] = np.frombuffer(json.dumps({"format": FORMAT, **header}).encode(), np.uint8)
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


class Packed:
    """A state that was packed. ValueError for what is none."""

    def __init__(self, content: bytes) -> None:
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as file:
                self._arrays = {name: file[name] for name in file.files}
            self.header: dict[str, Any] = json.loads(self._arrays.pop("header").tobytes())
        except UNUSABLE as error:
            raise ValueError("this is no state of an estimator") from error
        if self.header.get("format") != FORMAT:
            raise ValueError(f"the state has format {self.header.get('format')}, expected {FORMAT}")

    def restore(self, prefix: str, part: Any) -> None:
        """Give an object the attributes that were packed; numbers stay numbers."""
        for name in part.STATE:
            value = self._arrays[f"{prefix}/{name}"]
            known = getattr(part, name)
            setattr(part, name, value.copy() if isinstance(known, np.ndarray) else type(known)(value.item()))


def finite(arrays: Iterator[np.ndarray]) -> bool:
    """True if all values are finite."""
    return all(bool(np.isfinite(values).all()) for values in arrays)
