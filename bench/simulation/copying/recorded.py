"""Rows in the middle of recorded texts: what any plan would have done with them is known, token by token.

Made by `scripts/record_texts.py` from the tracks that `speclen bench serve` serves.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from speclen.bench.simulation.copying.machine import Outcome
from speclen.controller.estimator.plans.plan import Plan

FILE = Path(__file__).with_name("recorded.npz")
MOST_PROPOSED = 16


class RecordedTexts(NamedTuple):
    """All recorded tokens, and where texts of one mix begin, [texts]; the others by token, as the next one.

    match: longest match before it; proposed, copied: tokens that a copy would propose, and that are right; drafted: tokens
    from there on that the draft model foresees, one after the other; left: tokens to the text's end.
    """

    begins: np.ndarray
    match: np.ndarray
    proposed: np.ndarray
    copied: np.ndarray
    drafted: np.ndarray
    left: np.ndarray

    def rows(self, count: int, rng: np.random.Generator) -> RecordedRows:
        """Rows at random places."""
        return RecordedRows(self, count, rng)


def recorded_texts(mix: str) -> RecordedTexts:
    """Texts of one mix of requests."""
    with np.load(FILE) as file:
        tokens, told, chosen = file["tokens"], file["told"].astype(int), file["mix"] == mix
    ends, place = tokens.cumsum(), np.arange(len(told))
    last = np.repeat(ends, tokens)
    wrong = np.where(told[:, 3] == 0, place, len(told))
    stops = np.minimum(np.minimum.accumulate(wrong[::-1])[::-1], last)
    match, proposed, copied = told[:, :3].T
    return RecordedTexts((ends - tokens)[chosen], match, proposed, copied, stops - place, last - place)


class RecordedRows:
    """Rows that are at some place of some text; a row whose text ends begins another one, of `text`."""

    def __init__(self, text: RecordedTexts, count: int, rng: np.random.Generator) -> None:
        self.text, self.rng = text, rng
        begins = rng.choice(text.begins, count)
        self.place = begins + (rng.random(count) * text.left[begins]).astype(int)

    def step(self, plan: Plan, batch: int) -> Outcome:
        """One step of the first rows."""
        text, place = self.text, self.place[:batch]
        most = text.left[place] - 1
        match = text.match[place]
        proposed = np.minimum(text.proposed[place], np.minimum(plan.copy_max_tokens, most))
        proposed = np.where(match >= max(plan.copy_min_match, 1), proposed, 0)
        drafted = np.where(proposed > 0, 0, np.minimum(plan.draft_length, most))
        copied = np.minimum(text.copied[place], proposed)
        accepted = np.minimum(text.drafted[place], drafted)
        done = 1 + copied + accepted
        new = np.concatenate(
            [np.arange(at, at + count) for at, count in zip(place.tolist(), done.tolist(), strict=True)]
        )
        read = np.stack([np.where(text.proposed[new] > 0, text.match[new], 0), text.copied[new] > 0])
        # A request's first token comes with its prompt.
        fresh = self.rng.choice(text.begins, batch) + 1
        self.place[:batch] = np.where(done > most, fresh, place + done)
        return Outcome(match, proposed, copied, drafted, accepted, read)
