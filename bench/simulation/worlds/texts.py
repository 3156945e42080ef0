"""Made-up outputs, and how many steps every arm takes through them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from speclen.bench.simulation.worlds.records import Arm, EvaluatedOutput

MAX_LENGTH, NGRAM_MATCH, NGRAM_TOKENS, KNOWN_NGRAM = 8, 3, 8, 16
ARMS = tuple(Arm(length, ngram) for ngram in (False, True) for length in range(MAX_LENGTH + 1))
# By request class (greedy, low and high temperature): share of outputs, and the draft model's chance to be right about a
# token in easy and in hard outputs. Chance that an output is easy; sd of an output's chance.
SHARES, EASY, HARD = (0.5, 0.25, 0.25), (0.85, 0.81, 0.74), (0.54, 0.48, 0.42)
EASY_SHARE, SPREAD = 0.6, 0.04
# Repetition: chances of a token to begin one and to go on; of a wrong match elsewhere; share of outputs that repeat at all;
# chance of the draft model inside a repetition.
BEGINS, GOES_ON, WRONG_MATCH, REPEATING, REPEATED = 0.07, 0.965, 0.02, 0.8, 0.93
OUTPUT_TOKENS = (32, 128)


class Walk(NamedTuple):
    """Steps of every arm through an output, and of them those that draft; verified tokens. [arms]."""

    steps: np.ndarray
    drafting: np.ndarray
    verified: np.ndarray


class Text(NamedTuple):
    """An output. ahead: by position, tokens from there on that the draft model gets right."""

    evaluated: EvaluatedOutput
    matches: np.ndarray
    proposed: np.ndarray
    copied: np.ndarray
    ahead: np.ndarray
    walk: Walk

    @property
    def tokens_per_step(self) -> np.ndarray:
        """By arm."""
        tokens: np.ndarray = len(self.matches) / self.walk.steps
        return tokens


def run_ahead(right: np.ndarray) -> np.ndarray:
    """By position: how many values from there on are true, one after the other."""
    place = np.arange(len(right))
    wrong = np.where(right, len(right), place)
    ahead: np.ndarray = np.minimum.accumulate(wrong[::-1])[::-1] - place
    return ahead


def draw_text(rng: np.random.Generator) -> Text:
    """An output of a request of any class."""
    kind, num_tokens = int(rng.choice(3, p=SHARES)), int(rng.integers(*OUTPUT_TOKENS))
    chance = (EASY if rng.random() < EASY_SHARE else HARD)[kind] + SPREAD * rng.standard_normal()
    repeats, uniform = np.zeros(num_tokens, dtype=bool), rng.random(num_tokens)
    if rng.random() < REPEATING:
        for at in range(1, num_tokens):
            repeats[at] = uniform[at] < (GOES_ON if repeats[at - 1] else BEGINS)
    drafted = rng.random(num_tokens) < np.where(repeats, REPEATED, chance)
    behind = np.concatenate([[0], run_ahead(repeats[::-1])[::-1][:-1]])  # repeated tokens right before a position
    wrong = (behind < NGRAM_MATCH) & (rng.random(num_tokens) < WRONG_MATCH)
    matches = np.where(wrong, rng.integers(NGRAM_MATCH, 6, num_tokens), np.minimum(behind, KNOWN_NGRAM))
    proposed = np.where(matches > 0, KNOWN_NGRAM, 0)
    copied = np.where(wrong, 0, np.where(matches > 0, np.minimum(run_ahead(repeats), KNOWN_NGRAM), 0))
    ahead = run_ahead(drafted)
    told = (np.asarray(each, dtype=np.uint8).tobytes() for each in (matches, proposed, copied, drafted))
    return Text(
        EvaluatedOutput(kind, *told), matches, proposed, copied, ahead, walk_of(matches, proposed, copied, ahead)
    )


def walk_of(matches: np.ndarray, proposed: np.ndarray, copied: np.ndarray, ahead: np.ndarray) -> Walk:
    """Step through an output with every arm at once."""
    num_tokens = len(matches)
    lengths, ngram = np.array([arm.draft_length for arm in ARMS]), np.array([arm.ngram for arm in ARMS])
    at, steps, drafting, verified = np.zeros((4, len(ARMS)), dtype=np.int64)
    while (going := at < num_tokens).any():
        here = np.minimum(at, num_tokens - 1)
        left = num_tokens - 1 - here
        by_ngram = ngram & (matches[here] >= NGRAM_MATCH)
        offered = np.where(by_ngram, np.minimum(proposed[here], NGRAM_TOKENS), lengths)
        accepted = np.minimum(np.where(by_ngram, copied[here], ahead[here]), np.minimum(offered, left))
        steps += going
        drafting += going & ~by_ngram & (lengths > 0)
        verified += np.where(going, 1 + offered, 0)
        at += 1 + accepted
    return Walk(steps, drafting, verified)
