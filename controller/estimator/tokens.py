"""Tokens per step: how many a sequence generates with each arm, by class of request. A matter of models and text alone.

Finished outputs tell it exactly for every arm (off-policy evaluation): steps per token r = S / T. Where only accepted
histograms come, positions tell it for lengths: p_i = passed_i / reached_i, and E_s = 1 + sum_j prod_{i<=j} p_i. Histograms
are the prior of evaluations, everybody's ratio that of a class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

import numpy as np

from speclen.controller.estimator import settings
from speclen.controller.estimator.saving import Array
from speclen.records import NUM_CLASSES, OutputEvaluation, StepFlag, StepRecord

UNUSABLE = frozenset({StepFlag.MIXED_LENGTHS, StepFlag.UNKNOWN})
# Two-sided CUSUM per class: allowance and threshold in standard deviations, the largest step, and what is remembered
# after it fires.

COUNTS = ("reached", "passed", "tokens", "outputs", "steps", "drafted", "verified", "ngrams")


@dataclass(frozen=True, eq=False)
class Ratios:
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


@dataclass(eq=False)
class TokenEvidence:
    """Fading counts of one worker.

    reached, passed: sequences that reached and passed each draft position, [classes, positions]. outputs, tokens: of
    finished outputs, [classes]; steps, drafted, verified: of these by arm, [classes, 2, lengths]. ngrams: of these and of
    outputs that were evaluated for n-grams alone: outputs, tokens, and by n-grams alone steps and verified tokens,
    [classes, 4]. cusum: of histograms and of outputs, [2, classes, 2].
    """

    reached: Array
    passed: Array
    tokens: Array
    outputs: Array
    steps: Array
    drafted: Array
    verified: Array
    ngrams: Array
    cusum: Array

    @classmethod
    def none(cls, max_length: int) -> TokenEvidence:
        """Before anything was seen."""
        by_arm = (NUM_CLASSES, 2, max_length + 1)
        shapes = [(NUM_CLASSES, max_length)] * 2 + [(NUM_CLASSES,)] * 2 + [by_arm] * 3
        shapes += [(NUM_CLASSES, 4), (2, NUM_CLASSES, 2)]
        return cls(*(np.zeros(shape) for shape in shapes))

    @property
    def amount(self) -> float:
        """Tokens that this is evidence of."""
        return float(self.reached[:, :1].sum() + self.tokens.sum())

    def absorb(self, other: TokenEvidence) -> None:
        """Take the evidence of a worker that has left."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def extend(self, max_length: int) -> None:
        """Make room for longer lengths."""
        more = max_length - self.reached.shape[1]
        for name in ("reached", "passed", "steps", "drafted", "verified"):
            values = getattr(self, name)
            setattr(self, name, np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, more)]))

    def add(self, records: Sequence[StepRecord], ratios: Ratios) -> tuple[bool, list[tuple[int, float]]]:
        """Learn from steps. Returns True where something was forgotten, and (class, statistic) of changed outputs.

        Histograms change with the requests under way: easy and hard ones stay so for many steps. Outputs are independent.
        """
        forgot = self._add_histograms(records, ratios)
        changes = [
            change for record in records for output in record.evaluations for change in self._add_output(output, ratios)
        ]
        return forgot or bool(changes), changes

    def _add_histograms(self, records: Sequence[StepRecord], ratios: Ratios) -> bool:
        sums: dict[tuple[int, int], tuple[int, ...]] = {}  # by class and length
        for record in records:
            length = record.arm.speculation_length
            if record.arm.ngram or not length or (record.flags and UNUSABLE & record.flags):
                continue
            for kind, histogram in record.class_histograms or ((0, record.accepted_histogram),):
                known = sums.get((kind, length))
                sums[kind, length] = histogram if known is None else tuple(map(add, known, histogram))
        if not any(map(any, sums.values())):
            return False
        reached, passed = np.zeros((2, *self.reached.shape))
        for (kind, length), histogram in sums.items():
            runs = list(accumulate(reversed(histogram)))[::-1]  # sequences with at least 0, 1, ... accepted tokens
            reached[kind, :length] += runs[:-1]
            passed[kind, :length] += runs[1:]
        fade = float(np.exp(-len(records) / settings.current.report_memory))
        self.reached, self.passed = self.reached * fade, self.passed * fade
        expected = reached * ratios.accepted
        variance = (1.0 + settings.current.alike * len(records)) * (expected * (1.0 - ratios.accepted)).sum(axis=1)
        z = (passed - expected).sum(axis=1) / np.sqrt(variance + 1e-9)
        changes = [
            change
            for kind in np.flatnonzero(reached[:, 0]).tolist()
            for change in self._detect(0, kind, float(z[kind]))
        ]
        self.reached += reached
        self.passed += passed
        return bool(changes)

    def _add_output(self, output: OutputEvaluation, ratios: Ratios) -> list[tuple[int, float]]:
        kind, fade = output.request_class, np.exp(-1.0 / settings.current.output_memory)
        whole, (values, has_ngrams) = output.num_output_tokens / output.num_tokens, _by_arm(output)
        if has_ngrams:
            alone = (1.0, output.num_output_tokens, *(whole * values[::2, 1, 0]))
            self.ngrams[kind] = self.ngrams[kind] * fade + alone
        if values.shape[2] < min(self.steps.shape[2], 2):
            return []  # nothing of the draft model
        values = values[:, :, np.minimum(np.arange(self.steps.shape[2]), values.shape[2] - 1)]
        z = (float(np.log(output.num_tokens / values[0].min())) - ratios.log_speed[kind]) / settings.current.output_sd
        changes = self._detect(1, kind, z) if self.outputs[kind] > 8 else []
        news = (output.num_output_tokens, 1.0, *(whole * values))
        for name, new in zip(("tokens", "outputs", "steps", "drafted", "verified"), news, strict=True):
            held = getattr(self, name)
            held[kind] = held[kind] * fade + new
        return changes

    def _detect(self, source: int, kind: int, z: float) -> list[tuple[int, float]]:
        """Follow a CUSUM; where it fires, forget most of a class. source: 0 for histograms, 1 for outputs."""
        z = min(max(z, -settings.current.largest_z), settings.current.largest_z)
        sums = np.maximum(self.cusum[source, kind] + (z - settings.current.slack, -z - settings.current.slack), 0.0)
        statistic = float(sums.max())
        fires = statistic > settings.current.threshold
        self.cusum[source, kind] = 0.0 if fires else sums
        if not fires:
            return []
        for name in COUNTS:
            getattr(self, name)[kind] *= settings.current.kept
        return [(kind, statistic)]


def _by_arm(output: OutputEvaluation) -> tuple[np.ndarray, bool]:
    """Steps, steps with a draft, and verified tokens, [3, 2, lengths that were evaluated]; True if with n-grams, too."""
    half = len(output.num_steps) // 2
    # The arm in the middle never drafts only if it is n-gram alone: then the second half are arms with n-grams.
    has_ngrams = len(output.num_steps) == 2 * half and not output.num_drafted_steps[half]
    lists = np.array([output.num_steps, output.num_drafted_steps, output.num_verified_tokens], dtype=float)
    return lists.reshape(3, 2, half) if has_ngrams else np.stack([lists, lists], axis=1), has_ngrams


def unseen_acceptance(max_length: int, survival: Sequence[float] = ()) -> np.ndarray:
    """Acceptance by position before anything was seen: a profile's as far as there is one, [positions].

    survival: P(the first i draft tokens are all accepted).
    """
    accepted: list[float] = []
    for at in range(max_length):
        if at < len(survival):
            value = survival[at] / max(survival[at - 1] if at else 1.0, 1e-9)
        else:
            value = accepted[-1] * settings.current.deeper if at else settings.current.first_accepted
        accepted.append(min(max(value, settings.current.least_accepted), 1.0 - settings.current.least_accepted))
    return np.array(accepted)


def ratios_of(evidence: Sequence[TokenEvidence], weights: Sequence[float], unseen: np.ndarray) -> Ratios:
    """Estimates from the evidence of some workers, one or more, each with its weight. unseen: acceptance, [positions]."""
    total = {name: sum(w * getattr(e, name) for e, w in zip(evidence, weights, strict=True)) for name in COUNTS}
    everyone = _accepted_by_all(total["reached"].sum(axis=0), total["passed"].sum(axis=0), unseen)
    accepted = (total["passed"] + settings.current.shrinkage * everyone) / (
        total["reached"] + settings.current.shrinkage
    )
    expected = 1.0 + np.pad(np.cumsum(np.cumprod(accepted, axis=1), axis=1), ((0, 0), (1, 0)))
    steps = np.minimum(np.stack([1.0 / expected, settings.current.unseen_ngram / expected], axis=1), 1.0)
    lengths, tokens = np.arange(accepted.shape[1] + 1), total["tokens"]
    by_histograms = {"steps": steps, "drafted": steps * (lengths > 0), "verified": steps * (lengths + 1.0)}
    known = {name: _shrunk(total[name], tokens, values) for name, values in by_histograms.items()}
    _follow_ngrams(known, total["ngrams"])
    reach = np.append(1.0, np.cumprod(everyone))[: len(everyone)]
    trials = total["reached"].sum(axis=0) + tokens.sum() * reach
    speed = -np.log(known["steps"].min(axis=(1, 2)))
    outputs = max(float(total["outputs"].sum()), float(total["ngrams"][:, 0].sum()))
    return Ratios(accepted, trials, **known, outputs=outputs, log_speed=speed)


def _follow_ngrams(known: dict[str, np.ndarray], ngrams: np.ndarray) -> None:
    """Let arms with n-grams follow n-grams alone, which more outputs were evaluated for."""
    _, tokens, steps, verified = ngrams.T
    for sums, names in ((steps, ("steps", "drafted")), (verified, ("verified",))):
        before = known[names[0]][:, 1:, :1]
        factor = _shrunk(sums[:, None, None], tokens, before) / before
        for name in names:
            known[name][:, 1:] *= factor


def _accepted_by_all(reached: np.ndarray, passed: np.ndarray, unseen: np.ndarray) -> np.ndarray:
    """Acceptance by position, all classes together: each shrunk towards the one before, [positions]."""
    accepted = np.zeros(len(reached))
    for at, prior in enumerate(unseen.tolist()):
        if at:
            prior = min(
                max(accepted[at - 1] * prior / unseen[at - 1], settings.current.least_accepted),
                1.0 - settings.current.least_accepted,
            )
        accepted[at] = (passed[at] + settings.current.shrinkage * prior) / (reached[at] + settings.current.shrinkage)
    return accepted


def _shrunk(sums: np.ndarray, tokens: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Per token: evaluations with histograms as their prior, and everybody's ratio as that of a class."""
    share = (tokens + 1.0) / (tokens + 1.0).sum()
    everyone_prior = np.tensordot(share, prior, 1)
    everyone = (sums.sum(axis=0) + settings.current.prior_tokens * everyone_prior) / (
        tokens.sum() + settings.current.prior_tokens
    )
    ratio = everyone / np.maximum(everyone_prior, 1e-9)
    values: np.ndarray = (sums + settings.current.prior_tokens * prior * ratio) / (
        tokens[:, None, None] + settings.current.prior_tokens
    )
    return values


def contrast_variance(ratios: Ratios, ngram: np.ndarray, length: np.ndarray, by_steps: bool) -> np.ndarray:
    """Variance of the log tokens per step of every arm relative to some arms, [n, 2, lengths].

    ngram, length: of the arms that they are compared with, [n]. by_steps: without that of n-grams, which only evaluated
    outputs tell.
    """
    accepted = np.clip(
        ratios.accepted.mean(axis=0), settings.current.least_accepted, 1.0 - settings.current.least_accepted
    )
    sums = np.concatenate([[0.0], np.cumsum(np.cumprod(accepted))])
    deeper = np.maximum(sums[:, None] - sums[:-1], 0.0)  # tokens from positions i on, [lengths, positions]
    share = deeper / (1.0 + sums)[:, None]
    spread = (
        settings.current.overdispersion * (1.0 - accepted) / (accepted * (ratios.trials + settings.current.shrinkage))
    )
    by_length = ((share[:, None] - share) ** 2) @ spread
    outputs = np.inf if by_steps else ratios.outputs
    kinds = (ngram[:, None] != np.arange(2)) * settings.current.output_sd**2 / (outputs + 1.0)
    variance: np.ndarray = kinds[:, :, None] + by_length[length][:, None]
    return variance
