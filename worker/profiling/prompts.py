"""Prompts for measurements: pieces of real files with a given number of tokens.

By default they come from files of the Python standard library that the bundled models were not trained on, so that
acceptance is that of new text. A hash of each file's path decides whether it was held out of training.
"""

from __future__ import annotations

import hashlib
import json
import random
import sysconfig
from pathlib import Path
from typing import Any

HELD_OUT_PERCENT = 4
# Tables and generated text, unsuitable for a model of source code.
SKIPPED_FOLDERS = {"site-packages", "encodings", "pydoc_data", "lib2to3", "idlelib", "__pycache__", "turtledemo"}
FILE_BYTES = range(500, 200_000)


def is_held_out(relative_path: str) -> bool:
    """True if this file of the standard library was held out of the bundled models' training."""
    return hashlib.sha256(relative_path.encode()).digest()[0] * 100 // 256 < HELD_OUT_PERCENT


def library_files(held_out: bool) -> list[Path]:
    """Source files of this Python's standard library that were held out of training, or the others; in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not SKIPPED_FOLDERS & set(path.relative_to(root).parts)
        and path.stat().st_size in FILE_BYTES
        and is_held_out(str(path.relative_to(root))) == held_out
    ]


def held_out_texts() -> list[str]:
    """Contents of the source files that were held out of the bundled models' training."""
    return [path.read_text("utf-8", errors="replace") for path in library_files(held_out=True)]


def texts_from_file(path: Path) -> list[str]:
    """Prompts in a file with one JSON string per line. Raises ValueError naming the file."""
    try:
        texts = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the prompts {path}: {error}") from error
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError(f"{path} holds no prompts: write one JSON string per line")
    return texts


class PromptSource:
    """Draws prompts of any number of tokens from texts. The same seed draws the same prompts."""

    def __init__(self, tokenizer: Any, texts: list[str], seed: int = 0) -> None:
        """texts: at least one that is not empty. A text is encoded when it is first drawn."""
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._texts = [text for text in texts if text]
        self._encoded: dict[int, list[int]] = {}

    def draw(self, num_tokens: int, seed: int | None = None) -> tuple[int, ...]:
        """Exactly num_tokens ids: a piece of a text, or concatenated pieces. With a seed, they depend on it alone."""
        rng = self._random if seed is None else random.Random(seed)
        ids: list[int] = []
        while len(ids) < num_tokens:
            text = self._ids(rng.randrange(len(self._texts)))
            start = rng.randrange(max(1, len(text) - num_tokens))
            ids.extend(text[start : start + num_tokens - len(ids)])
        return tuple(ids)

    def _ids(self, index: int) -> list[int]:
        if index not in self._encoded:
            # Special tokens would end a sequence inside a prompt; verbose warns of texts longer than the model's context.
            encoded = self._tokenizer(self._texts[index], add_special_tokens=False, verbose=False)
            self._encoded[index] = encoded["input_ids"]
        return self._encoded[index]
