"""What is believed of every plan of a small grid, predicted from the same few factors.

The walk of texts over match lengths (copying.py), taken in a plan's strides, says how many rows copy, what they propose and
put out. Verified tokens, draft passes and rows in them follow, and from those the time (times.py). No plan is learned for
itself: a step under one tells about all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from speclen.controller.estimator.acceptance import Acceptance
from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.choice import PromptShare
from speclen.controller.estimator.plans.copying import MEMORY_REPORTS, Copying
from speclen.controller.estimator.plans.plan import MAX_MATCH, MOSTS, drafted_lengths, grid_of
from speclen.controller.estimator.plans.reviews import IN_COPYING, PROPOSES, STEPS, TAUGHT_PRIOR, Reviews
from speclen.controller.estimator.plans.times import CopyTimes
from speclen.controller.estimator.times.step_time import StepTimes

# Reports that copied after which the walk is followed anew, where nothing but it is known, and at the latest; tokens by
# which the usual ones may be off until then.
WALK_REPORTS, MOST_WALK_REPORTS, USUAL_MOVED = 32, 320, 0.2
# Drafts of rows without a match: acceptance of a position over everybody's, before anything was seen, and the rows that
# counts for.
COLD_RATIO, PRIOR_ROWS = 0.95, 20.0
LEAST_RATIO, MOST_RATIO = 0.1, 1.3
# Columns that a rectangle grows by with each further token of its longest proposal: widths 1, 2, 3, 4, 6, 8, 12, 16.
COLUMNS = np.array([1, 1, 1, 1, 2, 0, 2, 0, 4, 0, 0, 0, 4, 0, 0, 0], dtype=float)
REACHED, PASSED, EXPECTED = range(3)


class Walk(NamedTuple):
    """By plan: share of rows that copy, what those put out per row of all, share of rows that propose 1, 2, ... copies."""

    share: FloatArray
    copied: FloatArray
    proposes: FloatArray


class Assessed(NamedTuple):
    """All plans of the grid in some buckets, [buckets, plans]; shares: gradients of log times, [buckets, plans, weights].

    own: variance of log time that is no other plan's; of_tokens, of_time: of log tokens, and of log time altogether.
    """

    tokens: FloatArray
    seconds: FloatArray
    shares: FloatArray
    own: FloatArray
    of_tokens: FloatArray
    of_time: FloatArray


class PlanPrediction:
    """Plans of the workers of a group, as far as tokens and times go.

    drafts: rows without a match whose drafts reached and passed each position, and how many were expected to, [3, n]. seen:
    what tells of whole outputs, to which all of it is drawn. classes: shares in the tokens put out, [buckets, classes].
    """

    def __init__(
        self, step_times: StepTimes, copying: Copying, max_copied: int, seen: Acceptance | None = None
    ) -> None:
        self.copying, self.step_times, self.seen = copying, step_times, seen
        self.times = CopyTimes(step_times)
        self.drafts = np.zeros((3, step_times.num_lengths - 1))
        self.since_walked = 0
        self.prompts = PromptShare()
        self.classes: FloatArray | None = None
        self.extend(max_copied)

    def extend(self, max_copied: int) -> None:
        """Make the grid that workers can play."""
        lengths = drafted_lengths(self.step_times.num_lengths)
        self.lengths = np.array(lengths)
        self.mosts = sorted({min(each, max_copied) for each in MOSTS})
        self.grid = grid_of(self.step_times.num_lengths, self.mosts)
        self.place = {plan: at for at, plan in enumerate(self.grid)}
        self.length_at = np.array([lengths.index(plan.draft_length) for plan in self.grid])
        self.times.extend(self.lengths[self.length_at] > 0)
        self.bounds = np.array([plan.copy_min_match for plan in self.grid])
        self._places: tuple[int, np.ndarray] | None = None
        self.usual = np.zeros(len(lengths))  # tokens of rows that draft, by length of the grid
        self.walked: Walk | None = None

    @property
    def version(self) -> int:
        """Grows with every change of what plans rest on."""
        return self.copying.version + self.times.version

    @property
    def sound(self) -> bool:
        """Whether all numbers are of a believable size."""
        return self.times.sound and bool(np.isfinite(self.drafts).all())

    def learn_drafts(self, histograms: FloatArray, accepted: FloatArray, num_reports: int) -> None:
        """Learn of rows without a match that drafted. histograms: rows by accepted run, summed by draft length, [n, runs].

        Row i: of steps of length i. accepted: everybody's acceptance by position.
        """
        self.drafts *= np.exp(-num_reports / MEMORY_REPORTS)
        size = self.drafts.shape[1]
        at_least = histograms[:, ::-1].cumsum(axis=1)[:, ::-1]
        inside = np.arange(size) < np.arange(len(histograms))[:, None]
        reached = (at_least[:, :size] * inside).sum(axis=0)
        self.drafts[REACHED] += reached
        self.drafts[PASSED] += (at_least[:, 1 : size + 1] * inside).sum(axis=0)
        self.drafts[EXPECTED] += reached * accepted[:size]

    def without_match(self, survival: FloatArray) -> FloatArray:
        """Chance that drafted token 1, 2, ... of a row without a match is accepted, from everybody's, [..., positions]."""
        counted = self.drafts[PASSED] + COLD_RATIO * PRIOR_ROWS, self.drafts[EXPECTED] + PRIOR_ROWS
        ratio = np.clip(counted[0] / counted[1], LEAST_RATIO, MOST_RATIO).cumprod()
        return np.minimum(survival * ratio[: survival.shape[-1]], 1.0)

    def draft_tokens(self, tokens: FloatArray) -> FloatArray:
        """Expected tokens of rows without a match at the grid's lengths, [buckets, lengths]. tokens: everybody's."""
        mine = np.ones_like(tokens)
        mine[:, 1:] += self.without_match(np.diff(tokens, axis=1)).cumsum(axis=1)
        return mine[:, self.lengths]

    def walk(self, drafted: FloatArray) -> Walk:
        """What rows do under every plan of the grid. drafted: usual tokens of rows that draft, by length of the grid."""
        copying = self.copying
        powers = [copying.walk]
        while len(powers) < self.lengths[-1] + 1:
            powers.append(powers[-1] @ copying.walk)
        survival = np.append(1.0, np.diff(np.interp(np.arange(self.lengths[-1] + 1), self.lengths, drafted)))
        ends = np.append(survival, 0.0)
        free = [np.tensordot(np.append(-np.diff(ends[: d + 1]), ends[d]), powers[: d + 1], 1) for d in self.lengths]
        strides = {most: copying.strides(most) for most in self.mosts}
        copies = np.arange(MAX_MATCH + 1) >= self.bounds[:, None]
        by_length = {int(length): kernel for length, kernel in zip(self.lengths, free, strict=True)}
        after = np.stack([strides[plan.copy_max_tokens][2] for plan in self.grid])
        alone = np.stack([by_length[plan.draft_length] for plan in self.grid])
        looked = copies[:, :, None] * copying.looked_at
        stands = _stationary(looked * after + (1.0 - looked) * alone) * copies * copying.looked_at
        tokens = np.stack([strides[plan.copy_max_tokens][0] for plan in self.grid])
        proposes = np.zeros((len(self.grid), self.mosts[-1]))
        for at, plan in enumerate(self.grid):
            proposes[at, : plan.copy_max_tokens] = stands[at] @ strides[plan.copy_max_tokens][1]
        return Walk(stands.sum(axis=1), (stands * (1.0 + tokens)).sum(axis=1), proposes)

    def now(self) -> Walk:
        """The walk by what was known some reports ago at most: it takes more than a millisecond."""
        if self.walked is None or self.since_walked >= min(WALK_REPORTS / self._taught, MOST_WALK_REPORTS):
            self.walked, self.since_walked = self.walk(self.usual), 0
        return self.walked

    def _follow_usual(self, drafted: FloatArray) -> None:
        """Where they have moved far: the walk hangs little on it and is dear."""
        usual = drafted.mean(axis=0)
        if np.abs(usual - self.usual).max() > USUAL_MOVED:
            self.usual, self.since_walked = usual, MOST_WALK_REPORTS

    def assess(self, buckets: np.ndarray, tokens: FloatArray) -> Assessed:
        """Predict every plan in these buckets. tokens: expected without copies, [buckets, lengths]."""
        drafted = self.draft_tokens(tokens)
        if not self.usual.any():
            self._follow_usual(drafted)
        rows = self.times.rows[buckets][:, None]
        per_row, share, copied, proposes = self.of_rows(buckets, drafted[:, self.length_at])
        drafts = self.lengths[self.length_at]
        some = 1.0 - share**rows
        if self.times.rectangular:
            width = max(proposes.shape[2], int(self.lengths[-1]))
            going = np.zeros((*share.shape, width))
            going[:, :, : proposes.shape[2]] = proposes
            going += (1.0 - share)[:, :, None] * (np.arange(width) < drafts[:, None])
            columns = np.resize(COLUMNS, width)
            fed = (columns * (1.0 - (1.0 - np.minimum(going, 1.0)) ** rows[:, :, None])).sum(axis=-1)
            in_passes = rows * some * drafts
        else:
            fed = proposes.sum(axis=-1) + (1.0 - share) * drafts
            in_passes = rows * (1.0 - share) * drafts
        flat = [each.reshape(-1) for each in (some * drafts, in_passes, rows * (1.0 + fed))]
        every = np.tile(np.arange(len(self.grid)), len(buckets))
        seconds, gradients, own = self.times.predict(np.repeat(buckets, len(self.grid)), every, *flat)
        alone = (per_row - copied) / np.maximum(1.0 - share, 1e-9)
        gain = (copied / np.maximum(share, 1e-9) - alone) / per_row
        of_tokens = self.copying.log_tokens_variance(self.bounds, share, gain) * self._taught
        of_time = (self.times.surface.variance(gradients) + own).reshape(per_row.shape)
        shape = per_row.shape
        seconds = self.prompts.borne(seconds.reshape(shape), per_row, rows, drafts > 0)
        return Assessed(
            *(per_row, seconds, gradients.reshape(*shape, -1), own.reshape(shape)),
            *(of_tokens, of_time),
        )

    def of_rows(self, buckets: np.ndarray, alone: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """By bucket and plan: tokens per row, the share of rows that copy, what those put out per row of all, and the share
        that proposes at least 1, 2, ... copies. alone: tokens of rows that do not copy, by what steps taught.
        """
        share, copied, proposes = self.now()
        per_row = copied + (1.0 - share) * alone
        if self.seen is None or self.seen.reviewed is None or self.classes is None:
            share, copied = (np.broadcast_to(each, per_row.shape) for each in (share, copied))
            return per_row, share, copied, np.broadcast_to(proposes, (len(buckets), *proposes.shape))
        # All per token, whose number does not hang on the plan.
        counted = np.einsum("bc,cpi->bpi", self.classes[buckets], self.seen.reviewed)
        places = self._places_in(self.seen.reviews)
        taught = np.where(places < 0, 1.0, self._taught)

        def drawn(known: FloatArray, told: FloatArray, kept: FloatArray) -> FloatArray:
            of_both: FloatArray = known[:, places] * (1.0 - kept) + told * kept
            return of_both

        steps = drawn(counted[:, :, STEPS], 1.0 / per_row, taught)
        in_copying = drawn(counted[:, :, IN_COPYING], copied / per_row, taught)
        told = drawn(
            counted[:, :, PROPOSES : PROPOSES + proposes.shape[1]], proposes / per_row[:, :, None], taught[:, None]
        )
        told = told / steps[:, :, None]
        told = np.minimum(told, 1.0)
        return 1.0 / steps, told[:, :, 0], np.minimum(in_copying / steps, 1.0 / steps), told

    @property
    def _taught(self) -> float:
        """Share of what is believed of tokens that single steps taught, and not whole outputs."""
        return 1.0 if self.seen is None else TAUGHT_PRIOR / (self.seen.reviews.num_outputs + TAUGHT_PRIOR)

    def _places_in(self, reviews: Reviews) -> np.ndarray:
        """Of the grid's plans among those whose steps are counted, -1 where they are not."""
        if self._places is None or self._places[0] != reviews.num_lengths:
            self._places = reviews.num_lengths, np.array([reviews.place.get(plan, -1) for plan in self.grid])
        return self._places[1]


def _stationary(kernels: FloatArray) -> FloatArray:
    """Where walks with these transitions stand, [n, states]."""
    size = kernels.shape[-1]
    equations = np.swapaxes(kernels, 1, 2) - np.eye(size)
    equations[:, -1] = 1.0
    stands: FloatArray = np.linalg.solve(equations, np.broadcast_to(np.eye(size)[-1][:, None], (len(kernels), size, 1)))
    return np.maximum(stands[..., 0], 0.0)
