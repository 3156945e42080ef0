"""Rows in the middle of recorded texts: what any plan would have done with them is known, token by token.

Made by `scripts/record_texts.py` from the tracks that `speclen bench serve` serves.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from speclen.bench.simulation.copying.machine import Outcome
from speclen.controller.estimator.plans.plan import Plan
from speclen.controller.estimator.plans.reviews import OutputReview

FILE = Path(__file__).with_name("recorded.npz")
MOST_PROPOSED = 16
REVIEWED = 0.2  # of the outputs: about what a worker has time for
HOT = 0.75  # temperature above which requests are


class RecordedTexts(NamedTuple):
    """All recorded tokens, and where texts of one mix begin, [texts]; the others by token, as the next one.

    match: longest match before it; proposed, copied: tokens that a copy would propose, and that are right; drafted: tokens
    from there on that the draft model foresees, one after the other; left: tokens to the text's end. kinds: classes of
    requests, [texts].
    """

    begins: np.ndarray
    match: np.ndarray
    proposed: np.ndarray
    copied: np.ndarray
    drafted: np.ndarray
    left: np.ndarray
    kinds: np.ndarray

    def review(self, begin: int) -> OutputReview:
        """Of the text that begins there, as a worker tells it."""
        steps = slice(begin + 1, begin + int(self.left[begin]))  # the first token comes with the prompt
        kind = int(self.kinds[self.begins.searchsorted(begin)])
        told = (self.match[steps], self.proposed[steps], self.copied[steps], self.drafted[steps] > 0)
        match, proposed, copied, drafted = (each.astype(np.uint8).tobytes() for each in told)
        return OutputReview(kind, match, proposed, copied, drafted)

    def propose(self, plan: Plan, place: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Copies and drafts that rows at these places propose, and tokens that they put out; never beyond the text."""
        most = self.left[place] - 1
        proposed = np.minimum(self.proposed[place], np.minimum(plan.copy_max_tokens, most))
        proposed = np.where(self.match[place] >= max(plan.copy_min_match, 1), proposed, 0)
        drafted = np.where(proposed > 0, 0, np.minimum(plan.draft_length, most))
        copied = np.minimum(self.copied[place], proposed)
        return proposed, drafted, 1 + copied + np.minimum(self.drafted[place], drafted)

    def all_steps(self, plan: Plan) -> np.ndarray:
        """The same of all steps through all texts, [3, steps]. A request's first token comes with its prompt."""
        place, ends, steps = self.begins + 1, self.begins + self.left[self.begins], []
        while len(place := place[(under_way := place < ends)]):
            ends = ends[under_way]
            steps.append(np.stack(self.propose(plan, place)))
            place = place + steps[-1][2]
        return np.concatenate(steps, axis=1)

    def rows(self, count: int, rng: np.random.Generator) -> RecordedRows:
        """Rows at random places."""
        return RecordedRows(self, count, rng)


def recorded_texts(mix: str) -> RecordedTexts:
    """Texts of one mix of requests."""
    with np.load(FILE) as file:
        tokens, told, chosen = file["tokens"], file["told"].astype(int), file["mix"] == mix
        kinds = np.array([kind_of(value) for value in file["temperature"][chosen].tolist()])
    ends, place = tokens.cumsum(), np.arange(len(told))
    last = np.repeat(ends, tokens)
    wrong = np.where(told[:, 3] == 0, place, len(told))
    stops = np.minimum(np.minimum.accumulate(wrong[::-1])[::-1], last)
    match, proposed, copied = told[:, :3].T
    return RecordedTexts((ends - tokens)[chosen], match, proposed, copied, stops - place, last - place, kinds)


def kind_of(temperature: float) -> int:
    """Class of requests: greedy, cool, hot."""
    return 0 if temperature == 0 else 1 if temperature <= HOT else 2


class RecordedRows:
    """Rows that are at some place of some text; a row whose text ends begins another one, of `text`."""

    def __init__(self, text: RecordedTexts, count: int, rng: np.random.Generator) -> None:
        self.text, self.rng = text, rng
        begins = rng.choice(text.begins, count)
        self.place = begins + (rng.random(count) * text.left[begins]).astype(int)

    def step(self, plan: Plan, batch: int) -> Outcome:
        """One step of the first rows."""
        text, place = self.text, self.place[:batch]
        match, most = text.match[place], text.left[place] - 1
        proposed, drafted, done = text.propose(plan, place)
        copied = np.minimum(text.copied[place], proposed)
        new = np.concatenate(
            [np.arange(at, at + count) for at, count in zip(place.tolist(), done.tolist(), strict=True)]
        )
        read = np.stack([np.where(text.proposed[new] > 0, text.match[new], 0), text.copied[new] > 0])
        ended = place[done > most].tolist()
        begins = text.begins[text.begins.searchsorted(ended, side="right") - 1]
        reviews = tuple(text.review(begin) for begin in begins.tolist() if self.rng.random() < REVIEWED)
        # A request's first token comes with its prompt.
        fresh = self.rng.choice(text.begins, batch) + 1
        self.place[:batch] = np.where(done > most, fresh, place + done)
        kinds = text.kinds[text.begins.searchsorted(place, side="right") - 1]
        return Outcome(match, proposed, copied, drafted, done - 1 - copied, read, kinds, reviews)
