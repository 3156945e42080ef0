"""Made-up outputs, and how many steps every arm takes through them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from speclen.records import NGRAM_MAX_TOKENS, Limits, OutputEvaluation
from speclen.worker.drafting.ngrams import LEAST_BESIDE_DRAFT

MAX_BATCH, MAX_LENGTH, KNOWN_NGRAM = 16, 8, 16
LIMITS = Limits(MAX_BATCH, MAX_LENGTH, ngram=True)
ARMS = tuple(LIMITS.arms())
# By request class (greedy, low and high temperature): share of outputs, and the draft model's chance to be right about a
# token in easy and in hard outputs. Chance that an output is easy; sd of an output's chance.
SHARES, EASY, HARD = (0.5, 0.25, 0.25), (0.85, 0.81, 0.74), (0.54, 0.48, 0.42)
EASY_SHARE, SPREAD = 0.6, 0.04
# Repetition: chances of a token to begin one and to go on; share of outputs that repeat at all; chance of the draft model
# inside a repetition. Wrong matches elsewhere: chance, and chance of each further token of one, as in a chat model's text.
BEGINS, GOES_ON, REPEATING, REPEATED = 0.07, 0.965, 0.8, 0.93
WRONG_MATCH, WRONG_GOES_ON = 0.3, 0.4
OUTPUT_TOKENS = (32, 128)


class Walk(NamedTuple):
    """Steps of every arm through an output, and of them those that draft; verified tokens. [arms]."""

    steps: np.ndarray
    drafting: np.ndarray
    verified: np.ndarray


class Text(NamedTuple):
    """An output. arrays: tokens of the match, copied, and how many tokens on the draft model is right, by position."""

    evaluation: OutputEvaluation
    arrays: np.ndarray
    walk: Walk


def run_ahead(right: np.ndarray) -> np.ndarray:
    """By position: how many values from there on are true, one after the other."""
    place = np.arange(len(right))
    wrong = np.where(right, len(right), place)
    ahead: np.ndarray = np.minimum.accumulate(wrong[::-1])[::-1] - place
    return ahead


def draw_text(rng: np.random.Generator, easy_share: float) -> Text:
    """An output of a request of any class."""
    kind, num_tokens = int(rng.choice(3, p=SHARES)), int(rng.integers(*OUTPUT_TOKENS))
    chance = (EASY if rng.random() < easy_share else HARD)[kind] + SPREAD * rng.standard_normal()
    repeats, uniform = np.zeros(num_tokens, dtype=bool), rng.random(num_tokens)
    if rng.random() < REPEATING:
        for at in range(1, num_tokens):
            repeats[at] = uniform[at] < (GOES_ON if repeats[at - 1] else BEGINS)
    drafted = rng.random(num_tokens) < np.where(repeats, REPEATED, chance)
    behind = np.concatenate([[0], run_ahead(repeats[::-1])[::-1][:-1]])  # repeated tokens right before a position
    wrong = (behind == 0) & (rng.random(num_tokens) < WRONG_MATCH)
    matches = np.where(wrong, rng.geometric(1.0 - WRONG_GOES_ON, num_tokens), np.minimum(behind, KNOWN_NGRAM))
    copied = np.where(wrong, 0, np.where(matches > 0, np.minimum(run_ahead(repeats), KNOWN_NGRAM), 0))
    arrays = np.array([matches, copied, run_ahead(drafted)])
    walk = walk_of(arrays)
    steps, drafting, verified = (tuple(each.tolist()) for each in walk)
    return Text(OutputEvaluation(kind, num_tokens, num_tokens, steps, drafting, verified), arrays, walk)


class Outputs:
    """Outputs of which requests take any: their evaluations and classes, and as arrays what they hold.

    walks: [texts, 3, arms]; worth: tokens per step, [texts, arms]; arrays: padded, [arrays, texts, longest].
    """

    def __init__(self, rng: np.random.Generator, number: int, easy_share: float) -> None:
        texts = [draw_text(rng, easy_share) for _ in range(number)]
        self.evaluations = [text.evaluation for text in texts]
        self.kinds = np.array([each.request_class for each in self.evaluations])
        self.num_tokens = np.array([each.num_tokens for each in self.evaluations])
        self.walks = np.array([text.walk for text in texts])
        self.worth = self.num_tokens[:, None] / self.walks[:, 0]
        self.arrays = np.zeros((len(texts[0].arrays), number, self.num_tokens.max()), dtype=np.int64)
        for at, text in enumerate(texts):
            self.arrays[:, at, : text.arrays.shape[1]] = text.arrays

    def survival(self, most: int) -> tuple[float, ...]:
        """Share of positions behind which the draft model is right about at least 1, 2, ... tokens."""
        ahead = np.concatenate([self.arrays[2, at, :tokens] for at, tokens in enumerate(self.num_tokens)])
        return tuple(float((ahead >= run).mean()) for run in range(1, most + 1))


def proposals(
    arrays: np.ndarray, ngram: np.ndarray | bool, lengths: np.ndarray | int, left: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of sequences at some positions: True where n-grams propose, tokens proposed, and of them accepted.

    arrays: as in `Text`, at those positions. left: tokens that the output has after this one.
    """
    matches, copied, ahead = arrays
    by_ngram = ngram & (matches >= np.where(lengths, LEAST_BESIDE_DRAFT, 1))
    offered = np.where(by_ngram, np.minimum(matches, NGRAM_MAX_TOKENS), lengths)
    return by_ngram, offered, np.minimum(np.where(by_ngram, copied, ahead), np.minimum(offered, left))


def walk_of(arrays: np.ndarray) -> Walk:
    """Step through an output with every arm at once."""
    num_tokens = arrays.shape[1]
    lengths, ngram = np.array([arm.speculation_length for arm in ARMS]), np.array([arm.ngram for arm in ARMS])
    at, steps, drafting, verified = np.zeros((4, len(ARMS)), dtype=np.int64)
    while (going := at < num_tokens).any():
        here = np.minimum(at, num_tokens - 1)
        by_ngram, offered, accepted = proposals(arrays[:, here], ngram, lengths, num_tokens - 1 - here)
        steps += going
        drafting += going & ~by_ngram & (lengths > 0)
        verified += np.where(going, 1 + offered, 0)
        at += 1 + accepted
    return Walk(steps, drafting, verified)
