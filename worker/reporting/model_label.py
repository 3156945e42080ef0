"""Names of models that are the same on all machines and engines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def model_label(name: str, config: Mapping[str, Any]) -> str:
    """Name with a digest of the model's configuration, which distinguishes models of one name."""
    # Without path and version of the file, so that workers on all machines share a context.
    what = {key: value for key, value in config.items() if key not in ("_name_or_path", "transformers_version")}
    short = name if name.startswith("bundled:") else Path(name).name
    return f"{short}#{digest(json.dumps(what, sort_keys=True, default=str))}"
