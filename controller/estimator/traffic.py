"""Traffic of a context: request classes, context lengths, admissions and draft-model prefill by batch range."""

from __future__ import annotations

from collections import Counter
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

    mix: share of each class in the generated tokens, [ranges, classes]; context: tokens held per sequence; prefill_s:
    draft-model prefill per generated token; waiting: new sequences per generated token; level: log of the step time in
    seconds at log_time 0, which puts prefill_s on the scale of step times.
    """

    mix: Array
    context: float
    prefill_s: float
    waiting: float
    level: float


@dataclass(eq=False)
class Traffic:
    """Fading sums over the steps of all workers.

    class_tokens: generated tokens, [ranges, classes]. sums: steps, tokens held per sequence, seconds of draft-model
    prefill, new sequences.
    """

    class_tokens: Array
    sums: Array

    @classmethod
    def none(cls, num_ranges: int) -> Traffic:
        """Before any step."""
        return cls(np.zeros((num_ranges, NUM_CLASSES)), np.zeros(4))

    def widen(self, num_ranges: int) -> None:
        """Make room for larger batch sizes."""
        self.class_tokens = np.pad(self.class_tokens, ((0, num_ranges - len(self.class_tokens)), (0, 0)))

    def count(self, records: Sequence[StepRecord], ranges: Sequence[int]) -> None:
        """Count steps. ranges: of each."""
        fade = exp(-len(records) / MEMORY)
        self.class_tokens *= fade
        self.sums *= fade
        tokens: Counter[tuple[int, int]] = Counter()
        for at, record in zip(ranges, records, strict=True):
            for kind, histogram in record.class_histograms or ((0, record.accepted_histogram),):
                tokens[at, kind] += num_tokens_of(histogram)
        for place, number in tokens.items():
            self.class_tokens[place] += number
        columns = [(1.0, r.mean_context_length, r.draft_prefill_s, r.num_new_sequences) for r in records]
        self.sums += np.array(columns).sum(axis=0)

    def load(self, prior_tokens: float, level: float) -> Load:
        """The averages. The mix of a range is shrunk towards that of all."""
        total = self.class_tokens.sum(axis=0) + (1.0, 0.0, 0.0)
        mixed = self.class_tokens + prior_tokens * total / total.sum()
        steps, held, prefill_s, started = self.sums.tolist()
        tokens = float(total.sum())
        mix = mixed / mixed.sum(axis=1, keepdims=True)
        return Load(mix, held / max(steps, 1.0), prefill_s / tokens, started / tokens, level)
