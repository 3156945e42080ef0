"""Tokens per step: how many a sequence generates with each arm, by class of request. A matter of models and text alone.

Finished outputs tell it exactly for every arm (off-policy evaluation): steps per token r = S / T. Where only accepted
histograms come, positions tell it for lengths: p_i = passed_i / reached_i, and E_s = 1 + sum_j prod_{i<=j} p_i. Histograms
are the prior of evaluations, everybody's ratio that of a class.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import NamedTuple

import numpy as np

from speclen.records import NUM_CLASSES, OutputEvaluation, StepFlag, StepRecord

Array = np.ndarray

FIRST_ACCEPTED = 0.7  # probability of the first draft token before anything was seen
DEEPER = 0.98  # acceptance of a position never seen, relative to the one before
SHRINKAGE = 20.0  # trials that the position before counts for, and all classes together
REPORT_MEMORY = 600.0  # reports of a worker after which histograms have faded to 1/e
OUTPUT_MEMORY = 200.0  # the same for evaluated outputs
PRIOR_TOKENS = 128.0  # evaluated tokens that histograms count for
UNSEEN_NGRAM = 1.05  # steps per token of n-gram arms, relative to the same length, before any output was evaluated
OVERDISPERSION = 2.0  # variance of accepted runs relative to independent sequences: requests stay easy or hard
OUTPUT_SD = 0.3  # of the log ratio of two arms' steps through one output
UNUSABLE = frozenset({StepFlag.MIXED_LENGTHS, StepFlag.UNKNOWN})
# Two-sided CUSUM per class: allowance and threshold in standard deviations; what is remembered after it fires.
SLACK, THRESHOLD, KEPT = 0.5, 9.0, 0.05


class Histograms(NamedTuple):
    """Sequences that reached and passed each draft position in one step, by class, [classes, positions]."""

    reached: Array
    passed: Array


class TokenEvidence:
    """Counts of one worker. reached, passed: [classes, positions]; the rest [classes] or [classes, 2, lengths]."""

    STATE = ("reached", "passed", "tokens", "outputs", "steps", "drafted", "verified", "cusum", "output_cusum")

    def __init__(self, max_length: int) -> None:
        shape = (NUM_CLASSES, 2, max_length + 1)
        self.reached, self.passed = np.zeros((2, NUM_CLASSES, max_length))
        self.tokens, self.outputs = np.zeros((2, NUM_CLASSES))
        self.steps, self.drafted, self.verified = np.zeros((3, *shape))
        self.cusum, self.output_cusum = np.zeros((2, NUM_CLASSES, 2))

    @property
    def amount(self) -> float:
        """Tokens that this is evidence of."""
        return float(self.reached[:, :1].sum() + self.tokens.sum())

    def absorb(self, other: TokenEvidence) -> None:
        """Take the evidence of a worker that has left."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def extend(self, max_length: int) -> None:
        """Make room for longer lengths."""
        more = max_length - self.reached.shape[1]
        if more > 0:
            for name in ("reached", "passed", "steps", "drafted", "verified"):
                values = getattr(self, name)
                setattr(self, name, np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, more)]))

    def add(self, records: Sequence[StepRecord], ratios: Ratios) -> list[tuple[int, float]]:
        """Learn from steps; returns (class, statistic) of detected changes, after which little is remembered."""
        changes = self._add_histograms(records, ratios)
        for record in records:
            for output in record.evaluations:
                changes += self._add_output(output, ratios)
        return changes

    def _add_histograms(self, records: Sequence[StepRecord], ratios: Ratios) -> list[tuple[int, float]]:
        sums: dict[tuple[int, int], tuple[int, ...]] = {}  # by class and length
        for record in records:
            length = record.arm.speculation_length
            if record.arm.ngram or not length or (record.flags and UNUSABLE & record.flags):
                continue
            for kind, histogram in record.class_histograms or ((0, record.accepted_histogram),):
                known = sums.get((kind, length))
                sums[kind, length] = histogram if known is None else tuple(map(add, known, histogram))
        if not any(map(any, sums.values())):
            return []
        reached, passed = np.zeros((2, *self.reached.shape))
        for (kind, length), histogram in sums.items():
            runs = np.cumsum(histogram[::-1])[::-1]  # sequences with at least 0, 1, ... accepted tokens
            reached[kind, :length] += runs[:-1]
            passed[kind, :length] += runs[1:]
        return self._add_counts(reached, passed, len(records), ratios)

    def _add_counts(self, reached: Array, passed: Array, num_reports: int, ratios: Ratios) -> list[tuple[int, float]]:
        fade = float(np.exp(-num_reports / REPORT_MEMORY))
        self.reached, self.passed = self.reached * fade, self.passed * fade
        expected = reached * ratios.accepted
        spread = np.sqrt(OVERDISPERSION * (expected * (1.0 - ratios.accepted)).sum(axis=1) + 1e-9)
        z = np.clip((passed - expected).sum(axis=1) / spread, -4.0, 4.0)
        changes = [
            (kind, self._surprised(self.cusum, kind, float(z[kind]))) for kind in np.flatnonzero(reached[:, 0]).tolist()
        ]
        for kind, statistic in changes:
            if statistic:
                self._forget(kind)
        self.reached += reached
        self.passed += passed
        return [change for change in changes if change[1]]

    def _add_output(self, output: OutputEvaluation, ratios: Ratios) -> list[tuple[int, float]]:
        kind, num_lengths = output.request_class, self.steps.shape[2]
        values = np.zeros((3, 2, num_lengths))
        half = len(output.num_steps) // 2
        # The arm in the middle never drafts only if it is n-gram alone: then the second half are arms with n-grams.
        has_ngrams = len(output.num_steps) == 2 * half and not output.num_drafted_steps[half]
        per_kind = half if has_ngrams else len(output.num_steps)
        lists = np.array([output.num_steps, output.num_drafted_steps, output.num_verified_tokens], dtype=float)
        lists = lists.reshape(3, -1, per_kind)
        values[:, : lists.shape[1], :per_kind] = lists
        values[:, : lists.shape[1], per_kind:] = lists[:, :, -1:]
        if lists.shape[1] == 1:
            values[:, 1] = values[:, 0]
        whole = output.num_output_tokens / output.num_tokens
        fade = np.exp(-1.0 / OUTPUT_MEMORY)
        z = (
            (np.log(output.num_tokens / values[0].min()) - ratios.log_speed[kind]) / 0.5
            if self.outputs[kind] > 8
            else 0.0
        )
        statistic = self._surprised(self.output_cusum, kind, float(np.clip(z, -4.0, 4.0)))
        if statistic:
            self._forget(kind)
        self.tokens[kind] = self.tokens[kind] * fade + output.num_output_tokens
        self.outputs[kind] = self.outputs[kind] * fade + 1.0
        for name, new in zip(("steps", "drafted", "verified"), values, strict=True):
            held = getattr(self, name)
            held[kind] = held[kind] * fade + whole * new
        return [(kind, statistic)] if statistic else []

    @staticmethod
    def _surprised(cusum: Array, kind: int, z: float) -> float:
        up, down = cusum[kind].tolist()
        cusum[kind] = up, down = max(0.0, up + z - SLACK), max(0.0, down - z - SLACK)
        statistic: float = max(up, down)
        if statistic <= THRESHOLD:
            return 0.0
        cusum[kind] = 0.0
        return statistic

    def _forget(self, kind: int) -> None:
        for name in ("reached", "passed", "tokens", "outputs", "steps", "drafted", "verified"):
            getattr(self, name)[kind] *= KEPT


class Ratios(NamedTuple):
    """Estimated acceptance, and steps and tokens per generated token.

    accepted: probability of a draft position given the one before, [classes, positions]; trials: evidence for it, all
    classes together, [positions]. steps, drafted, verified: per token, [classes, 2, lengths]. outputs: evaluated ones.
    log_speed: log tokens per step of the best arm, [classes].
    """

    accepted: Array
    trials: Array
    steps: Array
    drafted: Array
    verified: Array
    outputs: float
    log_speed: Array


class TokenPrior:
    """Acceptance by position before anything was seen, and how many trials it counts for, [positions]."""

    STATE = ("accepted", "trials")

    def __init__(self, max_length: int) -> None:
        self.accepted = np.minimum(FIRST_ACCEPTED * DEEPER ** np.arange(max_length), 0.98)
        self.trials = np.full(max_length, SHRINKAGE)

    def extend(self, max_length: int) -> None:
        """Make room for longer lengths: positions never seen follow the last one."""
        while len(self.accepted) < max_length:
            last = self.accepted[-1] * DEEPER if len(self.accepted) else FIRST_ACCEPTED
            self.accepted, self.trials = np.append(self.accepted, last), np.append(self.trials, SHRINKAGE)

    def seed(self, survival: Sequence[float], num_rows: Sequence[int]) -> None:
        """Take acceptance from a profile, of limited weight."""
        survival_of = np.array(survival[: len(self.accepted)])
        before = np.append(1.0, survival_of[:-1])
        known = np.clip(survival_of / np.maximum(before, 1e-9), 0.02, 0.98)
        rows = np.array(num_rows[: len(known)], dtype=float) * before
        self.accepted[: len(known)], self.trials[: len(known)] = known, np.clip(rows, SHRINKAGE, 40.0)
        self.accepted[len(known) :] = known[-1] * DEEPER ** np.arange(1, len(self.accepted) - len(known) + 1)


def ratios_of(evidence: Sequence[TokenEvidence], weights: Sequence[float], prior: TokenPrior) -> Ratios:
    """Estimates from the evidence of some workers, each with its weight."""
    if not evidence:
        evidence, weights = [TokenEvidence(len(prior.accepted))], [1.0]
    total = {name: sum(w * getattr(e, name) for e, w in zip(evidence, weights, strict=True)) for name in _SUMMED}
    accepted, trials = _accepted(total["reached"], total["passed"], prior)
    survival = np.cumprod(accepted, axis=1)
    lengths = np.arange(accepted.shape[1] + 1)
    expected = 1.0 + np.concatenate([np.zeros((NUM_CLASSES, 1)), np.cumsum(survival, axis=1)], axis=1)
    steps = np.stack([1.0 / expected, UNSEEN_NGRAM / expected], axis=1)
    drafted, verified = steps * (lengths > 0), steps * (lengths + 1.0)
    shape = {"steps": steps, "drafted": drafted, "verified": verified}
    tokens = total["tokens"]
    known = {name: _shrunk(total[name], tokens, values) for name, values in shape.items()}
    speed = -np.log(known["steps"].min(axis=(1, 2)))
    everyone = np.cumprod(_accepted(total["reached"].sum(0)[None], total["passed"].sum(0)[None], prior)[0], axis=1)[0]
    trials = trials + tokens.sum() * np.append(1.0, everyone[:-1])[: len(trials)]
    return Ratios(
        accepted, trials, known["steps"], known["drafted"], known["verified"], float(total["outputs"].sum()), speed
    )


_SUMMED = ("reached", "passed", "tokens", "outputs", "steps", "drafted", "verified")


def _accepted(reached: Array, passed: Array, prior: TokenPrior) -> tuple[Array, Array]:
    """Acceptance by class and position, and the trials of all classes."""
    all_reached, all_passed = reached.sum(axis=0), passed.sum(axis=0)
    everyone = np.zeros(len(all_reached))
    ratio = prior.accepted / np.append(prior.accepted[:1], prior.accepted[:-1])
    for at in range(len(everyone)):
        mean = prior.accepted[0] if at == 0 else np.clip(everyone[at - 1] * ratio[at], 0.02, 0.98)
        weight = prior.trials[at]
        everyone[at] = (all_passed[at] + weight * mean) / (all_reached[at] + weight)
    by_class = (passed + SHRINKAGE * everyone) / (reached + SHRINKAGE)
    return by_class, all_reached


def _shrunk(sums: Array, tokens: Array, prior: Array) -> Array:
    """Per token: evaluations with histograms as their prior, and everybody's ratio as that of a class."""
    share = (tokens + 1.0) / (tokens + 1.0).sum()
    everyone_prior = np.tensordot(share, prior, 1)
    everyone = (sums.sum(axis=0) + PRIOR_TOKENS * everyone_prior) / (tokens.sum() + PRIOR_TOKENS)
    ratio = everyone / np.maximum(everyone_prior, 1e-9)
    values: Array = (sums + PRIOR_TOKENS * prior * ratio) / (tokens[:, None, None] + PRIOR_TOKENS)
    return values


def contrast_variance(ratios: Ratios, ngram: Array, length: Array) -> Array:
    """Variance of the log tokens per step of every arm relative to some arms, [n, 2, lengths].

    ngram, length: of the arms that they are compared with, [n].
    """
    accepted = np.clip(ratios.accepted.mean(axis=0), 0.02, 0.98)
    sums = np.concatenate([[0.0], np.cumsum(np.cumprod(accepted))])
    deeper = np.maximum(sums[:, None] - sums[:-1], 0.0)  # tokens from positions i on, [lengths, positions]
    share = deeper / (1.0 + sums)[:, None]
    spread = OVERDISPERSION * (1.0 - accepted) / (accepted * (ratios.trials + SHRINKAGE))
    by_length = ((share[:, None] - share) ** 2) @ spread
    kinds = (ngram[:, None] != np.arange(2)) * OUTPUT_SD**2 / (ratios.outputs + 1.0)
    variance: Array = kinds[:, :, None] + by_length[length][:, None]
    return variance
