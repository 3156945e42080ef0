"""Traffic of a context: request classes, context lengths, admissions and draft-model prefill by batch range."""

from __future__ import annotations

from collections import Counter, defaultdict
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
    prefill_s: draft-model prefill per generated token; waiting: new sequences per generated token; level: log of the
    step time in seconds at log_time 0, which puts prefill_s on the scale of step times.
    """

    mix: Array
    context: Array
    prefill_s: float
    waiting: float
    level: float


@dataclass(eq=False)
class Traffic:
    """Fading sums over the steps of all workers.

    class_tokens: generated tokens, [ranges, classes]. held: tokens held per sequence, and steps, [ranges, 2]. rates:
    seconds of draft-model prefill, and new sequences.
    """

    class_tokens: Array
    held: Array
    rates: Array

    @classmethod
    def none(cls, num_ranges: int) -> Traffic:
        """Before any step."""
        return cls(np.zeros((num_ranges, NUM_CLASSES)), np.zeros((num_ranges, 2)), np.zeros(2))

    def widen(self, num_ranges: int) -> None:
        """Make room for larger batch sizes."""
        more = (0, num_ranges - len(self.held)), (0, 0)
        self.class_tokens, self.held = np.pad(self.class_tokens, more), np.pad(self.held, more)

    def count(self, records: Sequence[StepRecord], ranges: Sequence[int]) -> None:
        """Count steps. ranges: of each."""
        fade = exp(-len(records) / MEMORY)
        for values in (self.class_tokens, self.held, self.rates):
            values *= fade
        tokens: Counter[tuple[int, int]] = Counter()
        held: dict[int, float] = defaultdict(float)
        for at, record in zip(ranges, records, strict=True):
            for kind, histogram in record.class_histograms or ((0, record.accepted_histogram),):
                tokens[at, kind] += num_tokens_of(histogram)
            held[at] += record.mean_context_length
        for place, number in tokens.items():
            self.class_tokens[place] += number
        for at, number in Counter(ranges).items():
            self.held[at] += held[at], number
        self.rates += sum(r.draft_prefill_s for r in records), sum(r.num_new_sequences for r in records)

    def load(self, prior_tokens: float, level: float) -> Load:
        """The averages. The mix of a range is shrunk towards that of all."""
        total = self.class_tokens.sum(axis=0) + (1.0, 0.0, 0.0)
        mixed = self.class_tokens + prior_tokens * total / total.sum()
        held, steps = self.held.T
        context = (held + held.sum() / max(float(steps.sum()), 1.0)) / (steps + 1.0)
        prefill_s, waiting = (self.rates / float(total.sum())).tolist()
        return Load(mixed / mixed.sum(axis=1, keepdims=True), context, prefill_s, waiting, level)
