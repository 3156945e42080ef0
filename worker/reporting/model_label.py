"""Models by a name that is the same on every machine and in every engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def model_label(name: str, config: Mapping[str, Any]) -> str:
    """Name with a digest of the model's configuration, so that two models of one name are told apart."""
    # Where it lies, and who wrote the file, is not what it is: workers on other machines share what is learned.
    what = {key: value for key, value in config.items() if key not in ("_name_or_path", "transformers_version")}
    short = name if name.startswith("bundled:") else Path(name).name
    return f"{short}#{digest(json.dumps(what, sort_keys=True, default=str))}"
