"""Kinds of prompts: text like that which the bundled pair learned from, and text unlike it.

All of it comes with Python itself, so that every machine with the same Python draws the same prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from speclen.bench.serving.tracks import Arrival
from speclen.worker.profiling.prompts import PromptSource, held_out_texts

NOISE_TEXTS = 64


def prose_texts() -> list[str]:
    """English prose: Python's reference manual as `help()` prints it, which the bundled pair was not trained on."""
    from pydoc_data.topics import topics

    return list(topics.values())


def noise_texts() -> list[str]:
    """Letters, digits and spaces at random: nothing to learn, and nothing to predict."""
    rng = random.Random(0)
    return ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789  ", k=2000)) for _ in range(NOISE_TEXTS)]


KINDS: dict[str, Callable[[], list[str]]] = {"code": held_out_texts, "prose": prose_texts, "noise": noise_texts}


class PromptDrawer:
    """Draws prompts of every kind, each from its own seed; texts are encoded once, when a kind is first asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._sources: dict[str, PromptSource] = {}

    def draw(self, kind: str, num_tokens: int, seed: int) -> tuple[int, ...]:
        """Exactly num_tokens ids. Raises ValueError for an unknown kind."""
        if kind not in KINDS:
            raise ValueError(f"prompts of kind {kind!r} are unknown: use {', '.join(KINDS)}")
        if kind not in self._sources:
            self._sources[kind] = PromptSource(self._tokenizer, KINDS[kind]())
        return self._sources[kind].draw(num_tokens, seed)

    def for_track(self, arrivals: Sequence[Arrival]) -> list[tuple[int, ...]]:
        return [self.draw(arrival.kind, arrival.prompt_tokens, arrival.prompt_seed) for arrival in arrivals]
