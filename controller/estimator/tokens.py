"""Tokens per step: how many a sequence generates with each arm, by request class. It depends on the models and the text.

Off-policy evaluation of a finished output counts exactly how many steps S each arm would have taken for its T tokens, so
r = S / T steps per token. Histograms of accepted tokens estimate the same for draft lengths: p_i = passed_i / reached_i,
and E_k = 1 + sum_j prod_{i<=j} p_i. They are the prior of evaluated outputs, and the ratio over all classes is the prior of
each class. n-grams add g tokens per step to plain decoding. Outputs that were evaluated for n-grams alone measure g, and so
does every step that used n-grams.

Requests differ in acceptance. Those whose drafts are rejected take more steps, and more so with long drafts, so E_k is too
high for lengths above those in use. Let log E_k of a request be mu_k + sigma_k z with a normal z, weighted by tokens.
In steps with draft length j a request counts in proportion to 1 / E_j, and E_k appears exp(sigma_k (sigma_k - sigma_j))
times too high. sigma_k is proportional to d log E_k / d log p.

All sums are averaged over requests in two memories. Where generated relative to expected tokens differ significantly between
them, the text has changed, and a part of the short one replaces the long one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from operator import add

import numpy as np

from speclen.controller.estimator.grid import Array
from speclen.controller.estimator.settings import EstimatorSettings
from speclen.records import (
    MAX_SPECULATION_LENGTH,
    NUM_CLASSES,
    OutputEvaluation,
    StepFlag,
    StepRecord,
    num_tokens_of,
)

LEAST = 0.02  # of acceptance and of rejection
DEEPER = 0.98  # acceptance of a position relative to the one before, unseen
COMPARED_LENGTH = 4  # draft tokens at which tokens per step are compared
MATCHED = 5.0  # tokens of a step with an n-gram match, unseen
LEAST_REQUESTS = 2.0, 8.0  # in the short and in the long memory, before they are compared
UNUSABLE = frozenset({StepFlag.MIXED_LENGTHS, StepFlag.UNKNOWN})
# Evidence of steps with drafts, of n-grams alone, and of outputs that were evaluated for every arm.
DRAFTS, NGRAMS, OUTPUTS = range(3)
REQUESTS, TOKENS, EXPECTED = range(3)

# Steps by class, length and n-grams: how many, and the histogram of their accepted tokens.
Histograms = dict[tuple[int, int, bool], tuple[int, list[int]]]


def histograms_of(records: Sequence[StepRecord]) -> Histograms:
    """Histograms of the steps that speculated."""
    found: Histograms = {}
    for record in records:
        length, ngram = record.arm
        if not (length or ngram) or (record.flags and UNUSABLE & record.flags):
            continue
        for kind, runs in record.class_histograms or ((0, record.accepted_histogram),):
            number, known = found.get((kind, length, ngram), (0, None))
            added = list(runs) if known is None else list(map(add, known, runs))
            found[kind, length, ngram] = number + 1, added
    return found


def num_requests(records: Sequence[StepRecord], histograms: Histograms, settings: EstimatorSettings) -> float:
    """Requests that steps count for: those that began, and more where none begins. histograms: of the steps."""
    num_rows = sum(sum(histogram) for _, histogram in histograms.values())
    started = sum(record.num_new_sequences for record in records)
    return max(float(started), num_rows / settings.request_steps)


@dataclass(eq=False)
class TokenEvidence:
    """Sums of a group of workers in a long and a short memory.

    counts: by source: requests, tokens, and tokens that were expected, [2, classes, 3, 3]. positions: sequences that
    reached a draft position, that passed it, and that drafted up to it, [2, classes, 3, positions]. ngrams: steps of
    sequences with n-grams, weighted by the square of the slope (see `Ratios`), tokens gained, weighted by the slope, steps
    of evaluated outputs, their verified tokens, [2, classes, 4]. arms: of outputs, by arm: steps without n-grams, with
    them (the same again where none were evaluated), of these those that drafted, their verified tokens, [2, classes, 4,
    lengths].
    """

    counts: Array
    positions: Array
    ngrams: Array
    arms: Array

    @classmethod
    def none(cls, max_length: int) -> TokenEvidence:
        """Before anything was seen."""
        shapes = (3, 3), (3, max_length), (4,), (4, max_length + 1)
        return cls(*(np.zeros((2, NUM_CLASSES, *shape)) for shape in shapes))

    def widen(self, max_length: int) -> None:
        """Make room for longer drafts. In evaluated outputs, the longest known one stands for them."""
        more = [(0, 0)] * 3 + [(0, max_length - self.positions.shape[-1])]
        self.positions, self.arms = np.pad(self.positions, more), np.pad(self.arms, more, mode="edge")

    def add(
        self,
        records: Sequence[StepRecord],
        histograms: Histograms,
        num_requests: float,
        ratios: Ratios,
        s: EstimatorSettings,
    ) -> None:
        """Learn from steps. histograms, num_requests: of these."""
        for record in records:
            for output in record.evaluations:
                self._add_output(output, ratios, s)
        per_row = num_requests / max(sum(sum(histogram) for _, histogram in histograms.values()), 1)
        for (kind, length, ngram), (num_steps, histogram) in histograms.items():
            rows, tokens = sum(histogram), num_tokens_of(histogram)
            if not rows:
                continue
            # Steps of one sequence are alike, so the short memory counts sequences.
            requests, short = rows * per_row, exp(-num_steps / s.short_memory)
            kept = exp(-requests / s.long_memory), short
            number = requests, requests + (1.0 - short) * rows / num_steps
            usual = rows * float(ratios.expected[kind, length, int(ngram)])
            self._count(NGRAMS if ngram else DRAFTS, kind, kept, number, tokens, usual)
            if ngram:
                slope = float(ratios.slope[length])
                gained = tokens - usual + rows * slope * float(ratios.gain[kind])
                self.ngrams[:, kind, :2] += rows * slope**2, slope * gained
            else:
                beyond = np.cumsum(histogram[::-1])[::-1]  # sequences with at least 0, 1, ... accepted tokens
                self.positions[:, kind, :2, :length] += beyond[:-1], beyond[1:]
                self.positions[:, kind, 2, length - 1] += rows

    def _count(
        self, source: int, kind: int, kept: tuple[float, ...], requests: tuple[float, ...], tokens: int, expected: float
    ) -> None:
        """Decay a class's evidence of a source, and count requests and tokens. kept, requests: by memory."""
        counts = self.counts[:, kind, source]
        for by_memory in ((self.positions, self.ngrams, self.arms)[source][:, kind].T, counts.T):
            by_memory *= kept
        counts[:, REQUESTS] += requests
        counts[:, TOKENS:] += tokens, expected

    def _add_output(self, output: OutputEvaluation, ratios: Ratios, s: EstimatorSettings) -> None:
        kind, tokens, lengths = output.request_class, output.num_output_tokens, self.arms.shape[-1]
        values, has_ngrams = _by_arm(output)
        values, kept = values * (tokens / output.num_tokens), (exp(-1.0 / s.long_memory), exp(-1.0 / s.short_memory))
        if has_ngrams:
            steps, _, verified = values[:, 1, 0]
            self._count(NGRAMS, kind, kept, (1.0, 1.0), tokens, steps * float(ratios.expected[kind, 0, 1]))
            self.ngrams[:, kind] += steps, tokens - steps, steps, verified
        if values.shape[2] < min(lengths, 2):
            return  # not evaluated for draft lengths
        values = values[:, :, np.minimum(np.arange(lengths), values.shape[2] - 1)]
        length = min(COMPARED_LENGTH, lengths - 1)
        expected = values[0, 0, length] * float(ratios.expected[kind, length, 0])
        self._count(OUTPUTS, kind, kept, (1.0, 1.0), tokens, expected)
        self.arms[:, kind] += values[0, 0], values[0, 1], values[1, 1], values[2, 1]

    def change(self, s: EstimatorSettings) -> float:
        """Difference of the tokens in both memories from those that were expected, in standard errors.

        The largest of all sources counts. Classes are added up, since most changes of the text concern all of them.
        """
        long, short = self.counts[..., REQUESTS]
        number = np.where((short >= LEAST_REQUESTS[0]) & (long >= LEAST_REQUESTS[1]), short, 0.0)
        if not number.any():
            return 0.0
        prior = s.prior_tokens / 4.0
        error = np.diff(np.log((self.counts[..., TOKENS] + prior) / (self.counts[..., EXPECTED] + prior)), axis=0)[0]
        spread = s.request_sd * np.sqrt((number + number**2 / np.maximum(long, 1e-9)).sum(axis=0) + 1e-9)
        return float((np.abs((number * error).sum(axis=0)) / spread).max())

    def forget(self, s: EstimatorSettings) -> None:
        """Replace the long memory by a part of the short one: the rest describes the text before the change."""
        for values in (self.counts, self.positions, self.ngrams, self.arms):
            values[:] = s.kept * values[1]


def _by_arm(output: OutputEvaluation) -> tuple[np.ndarray, bool]:
    """Steps, steps that drafted, and verified tokens, [3, 2, evaluated lengths]; True if n-gram arms were evaluated."""
    half = len(output.num_steps) // 2
    # The arm in the middle never drafts only if it is n-gram alone: then the second half are arms with n-grams.
    has_ngrams = len(output.num_steps) == 2 * half and not output.num_drafted_steps[half]
    lists = np.array([output.num_steps, output.num_drafted_steps, output.num_verified_tokens], dtype=float)
    return lists.reshape(3, 2, half) if has_ngrams else np.stack([lists, lists], axis=1), has_ngrams


@dataclass(frozen=True, eq=False)
class Ratios:
    """Estimated tokens per step.

    accepted: probability of a draft position given the one before, [classes, positions]; trials: evidence for it, all
    classes together, [positions]. expected: tokens per step, at least 1, [classes, lengths, 2]; drafted: share of steps
    that draft, and verified: tokens per step, all classes together, [lengths, 2]. gain: tokens per step that n-grams
    alone gain, [classes]; slope: share of that gain that remains with the draft model, [lengths]. num_ngram: requests
    that measured it.
    """

    accepted: Array
    trials: Array
    expected: Array
    drafted: Array
    verified: Array
    gain: Array
    slope: Array
    num_ngram: float


def unseen_acceptance(max_length: int, survival: Sequence[float], first: float) -> np.ndarray:
    """Acceptance by position before any report, [positions]: the profile's where it has one.

    survival: P(the first i draft tokens are all accepted).
    """
    accepted: list[float] = []
    for at in range(max_length):
        if at < len(survival):
            value = survival[at] / max(survival[at - 1] if at else 1.0, 1e-9)
        else:
            value = accepted[-1] * DEEPER if at else first
        accepted.append(min(max(value, LEAST), 1.0 - LEAST))
    return np.array(accepted)


def ratios_of(total: TokenEvidence, unseen: np.ndarray, trials: float, s: EstimatorSettings) -> Ratios:
    """Estimate tokens per step. unseen: acceptance by position before any report; trials: its weight."""
    prior = s.prior_tokens
    reached, passed, drafted_by_length = total.positions[0].transpose(1, 0, 2)
    everyone = _accepted_by_all(reached.sum(axis=0), passed.sum(axis=0), unseen, trials)
    accepted = (passed + prior * everyone) / (reached + prior)
    reach = np.cumprod(np.concatenate([np.ones((NUM_CLASSES, 1)), accepted], axis=1), axis=1)
    sums = np.cumsum(reach, axis=1)
    sums = sums * _unlike_requests(sums, drafted_by_length, s.request_sd)
    tokens, (plain, ngram, drafted, verified) = total.counts[0, :, OUTPUTS, TOKENS], total.arms[0].transpose(1, 0, 2)
    expected = 1.0 / _shrunk(plain, tokens, 1.0 / sums, prior)
    num_tokens, num_ngram = tokens.sum() + prior, ngram.sum(axis=0) + prior
    evaluated_gain = max(num_tokens / num_ngram[0] - 1.0, 0.0)
    slope = np.clip((MATCHED - expected.mean(axis=0)) / (MATCHED - 1.0), 0.0, 1.0)  # of the gain next to drafts
    weight, gained, steps, checked = total.ngrams[0].T
    mean_gain = gained.sum() / (weight.sum() + prior)
    gain = (gained + prior * mean_gain) / (weight + prior)
    evaluated = 1.0 / _shrunk(ngram, tokens, 1.0 / (expected + slope * mean_gain), prior)
    both = np.stack([expected, evaluated + slope * (gain[:, None] - evaluated[:, :1] + 1.0)], axis=2)
    # Steps that draft, and verified tokens. n-gram matches are assumed to be as frequent as the gain is large.
    lengths = np.arange(len(slope), dtype=float)
    matches = (1.0 - (drafted.sum(axis=0) + prior) / num_ngram) * ((mean_gain + 0.1) / (evaluated_gain + 0.1))
    drafts = np.stack([np.ones(len(slope)), np.clip(1.0 - matches, 0.0, 1.0)], axis=1) * (lengths > 0)[:, None]
    per_step = np.stack([lengths + 1.0, (verified.sum(axis=0) + prior * (lengths + 1.5)) / num_ngram], axis=1)
    per_step[0, 1] = (checked.sum() + 1.5 * prior) / (steps.sum() + prior)
    return Ratios(
        accepted,
        reached.sum(axis=0) + tokens.sum() * np.append(1.0, np.cumprod(everyone))[: len(everyone)],
        np.clip(both, 1.0, MAX_SPECULATION_LENGTH + 1.0),
        drafts,
        per_step,
        gain,
        slope,
        float(total.counts[0, :, NGRAMS, REQUESTS].sum()),
    )


def _unlike_requests(expected: np.ndarray, drafted: np.ndarray, spread: float) -> np.ndarray:
    """Factor on tokens per step since requests differ, [classes, lengths]. drafted: sequences by length, as they were run.

    spread: standard deviation of log tokens per step among requests, with drafts of COMPARED_LENGTH.
    """
    lengths = np.arange(expected.shape[1])
    slope = np.cumsum(np.diff(expected, axis=1, prepend=1.0) * lengths, axis=1) / expected  # d log E / d log p
    sigma = spread * slope / slope[:, [min(COMPARED_LENGTH, len(lengths) - 1)]].clip(1e-9)
    total = drafted.sum(axis=1)
    used = (sigma[:, 1:] * drafted).sum(axis=1) / np.maximum(total, 1e-9)
    factor: np.ndarray = np.where(total.any(), np.exp(-sigma * (sigma - used[:, None])), 1.0)
    return factor


def _accepted_by_all(reached: np.ndarray, passed: np.ndarray, unseen: np.ndarray, trials: float) -> np.ndarray:
    """Acceptance by position, all classes together: each shrunk towards the one before, [positions]."""
    accepted: list[float] = []
    for at, (prior, number, good) in enumerate(zip(unseen.tolist(), reached.tolist(), passed.tolist(), strict=True)):
        if at:
            prior = min(max(accepted[-1] * prior / float(unseen[at - 1]), LEAST), 1.0 - LEAST)
        accepted.append((good + trials * prior) / (number + trials))
    return np.array(accepted)


def _shrunk(sums: np.ndarray, tokens: np.ndarray, prior: np.ndarray, weight: float) -> np.ndarray:
    """Ratio per token by class. The prior of evaluated outputs is the histograms'; that of a class is the ratio of all."""
    share = (tokens + 1.0) / (tokens + 1.0).sum()
    usual = share @ prior
    everyone = (sums.sum(axis=0) + weight * usual) / (tokens.sum() + weight)
    values: np.ndarray = (sums + weight * prior * everyone / usual) / (tokens[:, None] + weight)
    return values


def log_variance(ratios: Ratios, base: int, settings: EstimatorSettings) -> np.ndarray:
    """Variance of the log tokens per step of every arm relative to the arm at a place, [arms]."""
    accepted = np.clip(ratios.accepted.mean(axis=0), LEAST, 1.0 - LEAST)
    sums = np.concatenate([[0.0], np.cumsum(np.cumprod(accepted))])
    share = np.maximum(sums[:, None] - sums[:-1], 0.0) / (1.0 + sums)[:, None]  # tokens from positions i on
    spread = (1.0 - accepted) / (accepted * (ratios.trials + settings.prior_tokens))
    length, ngram = divmod(base, 2)
    by_length = ((share[length] - share) ** 2) @ spread
    kinds = (np.arange(2) != ngram) * settings.request_sd**2 / (ratios.num_ngram + 1.0)
    variance: np.ndarray = (by_length[:, None] + kinds).reshape(-1)
    return variance
