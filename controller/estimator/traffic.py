"""Traffic of a context: request classes, context lengths, admissions and draft-model prefill by batch range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import NamedTuple

import numpy as np

from speclen.controller.estimator.grid import Array
from speclen.records import NUM_CLASSES, StepRecord, num_tokens_of

MEMORY = 1000.0  # steps over which traffic is averaged


class Load(NamedTuple):
    """Mean traffic.

    mix: share of each class in the generated tokens, [ranges, classes]; context: tokens held per sequence, [ranges];
    prefill_s: draft-model prefill per generated token; waiting: new sequences per generated token; level: log of
    the step time in seconds at log_time 0, which puts prefill_s on the scale of step times.
    """

    mix: Array
    context: Array
    prefill_s: float
    waiting: float
    level: float


@dataclass(eq=False)
class Traffic:
    """Fading sums over the steps of all workers. class_tokens: generated, [ranges, classes]; held: tokens held per
    sequence, and steps, [ranges, 2]; seen: usable samples, not fading, [ranges]; rates: draft-model prefill seconds and
    new sequences."""

    class_tokens: Array
    held: Array
    seen: Array
    rates: Array

    @classmethod
    def none(cls, num_ranges: int) -> Traffic:
        """Before any step."""
        return cls(np.zeros((num_ranges, NUM_CLASSES)), np.zeros((num_ranges, 2)), np.zeros(num_ranges), np.zeros(2))

    def widen(self, num_ranges: int) -> None:
        """Make room for larger batch sizes."""
        more = 0, num_ranges - len(self.seen)
        self.class_tokens, self.held = (np.pad(each, (more, (0, 0))) for each in (self.class_tokens, self.held))
        self.seen = np.pad(self.seen, more)

    def count(self, records: Sequence[StepRecord], ranges: Sequence[int]) -> None:
        """Count steps. ranges: of each."""
        fade = exp(-len(records) / MEMORY)
        for values in (self.class_tokens, self.held, self.rates):
            values *= fade
        for at, record in zip(ranges, records, strict=True):
            for kind, histogram in record.class_histograms or ((0, record.accepted_histogram),):
                self.class_tokens[at, kind] += num_tokens_of(histogram)
            self.held[at] += record.mean_context_length, 1.0
            self.seen[at] += not record.flags
            self.rates += record.draft_prefill_s, record.num_new_sequences

    def load(self, prior_tokens: float, level: float) -> Load:
        """The averages, each range's shrunk towards those of all."""
        total = self.class_tokens.sum(axis=0) + (1.0, 0.0, 0.0)
        mixed = self.class_tokens + prior_tokens * total / total.sum()
        held, steps = self.held.T
        context = (held + held.sum() / max(float(steps.sum()), 1.0)) / (steps + 1.0)
        prefill_s, waiting = (self.rates / max(float(self.class_tokens.sum()), 1.0)).tolist()
        return Load(mixed / mixed.sum(axis=1, keepdims=True), context, prefill_s, waiting, level)
