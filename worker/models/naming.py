"""Names of models, and where the models are. Does not import torch, so that errors are reported at once.

A model is named by a local directory, by a hub id (HF_HUB_OFFLINE is respected), or as one of the bundled models.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BACKENDS = ("auto", "torch", "openvino")
DTYPES = ("auto", "float32", "bfloat16", "float16")


DEVICE = re.compile(r"auto|(cpu|cuda)(:\d+)?")


class ModelError(ValueError):
    """A model or a pair cannot be used. The message is one sentence for the person who named it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The size that a model is widened to, see `widen`."""

    hidden: int
    layers: int
    heads: int
    ffn: int


BUNDLED_FOLDER = Path(__file__).parents[1] / "bundled"
# target-6.7b and draft-125m have the depth, width and parameter count of OPT-6.7B and OPT-125M. Two CPU cores serve
# target-60m at 100 tokens a second.
BUNDLED: dict[str, tuple[str, Shape | None]] = {
    "bundled:target": ("target", None),
    "bundled:draft": ("draft", None),
    "bundled:target-60m": ("target", Shape(hidden=768, layers=8, heads=12, ffn=2064)),
    "bundled:draft-125m": ("draft", Shape(hidden=768, layers=12, heads=12, ffn=3440)),
    "bundled:target-6.7b": ("target", Shape(hidden=4096, layers=32, heads=64, ffn=11008)),
}


AUTO = "auto"
ADAPTER = "adapter_config.json"


def check_settings(device: str = "auto", dtype: str = "auto", backend: str = "auto") -> None:
    """Raise ModelError if the device, dtype or backend is unknown."""
    if not DEVICE.fullmatch(device):
        raise ModelError(f"--device {device!r} is not known; use auto, cpu, cuda or cuda:N")
    for name, value, known in (("dtype", dtype, DTYPES), ("backend", backend, BACKENDS)):
        if value not in known:
            raise ModelError(f"--{name} {value!r} is not known; use {', '.join(known)}")


def draft_of(target: str, draft: str) -> str:
    """The draft model's name. AUTO stands for the bundled one with a bundled target, and for none ("") with others."""
    if draft != AUTO:
        return draft
    return "bundled:draft" if target.startswith("bundled:") else ""


def check_names(target: str, draft: str) -> None:
    """Raise ModelError if a name has no model. A draft may be "", "none" or AUTO."""
    find_place(target)
    draft = draft_of(target, draft)
    if draft not in ("", "none"):
        find_place(draft)


def find_place(name: str) -> tuple[str, Shape | None]:
    """Directory or hub id of a model, and the shape to widen it to, if any. Raises ModelError if there is no such model."""
    if not name.startswith("bundled:"):
        place = str(Path(name).expanduser()) if name.startswith("~") else name  # shells do not expand it after "="
        _check_place(name, place)
        return place, None
    if name not in BUNDLED:
        raise ModelError(f"{name!r} is not a bundled model; there are {', '.join(BUNDLED)}")
    base, shape = BUNDLED[name]
    folder = BUNDLED_FOLDER / base
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name}: the bundled model is missing from this installation ({folder})")
    return str(folder), shape


def _check_place(name: str, place: str) -> None:
    path = Path(place)
    if path.is_dir():
        if not (path / "config.json").is_file():
            if (path / ADAPTER).is_file():
                raise ModelError(adapter_refusal(name))
            raise ModelError(f"{name}: the directory has no config.json, so it is not a transformers model")
        if not any(path.glob("*.safetensors")):
            raise ModelError(f"{name}: the directory has no *.safetensors; other weight formats are not read")
    elif path.exists():
        raise ModelError(f"{name}: a file, not a model; name the directory that holds config.json")
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", place) or place.startswith("."):
        raise ModelError(f"{name}: no such directory, and not a hub id; use a path, owner/name, or bundled:target")


def adapter_refusal(name: str) -> str:
    return (
        f"{name}: it has an adapter ({ADAPTER}), and adapters are not applied: merge it into its base model (peft's "
        "merge_and_unload, then save_pretrained) and name that; or delete the file to serve the base model"
    )


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def model_label(name: str, config: Mapping[str, Any]) -> str:
    """Name of a model, with a digest of its configuration that tells models of the same name apart."""
    # Paths and versions are left out of the digest, so that workers on all machines share a context.
    what = {key: value for key, value in config.items() if key not in ("_name_or_path", "transformers_version")}
    return f"{short_name(name)}#{digest(json.dumps(what, sort_keys=True, default=str))}"


def short_name(name: str) -> str:
    """The last part of a model's path; the whole name of a bundled model."""
    return name if name.startswith("bundled:") else Path(name).name
