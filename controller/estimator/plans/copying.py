"""How often rows read as they did before, and how much of what is copied then is accepted: of target and requests alone.

A text is seen as a walk over match lengths: where the last v tokens were read before, the next one is what a copy says with
some chance, which makes the match v + 1; else another match begins. So a copied token at position i behind a match of k
teaches about matches of k + i, too, and counts as text that stands behind one. These chances and shares are of the text:
they do not depend on the plan, though a plan that gets through its copies faster has fewer *steps* in them. How many rows
of a step match, and what they put out, follows for every plan from the walk in its strides: one step tells about all.

Workers tell what they have read: of every new token of their rows' outputs the match it stood behind, and whether a copy
would have been right, whatever the plan was. Where they do not, a step tells about matches from its plan's bound on; rows
below are known to be below only. So the share of each match length among all up to it is counted, from the longest down
(Kaplan and Meier's estimator, backwards).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from speclen.controller.estimator.allowance import Allowance
from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.core import StepObservation
from speclen.controller.estimator.plans.plan import MAX_COPIED, MAX_MATCH

# Before anything was seen: share of the tokens behind matches up to a length that stand behind exactly that, chance that the
# copy of a match is right, and that a proposal goes on.
COLD_MATCHES = np.array([0.0, *(0.5, 0.3, 0.08), *np.full(MAX_MATCH - 4, 0.015), 0.05])
COLD_ACCEPTANCE = np.array([0.0, *np.minimum(0.25 + 0.05 * np.arange(MAX_MATCH), 0.8)])
COLD_LONGER = 0.95
# Positions of a copy that are told apart.
POSITIONS = 16
# Tokens that these count for. Reports that copied after which counts have faded to 1/e: texts differ so much from one
# another that a hundred reports, of some twenty requests, say little of the next hundred.
PRIOR_TOKENS, MEMORY_REPORTS = 20.0, 1500.0
# Acceptance of all match lengths together over the cold one may be so far off; it lends itself to those hardly seen.
LEAST_RATIO, MOST_RATIO = 0.05, 1.6
# Rows stay in the batch for many steps, and texts that repeat themselves go on doing so: variance of such shares over that
# of independent rows.
DISPERSION = 10.0
MOST_COUNT = 1e15
# Tokens read after which counts have faded to 1/e. The walk is renewed after this part of those remembered, at the latest
# after so many.
MEMORY_TOKENS, RENEWED_SHARE, FEWEST_RENEWED, MOST_RENEWED = 40_000.0, 0.1, 256, 4000
# Tokens that a worker may have read at once beyond those that it put out.
READ_AT_ONCE = 4000.0
REACHED, PASSED, GOING, WENT_ON = range(4)


class Lessons(NamedTuple):
    """Steps of one group that copied, and what each counts for.

    before: bound from which the worker's step before copied, 0 if it did not; same: whether it had the same plan. Where it
    had, the tokens of a step stand for the text. A step that follows another plan shows where that one's steps begin: shares
    of text only for matches that it did not copy. drafted: draft length of a step before that did not copy, else 0; alone:
    tokens that rows put out in such a step, on average. reads: whether the worker tells what it reads, which is counted
    apart (`Copying.read`).
    """

    steps: Sequence[StepObservation]
    weight: FloatArray
    before: np.ndarray
    same: np.ndarray
    drafted: np.ndarray
    alone: FloatArray
    reads: np.ndarray


class Copying:
    """The walk of one target's texts.

    matches: tokens that stood behind exactly, and at most, each match, fading, [2, match lengths]. runs: by match and
    position, copied tokens that were judged, were accepted, proposals that came so far, went on, [4, lengths, positions].
    searched: rows whose text was looked at, and all, [2]. may_read: tokens that workers may say they have read.
    """

    STATE = ("matches", "runs", "searched", "remembered", "unread", "may_read")

    def __init__(self) -> None:
        self.matches = np.zeros((2, MAX_MATCH + 1))
        self.runs = np.zeros((4, MAX_MATCH + 1, POSITIONS))
        self.searched = np.zeros(2)
        # Tokens read, fading; those since the walk was renewed.
        self.remembered, self.unread = 0.0, 0
        self.may_read = Allowance(READ_AT_ONCE)
        self.version = 0  # grows with every change
        self.renew()

    @property
    def sound(self) -> bool:
        """Whether counts are counts; NaN is none."""
        counts = (self.matches, self.runs, self.searched)
        return all(bool(each.min() >= 0.0 and each.max() < MOST_COUNT) for each in counts) and self.may_read.sound

    def _fade(self, kept: float) -> None:
        for counts in (self.matches, self.runs, self.searched):
            counts *= kept

    def read(self, steps: Sequence[StepObservation], weight: FloatArray) -> bool:
        """Learn from output that workers have read, whatever the plans were; returns whether the walk is a new one."""
        table = [(at, *counts) for at, each in enumerate(steps) for counts in each.read]
        step, match, tokens, right = np.array(table, dtype=np.int64).reshape(-1, 4).T
        num_tokens, share = int(tokens.sum()), weight[step]
        kept = math.exp(-num_tokens / MEMORY_TOKENS)
        self._fade(kept)
        exactly = np.bincount(match, share * tokens, MAX_MATCH + 1)
        self.matches += np.stack([exactly, exactly.cumsum()])
        for which, counts in ((REACHED, tokens), (PASSED, right)):
            self.runs[which, :, 0] += np.bincount(match, share * counts, MAX_MATCH + 1)
        self.remembered, self.unread = kept * self.remembered + num_tokens, self.unread + num_tokens
        due = self.unread >= min(max(RENEWED_SHARE * self.remembered, FEWEST_RENEWED), MOST_RENEWED)
        if due:
            self.renew()
        return due

    def learn(self, lessons: Lessons) -> None:
        """Learn from steps of a group that copied and may teach."""
        steps, weight = lessons.steps, lessons.weight
        if not steps:
            return
        self._fade(math.exp(-np.count_nonzero(~lessons.reads) / MEMORY_REPORTS))
        told = [each.copying for each in steps if each.copying is not None]
        searched = np.array([each.num_searched_rows for each in told], dtype=float)
        self.searched += weight @ np.stack([searched, [each.batch_size for each in steps]], axis=1)
        table = [(at, each.plan.copy_max_tokens, *run) for at, each in enumerate(told) for run in each.runs]
        runs = np.array(table, dtype=np.int64).reshape(-1, 6)
        exactly = self._count_runs(runs, weight, lessons.reads)
        self._count_matches(lessons, runs, exactly, searched)
        self.renew()

    def _count_runs(self, runs: np.ndarray, weight: FloatArray, reads: np.ndarray) -> FloatArray:
        """Count copied tokens; returns how many tokens of each step stood behind each match, [steps, match lengths].

        Of workers that read how far proposals go, and no more: which rows copy hangs on the plan, and where a plan copies
        from early on, those that begin behind long matches are unlike others.
        """
        step, most, match, proposed, accepted, rows = runs.T
        place = np.arange(min(int(most.max(initial=0)), MAX_COPIED) + 1)
        behind = np.minimum(match[:, None] + place, MAX_MATCH)
        alone = ~reads[step][:, None]
        judged = alone & (place <= np.minimum(accepted, proposed - 1)[:, None])
        passed = alone & (place < accepted[:, None])
        going = (place > 0) & (place < most[:, None]) & (place <= proposed[:, None])
        went_on = (place > 0) & (place < proposed[:, None])
        counted = (weight[step] * rows)[:, None]
        cell = (match[:, None] * POSITIONS + np.minimum(place, POSITIONS - 1)).ravel()
        for which, seen in enumerate((judged, passed, going, went_on)):
            counts = np.bincount(cell, (seen * counted).ravel(), (MAX_MATCH + 1) * POSITIONS)
            self.runs[which] += counts.reshape(MAX_MATCH + 1, POSITIONS)
        exactly = np.zeros((len(weight), MAX_MATCH + 1))
        np.add.at(exactly, (step[:, None], behind), rows[:, None] * (place <= accepted[:, None]))
        return exactly

    def _count_matches(self, lessons: Lessons, runs: np.ndarray, exactly: FloatArray, searched: FloatArray) -> None:
        steps, weight, before, same, drafts, alone, reads = lessons
        least = np.array([each.copying.plan.copy_min_match for each in steps if each.copying is not None])
        matched = np.bincount(runs[:, 0], runs[:, 5], len(steps))
        drafted = np.array([each.num_accepted for each in steps])
        others = np.array([each.batch_size for each in steps]) - matched
        stands = np.zeros_like(exactly)
        np.add.at(stands, (runs[:, 0], runs[:, 2]), runs[:, 5])
        # A step that interrupts drafts shows shares of steps: rows behind long matches had fewer, of more tokens each.
        runs_on = (self.accepted[:, None] ** np.arange(1, int(drafts.max(initial=0)) + 1)).cumsum(axis=1)
        per_step = 1.0 + np.concatenate([np.zeros((MAX_MATCH + 1, 1)), runs_on], axis=1)[:, drafts].T
        exactly = np.where(same[:, None], exactly, stands * np.maximum(per_step, alone[:, None]))
        below = (searched - matched) * np.where(same, 1.0 + drafted / np.maximum(others, 1.0), alone)
        at_most = below[:, None] + exactly.cumsum(axis=1)
        most = np.where(same | (before == 0), MAX_MATCH + 1, before)
        place = np.arange(MAX_MATCH + 1)
        told = (place >= least[:, None]) * (place < most[:, None]) * (weight * ~reads)[:, None]
        self.matches[0] += (told * exactly).sum(axis=0)
        self.matches[1] += (told * at_most).sum(axis=0)

    def renew(self) -> None:
        """Bring the walk up to date with the counts: shares, accepted and goes_on by match length, begins, walk.

        shares: of tokens, that stand behind each match. begins: matches after a copy that was wrong. walk: from match to
        match by a token, [match lengths, match lengths].
        """
        self.unread = 0
        exactly, at_most = self.matches
        hazard = (exactly + PRIOR_TOKENS * COLD_MATCHES) / (at_most + PRIOR_TOKENS)
        hazard[0] = 1.0
        below = np.append((1.0 - hazard[::-1]).cumprod()[::-1][1:], 1.0)  # share behind at most that match
        self.shares = below * hazard
        self.looked_at = float((self.searched[0] + PRIOR_TOKENS) / (self.searched[1] + PRIOR_TOKENS))
        judged, passed, going, went_on = np.stack([_by_sum(each) for each in self.runs])
        expected = float(judged @ COLD_ACCEPTANCE)
        ratio = (float(passed.sum()) + 0.5 * PRIOR_TOKENS) / (expected + 0.5 * PRIOR_TOKENS)
        prior = np.clip(COLD_ACCEPTANCE * min(max(ratio, LEAST_RATIO), MOST_RATIO), 0.02, 0.95)
        self.accepted = (passed + PRIOR_TOKENS * prior) / (judged + PRIOR_TOKENS)
        self.accepted[0] = 0.0
        goes_on = (went_on + PRIOR_TOKENS * COLD_LONGER) / (going + PRIOR_TOKENS)
        self.right = _drawn(self.runs[PASSED], self.runs[REACHED], self.accepted)
        self.goes_on = _drawn(self.runs[WENT_ON], self.runs[GOING], goes_on)
        # Where fewer tokens stand behind a match than right copies lead to, texts have ended there.
        come = _after(self.shares * self.accepted)
        self.stays = _before(np.minimum(self.shares / np.maximum(come, 1e-12), 1.0))
        grows = self.accepted * self.stays
        fresh = np.maximum(self.shares - _after(self.shares * grows), 1e-6 * self.shares)
        self.begins = fresh / fresh.sum()
        self.walk = (1.0 - grows)[:, None] * self.begins + _after(np.diag(grows))
        self.version += 1

    def strides(self, most: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Of a row that copies up to `most` tokens, by its match: tokens accepted, chance of proposing 1, 2, ... of them,
        the match that it stands behind afterwards, [match lengths, ...].
        """
        accepted, after = np.zeros(MAX_MATCH + 1), self._walks(most)
        proposes = np.zeros((MAX_MATCH + 1, most))
        for place in range(most - 1, -1, -1):
            right, onward = self._at(self.right, place), self._walks(place + 1)
            further = self._at(self.goes_on, place + 1) if place + 1 < most else np.zeros(MAX_MATCH + 1)
            stays = self.stays[_grown(place)]
            accepted = right * (1.0 + further * stays * accepted)  # what a copy says beyond the end nobody gets
            onward = onward + further[:, None] * (after - onward)
            grows = right * stays
            after = (1.0 - grows)[:, None] * self.begins + grows[:, None] * onward
        proposes[:, 0] = 1.0
        for place in range(1, most):
            proposes[:, place] = proposes[:, place - 1] * self._at(self.goes_on, place)
        return accepted, proposes, after

    def _at(self, values: FloatArray, place: int) -> FloatArray:
        """Of a position, by the match that a copy begins with."""
        column: FloatArray = values[:, min(place, POSITIONS - 1)]
        return column

    def _walks(self, place: int) -> FloatArray:
        """Where a token more leads after so many right ones, by the match that a copy begins with."""
        walks: FloatArray = self.walk[_grown(place)]
        return walks

    def log_tokens_variance(self, least: np.ndarray, share: FloatArray, gain: FloatArray) -> FloatArray:
        """Variance of log tokens per row of plans. least: their bounds; share: of rows that copy; gain: tokens of such a row
        beyond others', over the mean. Of matches and of their first copied token, by the delta method.
        """
        judged, passed = self.runs[REACHED, ::-1, 0].cumsum()[::-1], self.runs[PASSED, ::-1, 0].cumsum()[::-1]
        seen = judged[least] + PRIOR_TOKENS
        right = (passed[least] + 0.5 * PRIOR_TOKENS) / seen
        texts = (self.matches[1, least] + PRIOR_TOKENS) / DISPERSION
        some = np.maximum(share, 1.0 / (texts + 1.0))  # none of few texts says little
        of_share = some * (1.0 - np.minimum(some, 0.5)) / texts
        of_accepted = DISPERSION * (1.0 - right) / (right * seen)
        variance: FloatArray = gain**2 * (of_share + share**2 * of_accepted)
        return variance


def _by_sum(counts: FloatArray) -> FloatArray:
    """Counts by match and position as counts by match plus position, the longest together."""
    sums = np.minimum(np.add.outer(np.arange(MAX_MATCH + 1), np.arange(POSITIONS)), MAX_MATCH)
    return np.asarray(np.bincount(sums.ravel(), counts.ravel(), MAX_MATCH + 1), dtype=float)


def _drawn(passed: FloatArray, reached: FloatArray, prior: FloatArray) -> FloatArray:
    """Shares by match and position, drawn towards those by match plus position."""
    sums = np.minimum(np.add.outer(np.arange(MAX_MATCH + 1), np.arange(POSITIONS)), MAX_MATCH)
    share: FloatArray = (passed + PRIOR_TOKENS * prior[sums]) / (reached + PRIOR_TOKENS)
    return share


def _grown(place: int) -> np.ndarray:
    """The match that each has become after so many right copies."""
    return np.minimum(np.arange(MAX_MATCH + 1) + place, MAX_MATCH)


def _before(values: FloatArray) -> FloatArray:
    """Of each match the value of the one that a right token more leads to."""
    return np.append(values[1:], values[-1])


def _after(values: FloatArray) -> FloatArray:
    """What stands at a match after a token more: from the match before, in the last axis; the longest gathers its own."""
    moved = np.zeros_like(values)
    moved[..., 1:] = values[..., :-1]
    moved[..., -1] += values[..., -1]
    return moved
