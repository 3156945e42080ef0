"""Outputs of simulated requests, and the number of steps that every arm needs for them."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from speclen.records import NGRAM_MAX_TOKENS, Arm, Limits, OutputEvaluation
from speclen.worker.requests.ngrams import LEAST_BESIDE_DRAFT

LONGEST_MATCH = 16
DRAFTS, OFFERED = 16, 32  # bits at which a code of `Outputs` has these counts; accepted tokens are below


class Texts(NamedTuple):
    """Properties of the outputs of requests.

    shares: of request classes (greedy, low and high temperature). easy, hard: by class, the probability that the draft model
    predicts a token; easy_share: share of easy outputs; spread: standard deviation of the probability between outputs;
    deeper: factor on it for each further draft position. repeating: share of outputs that repeat earlier text; begins,
    continues: probabilities that a token begins or continues a repetition; repeated: probability of the draft model inside
    one. wrong_match: probability of an n-gram match elsewhere; wrong_continues: that such a match has one more token.
    number: outputs drawn per world, from which requests choose.
    """

    shares: tuple[float, ...] = (0.5, 0.25, 0.25)
    easy: tuple[float, ...] = (0.85, 0.81, 0.74)
    hard: tuple[float, ...] = (0.54, 0.48, 0.42)
    easy_share: float = 0.6
    spread: float = 0.04
    deeper: float = 1.0
    repeating: float = 0.8
    begins: float = 0.07
    continues: float = 0.965
    repeated: float = 0.93
    wrong_match: float = 0.3
    wrong_continues: float = 0.4
    num_tokens: tuple[int, int] = (32, 128)
    prompt_tokens: tuple[int, int] = (100, 101)
    number: int = 200


class Outputs:
    """Outputs drawn for a world.

    num_tokens, kinds, prompts: [outputs]. codes: [arms, outputs * longest], by arm and position: accepted tokens, whether
    the draft model drafts, and tokens offered, packed so that one sum gives all three. walks: steps, drafting steps and
    verified tokens of every arm through an output, [3, arms, outputs].
    """

    def __init__(self, rng: np.random.Generator, texts: Texts, limits: Limits) -> None:
        self.arms, number = limits.arms(), texts.number
        self.num_tokens = rng.integers(*texts.num_tokens, size=number)
        self.prompts = rng.integers(*texts.prompt_tokens, size=number)
        self.longest = int(self.num_tokens.max())
        self.kinds = rng.choice(len(texts.shares), number, p=texts.shares)
        shape = number, self.longest
        inside = np.arange(self.longest) < self.num_tokens[:, None]
        easy = rng.random(number) < texts.easy_share
        mean = np.where(easy, np.array(texts.easy)[self.kinds], np.array(texts.hard)[self.kinds])
        chance = np.clip(mean + texts.spread * rng.standard_normal(number), 0.02, 0.98)
        repeats = self._repetitions(rng, texts, shape) & inside
        uniform = rng.random(shape)
        self.ahead = self._drafted(
            uniform, np.where(repeats, texts.repeated, chance[:, None]), texts.deeper, limits.max_speculation_length
        )
        behind = np.zeros(shape, dtype=np.int64)  # repeated tokens right before a position
        behind[:, 1:] = run_ahead(repeats[:, ::-1])[:, ::-1][:, :-1]
        wrong = (behind == 0) & (rng.random(shape) < texts.wrong_match)
        guessed = rng.geometric(1.0 - texts.wrong_continues, shape)
        matches = np.where(wrong, guessed, np.minimum(behind, LONGEST_MATCH))
        copied = np.where(wrong | (matches == 0), 0, np.minimum(run_ahead(repeats), LONGEST_MATCH))
        left = np.maximum(self.num_tokens[:, None] - 1 - np.arange(self.longest), 0)
        self.codes = np.stack([self._codes(arm, matches, copied, left) for arm in self.arms])
        self.walks = self._walk()
        self.evaluation = cache(self._evaluation)

    @staticmethod
    def _repetitions(rng: np.random.Generator, texts: Texts, shape: tuple[int, int]) -> np.ndarray:
        """True where a token repeats earlier text."""
        uniform, repeats = rng.random(shape), np.zeros(shape, dtype=bool)
        repeating = rng.random(shape[0]) < texts.repeating
        for at in range(1, shape[1] if texts.repeating else 0):
            chance = np.where(repeats[:, at - 1], texts.continues, texts.begins)
            repeats[:, at] = repeating & (uniform[:, at] < chance)
        return repeats

    @staticmethod
    def _drafted(uniform: np.ndarray, chance: np.ndarray, deeper: float, most: int) -> np.ndarray:
        """By position: number of consecutive tokens from there on that the draft model predicts, at most `most`."""
        ahead = np.zeros(uniform.shape, dtype=np.int64)
        right = np.ones(uniform.shape, dtype=bool)
        for depth in range(min(most, uniform.shape[1])):
            right[:, : uniform.shape[1] - depth] &= (uniform < chance * deeper**depth)[:, depth:]
            right[:, uniform.shape[1] - depth :] = False
            ahead += right
        return ahead

    def _codes(self, arm: Arm, matches: np.ndarray, copied: np.ndarray, left: np.ndarray) -> np.ndarray:
        length = arm.speculation_length
        by_ngram = (matches >= (LEAST_BESIDE_DRAFT if length else 1)) & arm.ngram
        offered = np.where(by_ngram, np.minimum(matches, NGRAM_MAX_TOKENS), length)
        accepted = np.minimum(np.where(by_ngram, copied, self.ahead), np.minimum(offered, left))
        drafts = ~by_ngram & (length > 0)
        packed: np.ndarray = (accepted + (drafts.astype(np.int64) << DRAFTS) + (offered << OFFERED)).reshape(-1)
        return packed

    def _walk(self) -> np.ndarray:
        """Step through all outputs with all arms at once."""
        shape = len(self.arms), len(self.num_tokens)
        first = np.arange(shape[0])[:, None] * self.codes.shape[1] + np.arange(shape[1]) * self.longest
        at, steps, total = np.zeros((3, *shape), dtype=np.int64)
        flat = self.codes.reshape(-1)
        while (going := at < self.num_tokens).any():
            code = flat[first + np.minimum(at, self.longest - 1)]
            steps += going
            total += np.where(going, code, 0)
            at += np.where(going, 1 + (code & 0xFFFF), 0)
        return np.stack([steps, (total >> DRAFTS) & 0xFFFF, steps + (total >> OFFERED)])

    def _evaluation(self, text: int, whole: bool) -> OutputEvaluation:
        """Off-policy evaluation of an output, for every arm, or for plain decoding and n-grams alone."""
        every = 1 if whole else len(self.arms) // 2
        num_tokens = int(self.num_tokens[text])
        steps, drafted, verified = (tuple(each[::every, text].tolist()) for each in self.walks)
        return OutputEvaluation(int(self.kinds[text]), num_tokens, num_tokens, steps, drafted, verified)


def run_ahead(right: np.ndarray) -> np.ndarray:
    """By position: number of consecutive True values from there on. [texts, positions]"""
    place = np.arange(right.shape[1])
    wrong = np.where(right, right.shape[1], place)
    ahead: np.ndarray = np.minimum.accumulate(wrong[:, ::-1], axis=1)[:, ::-1] - place
    return ahead
