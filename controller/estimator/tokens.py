"""Tokens per step: how many a sequence generates with each arm, by request class. It depends on the models and the text.

Off-policy evaluation of a finished output counts exactly how many steps S each arm would have taken for its T tokens, so
r = S / T steps per token. Histograms of accepted tokens estimate the same for draft lengths: p_i = passed_i / reached_i,
and E_k = 1 + sum_j prod_{i<=j} p_i. They are the prior of evaluated outputs, and the ratio over all classes is the prior of
each class. n-grams add g tokens per step to plain decoding. Outputs that were evaluated for n-grams alone measure g, and so
does every step that used n-grams.

Requests differ in acceptance. Those whose drafts are rejected take more steps, and more so with long drafts, so E_k is too
high for lengths above those in use. Let log E_k of a request be mu_k + sigma_k z with a normal z, weighted by tokens.
In steps with draft length j a request counts in proportion to 1 / E_j, and E_k appears exp(sigma_k (sigma_k - sigma_j))
times too high. sigma_k is proportional to d log E_k / d log p. Its scale is measured: successive steps have the same
sequences, so the covariance of their tokens is the variance among requests.

All sums are averaged over requests in two memories. Where the short one differs significantly from the long one, the text
has changed, and the short one replaces the long one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, sqrt

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
PAIR_MEMORY = 1024.0  # steps over which the variance among requests is averaged
MOST_PAIRED = 8  # sequences of a class in a step: in larger batches, deviations that all share would dominate
MOST_SPREAD = 0.5  # standard deviation of log tokens per step among requests; more is a change of the text
LEAST_REQUESTS = 2.0, 8.0  # in the short and in the long memory, before they are compared
UNUSABLE = frozenset({StepFlag.MIXED_LENGTHS, StepFlag.UNKNOWN})
# Sources of evidence: histograms of drafts, steps with n-grams, outputs evaluated for n-grams alone, and for every arm.
DRAFT_STEPS, NGRAM_STEPS, NGRAM_OUTPUTS, ALL_ARM_OUTPUTS = range(4)


@dataclass(eq=False)
class TokenEvidence:
    """Sums of one worker in a long and a short memory.

    requests: by source, [2, classes, 4]. positions: sequences that reached a draft position, that passed it, and that
    drafted up to it, [2, classes, 3, positions]. pairs: of successive steps with drafts, the product of the relative
    deviations of their tokens, per sequence, the deviations, their number, and the products to expect at a spread of 1, [2,
    classes, 4]. ngram_steps: steps of sequences with n-grams, tokens gained, all their tokens, and those expected, [2,
    classes, 4]. ngram_outputs: tokens of evaluated outputs, and with n-grams alone their steps and verified tokens, [2,
    classes, 3]. tokens: of outputs evaluated for every arm, [2, classes]; arms: their steps, steps that drafted and
    verified tokens, [2, classes, 3, 2, lengths]. logs: log tokens per step of the outputs of both evaluated sources,
    and its square, [2, classes, 2, 2].
    """

    requests: Array
    positions: Array
    pairs: Array
    ngram_steps: Array
    ngram_outputs: Array
    tokens: Array
    arms: Array
    logs: Array

    @classmethod
    def none(cls, max_length: int) -> TokenEvidence:
        """Before anything was seen."""
        shapes = (4,), (3, max_length), (4,), (4,), (3,), (), (3, 2, max_length + 1), (2, 2)
        return cls(*(np.zeros((2, NUM_CLASSES, *shape)) for shape in shapes))

    @classmethod
    def sum_of(cls, evidence: Sequence[TokenEvidence]) -> TokenEvidence:
        """The evidence of some workers together."""
        return cls(*(sum(getattr(each, name) for each in evidence) for name in cls.__annotations__))

    def absorb(self, other: TokenEvidence) -> None:
        """Add the evidence of another worker. If it has shorter lengths, its longest one stands for all longer ones."""
        for name in vars(self):
            mine, its = getattr(self, name), getattr(other, name)
            more = mine.shape[-1] - its.shape[-1]
            if more and name in ("positions", "arms"):
                rest = its[..., -1:] if name == "arms" else np.zeros((*its.shape[:-1], 1))
                its = np.concatenate([its, np.repeat(rest, more, axis=-1)], axis=-1)
            setattr(self, name, mine + its)

    def add(self, records: Sequence[StepRecord], ratios: Ratios, settings: EstimatorSettings) -> None:
        """Learn from steps."""
        usual, steepness = ratios.expected[:, 0].tolist(), ratios.steepness.tolist()
        sums: dict[tuple[int, int, bool], list[int]] = {}  # histograms by class, length and n-grams
        num_steps: Counter[tuple[int, int, bool]] = Counter()
        now: dict[int, tuple[float, float]] = {}
        pairs = np.zeros((NUM_CLASSES, 4))
        started = 0
        for record in records:
            before, now = now, {}
            arm, started = record.arm, started + record.num_new_sequences
            for output in record.evaluations:
                self._add_output(output, settings)
            if arm == (0, False) or (record.flags and UNUSABLE & record.flags):
                continue
            for kind, runs in record.class_histograms or ((0, record.accepted_histogram),):
                key = kind, arm.speculation_length, arm.ngram
                known = sums.get(key)
                sums[key] = list(runs) if known is None else [a + b for a, b in zip(known, runs, strict=True)]
                num_steps[key] += 1
                if not arm.ngram and 0 < (rows := sum(runs)) <= MOST_PAIRED:
                    deviation = num_tokens_of(runs) / (rows * usual[kind][arm.speculation_length]) - 1.0
                    scaled = min(max(deviation * sqrt(rows), -1.0), 1.0)
                    now[kind] = scaled, steepness[kind][arm.speculation_length]
                    if kind in before:
                        pairs[kind] += scaled * before[kind][0], scaled, 1.0, now[kind][1] * before[kind][1]
        self.pairs[:] = self.pairs * exp(-len(records) / PAIR_MEMORY) + pairs
        counts = {key: sum(histogram) for key, histogram in sums.items()}
        per_row = max(started / max(sum(counts.values()), 1), 1.0 / settings.request_steps)
        for key, histogram in sums.items():
            kind, length, ngram = key
            rows = counts[key]
            if not rows:
                continue
            self._fade_steps(
                NGRAM_STEPS if ngram else DRAFT_STEPS, kind, num_steps[key], rows, rows * per_row, settings
            )
            if ngram:
                self._add_own(kind, length, histogram, ratios)
            else:
                beyond = np.cumsum(histogram[::-1])[::-1]  # sequences with at least 0, 1, ... accepted tokens
                self.positions[:, kind, 0, :length] += beyond[:-1]
                self.positions[:, kind, 1, :length] += beyond[1:]
                self.positions[:, kind, 2, length - 1] += rows

    def _fade(self, source: int, kind: int, requests: float, settings: EstimatorSettings) -> None:
        """Decay a class's evidence from outputs, and count the new outputs."""
        for memory, length in enumerate((settings.long_memory, settings.short_memory)):
            self._keep(source, kind, memory, exp(-requests / length), requests)

    def _fade_steps(
        self, source: int, kind: int, num_steps: int, rows: int, requests: float, settings: EstimatorSettings
    ) -> None:
        """Decay a class's evidence from steps, and count the new ones.

        Steps of one sequence are alike, so the short memory counts sequences. rows: sequences in these steps, summed over
        steps; requests: that began.
        """
        self._keep(source, kind, 0, exp(-requests / settings.long_memory), requests)
        kept = exp(-num_steps / settings.short_steps)
        self._keep(source, kind, 1, kept, requests + (1.0 - kept) * rows / num_steps)

    def _keep(self, source: int, kind: int, memory: int, kept: float, requests: float) -> None:
        (self.positions, self.ngram_steps, self.ngram_outputs, self.arms)[source][memory, kind] *= kept
        if source >= NGRAM_OUTPUTS:
            self.logs[memory, kind, source - NGRAM_OUTPUTS] *= kept
        if source == ALL_ARM_OUTPUTS:
            self.tokens[memory, kind] *= kept
        self.requests[memory, kind, source] = self.requests[memory, kind, source] * kept + requests

    def _add_own(self, kind: int, length: int, histogram: list[int], ratios: Ratios) -> None:
        """Count the tokens that n-grams added to those of the draft model."""
        slope = float(ratios.slope[length])
        rows, tokens = sum(histogram), sum(at * number for at, number in enumerate(histogram, 1))
        gained = tokens - rows * float(ratios.expected[kind, 1, length] - slope * ratios.gain[kind])
        expected = rows * float(ratios.expected[kind, 1, length])
        self.ngram_steps[:, kind] += rows * slope**2, slope * gained, tokens, expected

    def _add_output(self, output: OutputEvaluation, settings: EstimatorSettings) -> None:
        kind, whole = output.request_class, output.num_output_tokens / output.num_tokens
        values, has_ngrams = _by_arm(output)
        if has_ngrams:
            self._fade(NGRAM_OUTPUTS, kind, 1.0, settings)
            self.ngram_outputs[:, kind] += (output.num_output_tokens, *(whole * values[::2, 1, 0]))
            log_speed = float(np.log(output.num_tokens / values[0, 1, 0]))
            self.logs[:, kind, 0] += log_speed, log_speed**2
        if values.shape[2] < min(self.arms.shape[-1], 2):
            return  # not evaluated for draft lengths
        self._fade(ALL_ARM_OUTPUTS, kind, 1.0, settings)
        values = values[:, :, np.minimum(np.arange(self.arms.shape[-1]), values.shape[2] - 1)]
        self.arms[:, kind] += whole * values
        self.tokens[:, kind] += output.num_output_tokens
        log_speed = float(np.log(output.num_tokens / values[0, 0].min()))
        self.logs[:, kind, 1] += log_speed, log_speed**2

    def changes(self, settings: EstimatorSettings) -> list[tuple[int, float]]:
        """Request classes whose text has changed, each with the difference in standard errors."""
        long, short = self.requests
        if not (short >= LEAST_REQUESTS[0]).any():
            return []
        speed, variance = self._log_speed(settings), self._variance(settings)
        number = short.copy()
        number[:, NGRAM_OUTPUTS:] *= (
            1.0 + short[:, NGRAM_OUTPUTS:] / settings.short_memory
        )  # of a mean with exponential weights
        number[(short < LEAST_REQUESTS[0]) | (long < LEAST_REQUESTS[1])] = 0.0
        # Each class relative to its own past, and all classes together, since most changes concern all of them.
        weighted, spread2 = number * (speed[1] - speed[0]), variance * (number + number**2 / np.maximum(long, 1e-9))
        of_class = np.abs(weighted) / np.sqrt(spread2 + 1e-9)
        of_all = np.abs(weighted.sum(axis=0)) / np.sqrt(spread2.sum(axis=0) + 1e-9)
        largest = np.maximum(of_class, of_all * (number > 0)).max(axis=1)
        return [(int(kind), float(largest[kind])) for kind in np.flatnonzero(largest > settings.change)]

    def forget(self, kind: int, settings: EstimatorSettings) -> None:
        """Replace a class's long memory by a part of the short one: the rest describes the text before the change."""
        for name in vars(self):
            values = getattr(self, name)
            values[:, kind] = settings.kept * values[1, kind]

    def _log_speed(self, s: EstimatorSettings) -> np.ndarray:
        """Log tokens per step in both memories by source, [2, classes, 4]."""
        reached, passed, _ = np.moveaxis(self.positions[..., :COMPARED_LENGTH], 2, 0)
        long = (passed[0] + s.prior_tokens * s.first_accepted) / (reached[0] + s.prior_tokens)
        accepted = (passed + s.prior_tokens * long) / (reached + s.prior_tokens)
        tokens, expected = np.moveaxis(self.ngram_steps[..., 2:], -1, 0)
        drafted = self.arms[:, :, 0, 0].min(axis=-1)
        found = [
            np.log(1.0 + np.cumprod(accepted, axis=-1).sum(axis=-1)),
            np.log(np.maximum(tokens, 1.0) / np.maximum(expected, 1.0)),
            np.log(np.maximum(self.ngram_outputs[..., 0], 1.0) / np.maximum(self.ngram_outputs[..., 1], 1.0)),
            np.log(np.maximum(self.tokens, 1.0) / np.maximum(drafted, 1.0)),
        ]
        return np.stack(found, axis=-1)

    def _variance(self, settings: EstimatorSettings) -> np.ndarray:
        """Variance of log tokens per step among requests, by source, [classes, 4]. Outputs measure it; it has a floor."""
        number = self.requests[0, :, NGRAM_OUTPUTS:] + 1e-9
        total, squares = np.moveaxis(self.logs[0], -1, 0)
        spread = np.maximum(squares - total**2 / number, 0.0)
        least = settings.request_sd**2
        alone, whole = np.maximum((8.0 * least + spread) / (8.0 + number), least).T
        return np.stack([whole, alone, alone, whole], axis=-1)


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
    classes together, [positions]. expected: tokens per step, at least 1, [classes, 2, lengths]; drafted: share of steps
    that draft; verified: tokens per step; the same shape. gain: tokens per step that n-grams alone gain, [classes]; slope:
    share of that gain that remains with the draft model, [lengths]. num_ngram: requests that measured it. steepness: see
    `_steepness`.
    """

    accepted: Array
    trials: Array
    expected: Array
    drafted: Array
    verified: Array
    gain: Array
    slope: Array
    num_ngram: float
    steepness: Array


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
    reached, passed, drafted_by_length = total.positions[0].transpose(1, 0, 2)
    everyone = _accepted_by_all(reached.sum(axis=0), passed.sum(axis=0), unseen, trials)
    accepted = (passed + s.prior_tokens * everyone) / (reached + s.prior_tokens)
    sums = np.concatenate([np.ones((NUM_CLASSES, 1)), 1.0 + np.cumsum(np.cumprod(accepted, axis=1), axis=1)], axis=1)
    steepness = _steepness(sums)
    products, deviations, count, scale = total.pairs[0].T
    covariance = (products - deviations**2 / np.maximum(count, 1.0)).sum()
    variance = (covariance + s.request_steps * s.request_sd**2) / (scale.sum() + s.request_steps)
    spread = steepness * np.sqrt(np.clip(variance, 0.0, MOST_SPREAD**2))
    usual_spread = (spread[:, 1:] * drafted_by_length).sum(axis=1) / np.maximum(drafted_by_length.sum(axis=1), 1e-9)
    if drafted_by_length.any():
        sums *= np.exp(-spread * (spread - usual_spread[:, None]))
    tokens, lengths = total.tokens[0], np.arange(sums.shape[1])
    steps, drafted, verified = total.arms[0].transpose(1, 0, 2, 3)
    expected = 1.0 / _shrunk(steps[:, 0], tokens, 1.0 / sums, s.prior_tokens)
    # The gain of n-grams alone, and the share of it that remains with the draft model.
    whole = (tokens.sum() + s.prior_tokens) / (steps.sum(axis=0) + s.prior_tokens)
    usual = np.maximum((MATCHED - expected.mean(axis=0)) / (MATCHED - 1.0), 0.0)
    slope = np.clip((whole[1] - whole[0] + 0.2 * usual) / (max(whole[1, 0] - 1.0, 0.0) + 0.2), 0.0, 1.0)
    slope[0] = 1.0
    own, alone = total.ngram_steps[0], total.ngram_outputs[0]
    num_steps, gained = own[:, 0] + alone[:, 1], own[:, 1] + alone[:, 0] - alone[:, 1]
    usual_gain = gained.sum() / (num_steps.sum() + s.prior_tokens)
    gain = (gained + s.prior_tokens * usual_gain) / (num_steps + s.prior_tokens)
    evaluated = 1.0 / _shrunk(steps[:, 1], tokens, 1.0 / (expected + slope * usual_gain), s.prior_tokens)
    with_ngrams = evaluated + slope * (gain - (evaluated[:, 0] - 1.0))[:, None]
    both = np.clip(np.stack([expected, with_ngrams], axis=1), 1.0, MAX_SPECULATION_LENGTH + 1.0)
    # Steps that draft, and verified tokens. n-gram matches are assumed to be as frequent as the gain is large.
    count = steps.sum(axis=0) + s.prior_tokens
    share = np.where(lengths > 0, (drafted.sum(axis=0) + s.prior_tokens) / count, 0.0)
    matches = (1.0 - share[1]) * ((gain + 0.1) / (evaluated[:, 0] - 0.9).clip(0.1))[:, None]
    drafts = np.stack([np.broadcast_to(share[0], sums.shape), np.clip(1.0 - matches, 0.0, 1.0) * (lengths > 0)], axis=1)
    per_step = (verified.sum(axis=0) + s.prior_tokens * (lengths + [[1.0], [1.5]])) / count
    per_step[1, 0] = (alone[:, 2].sum() + 1.5 * s.prior_tokens) / (alone[:, 1].sum() + s.prior_tokens)
    reach = np.append(1.0, np.cumprod(everyone))[: len(everyone)]
    return Ratios(
        accepted,
        reached.sum(axis=0) + tokens.sum() * reach,
        both,
        drafts,
        np.broadcast_to(per_step, both.shape).copy(),
        gain,
        slope,
        float(total.requests[0, :, NGRAM_STEPS : NGRAM_OUTPUTS + 1].sum()),
        steepness,
    )


def _steepness(expected: np.ndarray) -> np.ndarray:
    """Growth of log tokens per step with log acceptance, relative to COMPARED_LENGTH, [classes, lengths]."""
    lengths = np.arange(expected.shape[1])
    slope = np.cumsum(np.diff(expected, axis=1, prepend=1.0) * lengths, axis=1) / expected
    steepness: np.ndarray = slope / slope[:, [min(COMPARED_LENGTH, len(lengths) - 1)]].clip(1e-9)
    return steepness


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
    ngram, length = divmod(base, len(sums))
    by_length = ((share[length] - share) ** 2) @ spread
    kinds = (np.arange(2) != ngram) * settings.request_sd**2 / (ratios.num_ngram + 1.0)
    variance: np.ndarray = (kinds[:, None] + by_length).reshape(-1)
    return variance
