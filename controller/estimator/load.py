"""The traffic of a context, as far as choices depend on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from speclen.controller.estimator import settings
from speclen.controller.estimator.saving import Array
from speclen.records import NUM_CLASSES, StepRecord, num_tokens_of


class Load(NamedTuple):
    """mix: share of each class in the generated tokens, [ranges, classes]; context: tokens held per sequence, [ranges];
    prefill_s: draft-model prefill per generated token; waiting: new sequences per generated token."""

    mix: np.ndarray
    context: np.ndarray
    prefill_s: float
    waiting: float


@dataclass(eq=False)
class Traffic:
    """Fading sums over the steps of all workers, by range of batch sizes; rates: over all ranges.

    class_tokens: generated, [ranges, classes]; held: tokens held per sequence, and steps, [ranges, 2]; seen: usable
    samples, not fading, [ranges]; rates: draft-model prefill seconds and new sequences.
    """

    class_tokens: Array
    held: Array
    seen: Array
    rates: Array

    @classmethod
    def none(cls, num_ranges: int) -> Traffic:
        """Before any step."""
        return cls(np.zeros((num_ranges, NUM_CLASSES)), np.zeros((num_ranges, 2)), np.zeros(num_ranges), np.zeros(2))

    def extend(self, num_ranges: int) -> None:
        """Make room for larger batch sizes."""
        more = num_ranges - len(self.seen)
        self.class_tokens, self.held = (np.pad(each, ((0, more), (0, 0))) for each in (self.class_tokens, self.held))
        self.seen = np.pad(self.seen, (0, more))

    def count(self, records: Sequence[StepRecord], range_of: np.ndarray) -> None:
        """Take note of steps. range_of: range of every batch size."""
        fade = float(np.exp(-len(records) / settings.current.load_memory))
        for values in (self.class_tokens, self.held, self.rates):
            values *= fade
        at = range_of[[record.batch_size for record in records]]
        np.add.at(self.class_tokens, at, [_class_tokens(record) for record in records])
        np.add.at(self.held, at, [(record.mean_context_length, 1.0) for record in records])
        np.add.at(self.seen, at, [not record.flags for record in records])
        self.rates += np.sum([(record.draft_prefill_s, record.num_new_sequences) for record in records], axis=0)

    def load(self) -> Load:
        """The averages, each range's shrunk towards those of all."""
        total = self.class_tokens.sum(axis=0) + np.array([1.0, 0.0, 0.0])
        mixed = self.class_tokens + settings.current.prior_tokens * total / total.sum()
        held, steps = self.held.T
        context = (held + held.sum() / max(steps.sum(), 1.0)) / (steps + 1.0)
        prefill_s, waiting = (self.rates / max(self.class_tokens.sum(), 1.0)).tolist()
        return Load(mixed / mixed.sum(axis=1, keepdims=True), context, prefill_s, waiting)


def _class_tokens(record: StepRecord) -> list[int]:
    """Generated tokens by class."""
    tokens = [0] * NUM_CLASSES
    for kind, histogram in record.class_histograms or ((0, record.accepted_histogram),):
        tokens[kind] += num_tokens_of(histogram)
    return tokens
