"""The traffic of a context, as far as choices depend on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from speclen.records import NUM_CLASSES, StepRecord, num_tokens_of

Array = np.ndarray

LOAD_MEMORY = 1000.0  # steps over which class mix, prefill and waiting are averaged
CONTEXT_MEMORY = 64.0  # steps at one range of sizes over which its context length is averaged
MIX_TOKENS = 500.0  # generated tokens of all sizes that the class mix of one size is shrunk by


class Load(NamedTuple):
    """mix: share of each class in the generated tokens, [ranges, classes]; context: tokens held per sequence, [ranges];
    prefill_s: draft-model prefill per generated token; waiting: new sequences per generated token."""

    mix: Array
    context: Array
    prefill_s: float
    waiting: float


class Traffic:
    """Averages over the steps of all workers. seen: usable samples by range of batch sizes."""

    STATE = ("class_tokens", "context", "seen", "rates")

    def __init__(self, num_ranges: int) -> None:
        self.class_tokens = np.zeros((num_ranges, NUM_CLASSES))
        self.context, self.seen = np.zeros(num_ranges), np.zeros(num_ranges)
        self.rates = np.zeros(3)  # draft-model prefill seconds, new sequences, generated tokens

    def count(self, records: Sequence[StepRecord], range_of: Array) -> None:
        """Take note of steps. range_of: range of every batch size."""
        fade = float(np.exp(-len(records) / LOAD_MEMORY))
        self.rates *= fade
        self.class_tokens *= fade
        num_tokens = sum(self._count_size(range_of[size], same) for size, same in by_size(records).items())
        prefill_s = sum(record.draft_prefill_s for record in records)
        self.rates += (prefill_s, sum(record.num_new_sequences for record in records), num_tokens)

    def _count_size(self, at: int, records: Sequence[StepRecord]) -> int:
        """Take note of steps of one batch size; returns their generated tokens."""
        tokens = [0] * NUM_CLASSES
        for record in records:
            for kind, histogram in record.class_histograms:
                tokens[kind] += num_tokens_of(histogram)
            if not record.class_histograms:
                tokens[0] += record.num_tokens
        self.class_tokens[at] += tokens
        self.seen[at] += sum(not record.flags for record in records)
        weight = len(records) / min(max(self.seen[at], len(records)), max(CONTEXT_MEMORY, len(records)))
        context = sum(record.mean_context_length for record in records) / len(records)
        self.context[at] += weight * (context - self.context[at])
        return sum(tokens)

    def load(self) -> Load:
        """The averages; those of all sizes where few steps were seen."""
        tokens = max(self.rates[2], 1.0)
        usual = self.context[self.seen > 0].mean() if (self.seen > 0).any() else 0.0
        total = self.class_tokens.sum(axis=0) + np.array([1.0, 0.0, 0.0])
        mixed = self.class_tokens + MIX_TOKENS * total / total.sum()
        context = np.where(self.context > 0, self.context, usual)
        mix = mixed / mixed.sum(axis=1, keepdims=True)
        return Load(mix, context, float(self.rates[0] / tokens), float(self.rates[1] / tokens))


def by_size(records: Sequence[StepRecord]) -> dict[int, list[StepRecord]]:
    """Steps by batch size, in order."""
    found: dict[int, list[StepRecord]] = {}
    for record in records:
        found.setdefault(record.batch_size, []).append(record)
    return found
