"""What every length and plan would have taken to get through outputs that were seen as a whole: nothing of it is guessed.

Outputs do not hang on what was proposed for them. So a worker that looks at one that has ended tells for each of its tokens
what a copy would have proposed there and whether the draft model would have been right, and the steps of any plan through it
can be counted. Steps that were played tell less, in two ways: those of a plan that copies end where copies were wrong, so
lengths that are tried between them meet harder text; and requests that a plan gets through quickly are in few of its steps,
so its rows are not those that another plan would have.

Counted are steps *per token*, over whole outputs: tokens are what requests ask for, and they are the same under every plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.plans.plan import MAX_MATCH, Plan, grid_of, plans_of_lengths
from speclen.controller.estimator.times.change import Change

# Outputs of a class after which what was counted has faded to 1/e.
MEMORY_OUTPUTS = 500.0
# Log-sd of an output's steps per token. A change is a sum of surprises at this length, or where nothing drafts at this match
# and number of copies, as of acceptance; of outputs before it so many are kept.
SCATTER, USUAL_LENGTH, USUAL_COPY = 0.3, 4, (3, 8)
SLACK, THRESHOLD, LARGEST_Z = 0.5, 9.0, 4.0
# Outputs that everybody's count for in a class.
CLASS_PRIOR = 20.0
# Outputs that what steps taught counts for. Of one, steps per token are a third off the mean; what steps teach of lengths
# that were tried between copies is 5 to 10% off.
TAUGHT_PRIOR = 25.0
KEPT_OUTPUTS = 20.0
# Usual pauses between two reviews of a class, in its steps, after which no more are expected, since workers cease to review
# where it fails and requests become such as are not reviewed; and over which what was counted then fades to 1/e. The least
# pause, and reviews over which it is averaged.
SILENCE, LEAST_PAUSE, PAUSES_REMEMBERED = 10.0, 100.0, 20.0
LEAST_OUTPUTS = 1e-6  # less is none
# Tokens of outputs that one group of reports may have counted, which takes some 10 ms.
MOST_TOKENS = 2048
MOST_COUNT = 1e15
LONGEST_OUTPUT = 1024  # for so many tokens one counts, at most
MOST_PROPOSED = 16
STEPS, IN_COPYING, PROPOSES = 0, 1, 2  # and on


class OutputReview(NamedTuple):
    """By token of an output, as if it were the next, a byte each: the match before it, tokens that a copy would propose, how
    many of them are right; 1 where the draft model chooses it, too, else 0, and nothing where there is no draft model.
    request_class: greedy, cool or hot. num_output_tokens: of all the output, where these are a part of it, else 0.
    """

    request_class: int
    matches: bytes
    proposed: bytes
    copied: bytes
    drafted: bytes
    num_output_tokens: int = 0


class Counted(NamedTuple):
    """An output; where a part of it was told, as if all of it were like that.

    share_right: of its tokens, that a usual plan would have proposed. sums: as in `Reviews`, of one class.
    """

    request_class: int
    num_tokens: int
    share_right: float
    sums: FloatArray


class Reviews:
    """Sums over outputs of one pair, fading, by class of request. tokens, outputs: [classes].

    sums: by plan, steps, tokens put out in those that copy, and steps that propose at least 1, 2, ... copies, [classes,
    plans, 2 + positions]. silent, pauses: steps of each class since its last review, and between two on average.
    """

    STATE = ("tokens", "outputs", "sums", "changes", "silent", "pauses")

    def __init__(self, num_positions: int, num_classes: int) -> None:
        self.num_lengths = num_positions + 1
        self.plans = [*plans_of_lengths(self.num_lengths), *grid_of(self.num_lengths)]
        self.place = {plan: at for at, plan in enumerate(self.plans)}
        drafts, least, most, _ = np.array(self.plans, dtype=np.int64).T
        self._drafts, self._most = drafts[:, None], most[:, None]
        self._least = np.where(least == 0, MAX_MATCH + 1, least)[:, None]
        self.tokens, self.outputs = np.zeros((2, num_classes))
        self.sums = np.zeros((num_classes, len(self.plans), 2 + MOST_PROPOSED))
        self.changes = [Change(SLACK, THRESHOLD) for _ in range(num_classes)]
        self.silent, self.pauses = np.zeros((2, num_classes))
        longest = min(USUAL_LENGTH, self.num_lengths - 1)
        self._usual = self.place[Plan(longest) if longest else Plan(0, *USUAL_COPY)]

    @property
    def sound(self) -> bool:
        """Whether all are counts; NaN is none."""
        counts = (self.tokens, self.outputs, self.sums, self.silent, self.pauses)
        return all(bool(each.min() >= 0.0 and each.max() < MOST_COUNT) for each in counts)

    @property
    def num_outputs(self) -> float:
        """That are remembered."""
        return float(self.outputs.sum())

    def extended(self, num_positions: int) -> Reviews:
        """With room for longer lengths. Of those nothing was counted: then it begins anew."""
        return self if num_positions < self.num_lengths else Reviews(num_positions, len(self.tokens))

    def forget(self, kind: int, kept_outputs: float = 0.0) -> None:
        """What was counted of a class is not true, or not any more, but for so many outputs' worth."""
        self._keep(kind, min(1.0, kept_outputs / max(float(self.outputs[kind]), 1e-9)))

    def _keep(self, kind: int, share: float) -> None:
        for counts in (self.tokens, self.outputs, self.sums):
            counts[kind] *= share

    def pass_by(self, steps: FloatArray) -> None:
        """So many steps of each class were taken, [classes]: what was counted of one that is not reviewed any more fades."""
        patience = SILENCE * np.maximum(self.pauses, LEAST_PAUSE)
        ceased = (self.silent > patience) & (self.outputs > 0.0)  # before these steps: they are many in a large fleet
        self.silent += steps
        for kind in ceased.nonzero()[0].tolist():
            kept = math.exp(-steps[kind] / patience[kind])
            self._keep(kind, kept if kept * self.outputs[kind] > LEAST_OUTPUTS else 0.0)

    def place_of(self, plan: Plan) -> int:
        """Of a plan among those that are counted; of its draft length where it is not."""
        return self.place.get(plan, min(plan.draft_length, self.num_lengths - 1))

    def tells(self, review: OutputReview) -> bool:
        """Whether it says something: one without drafts does where nothing can draft."""
        return bool(review.drafted) or self.num_lengths == 1

    def learn(self, outputs: Iterable[tuple[Counted, float]]) -> None:
        """Add outputs, each with a weight."""
        for output, weight in outputs:
            kind, num_tokens, _, sums = output
            if self._has_changed(kind, sums, num_tokens):
                self.forget(kind, KEPT_OUTPUTS)
            known, silent = float(self.outputs[kind]), float(self.silent[kind])
            if known and silent:  # not the second one of a group
                self.pauses[kind] += (silent - self.pauses[kind]) / min(known + 1.0, PAUSES_REMEMBERED)
            self.silent[kind] = 0.0
            self._keep(kind, math.exp(-weight / MEMORY_OUTPUTS))
            self.tokens[kind] += weight * num_tokens
            self.outputs[kind] += weight
            self.sums[kind] += weight * sums

    def _has_changed(self, kind: int, sums: FloatArray, num_tokens: int) -> bool:
        """Whether outputs of a class have been unlike those before for long enough, by their steps at a usual plan."""
        if self.outputs[kind] < KEPT_OUTPUTS:
            return False
        plan = self._usual
        expected = float(self.sums[kind, plan, STEPS] / self.tokens[kind])
        unlike = math.log(max(float(sums[plan, STEPS]), 1.0) / num_tokens / max(expected, 1e-9)) / SCATTER
        return bool(self.changes[kind].add("", [min(max(unlike, -LARGEST_Z), LARGEST_Z)]))

    def count(self, review: OutputReview) -> Counted:
        """The steps of every plan through one output."""
        sums, num_tokens = self._sums(review), len(review.matches)
        share_right = 1.0 - float(sums[self._usual, STEPS]) / num_tokens
        whole = max(num_tokens, min(review.num_output_tokens, LONGEST_OUTPUT))
        sums *= whole / num_tokens
        return Counted(min(review.request_class, len(self.tokens) - 1), whole, share_right, sums)

    def _sums(self, review: OutputReview) -> FloatArray:
        """Of one output, [plans, 2 + positions]."""
        num_tokens, every = len(review.matches), np.arange(len(self.plans))
        place = np.arange(num_tokens)
        most = num_tokens - 1 - place  # the last token comes with whatever was proposed before it
        copies = _numbers(review.matches) >= self._least
        proposed = np.where(copies, np.minimum(np.minimum(_numbers(review.proposed), most), self._most), 0)
        copied = np.minimum(_numbers(review.copied), proposed)
        drafted = np.where(proposed > 0, 0, np.minimum(_foreseen(review.drafted, most), self._drafts))
        done = 1 + copied + drafted
        after = np.hstack([place + done, np.full((len(every), 1), num_tokens)])
        begins = np.zeros((len(every), num_tokens + 1), dtype=bool)
        at = np.zeros(len(every), dtype=np.int64)
        while at.min() < num_tokens:
            begins[every, at] = True
            at = after[every, at]
        begins = begins[:, :num_tokens]
        sums = np.zeros((len(every), 2 + MOST_PROPOSED))
        sums[:, STEPS] = begins.sum(axis=1)
        sums[:, IN_COPYING] = (done * (begins & (proposed > 0))).sum(axis=1)
        plan, step = begins.nonzero()
        counts = np.zeros((len(every), MOST_PROPOSED + 1))
        np.add.at(counts, (plan, np.minimum(proposed[plan, step], MOST_PROPOSED)), 1.0)
        sums[:, PROPOSES:] = counts[:, :0:-1].cumsum(axis=1)[:, ::-1]
        return sums

    def per_token(self, taught: FloatArray) -> FloatArray:
        """Sums per token that requests of each class put out, [classes, plans, 2 + positions]; once there are outputs.

        taught: steps per token by what steps taught, [classes, lengths]. A class hardly seen copies like all together, and
        where nothing is copied it takes as much longer or shorter as that says.
        """
        total = float(self.tokens.sum())
        everybody, usual = self.sums.sum(axis=0) / total, self.tokens @ taught / total
        like_all = np.repeat(everybody[None], len(self.tokens), axis=0)
        copying = everybody[:, PROPOSES]
        like_all[:, :, STEPS] = copying + (everybody[:, STEPS] - copying) * (taught / usual)[:, self._drafts[:, 0]]
        prior = CLASS_PRIOR * total / self.num_outputs
        rates: FloatArray = (self.sums + prior * like_all) / (self.tokens + prior)[:, None, None]
        return rates


def _foreseen(drafted: bytes, most: np.ndarray) -> np.ndarray:
    """By token, how many from it on the draft model foresees, one after the other."""
    if not drafted:
        return np.zeros_like(most)
    place = np.arange(len(most))
    wrong = np.where(_numbers(drafted) > 0, len(most), place)
    return np.minimum(np.minimum.accumulate(wrong[::-1])[::-1] - place, most)


def _numbers(text: bytes) -> np.ndarray:
    return np.frombuffer(text, dtype=np.uint8).astype(np.int64)
