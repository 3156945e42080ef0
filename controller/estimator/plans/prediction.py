"""What is believed of every plan of a small grid, predicted from the same few factors.

The walk of texts over match lengths (copying.py), taken in a plan's strides, says how many rows copy, what they propose and
put out. Verified tokens, draft passes and rows in them follow, and from those the time (times.py). No plan is learned for
itself: a step under one tells about all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.plans.copying import MEMORY_REPORTS, Copying
from speclen.controller.estimator.plans.plan import MAX_MATCH, Plan
from speclen.controller.estimator.plans.times import CopyTimes
from speclen.controller.estimator.times.step_time import StepTimes

# The grid: copy from matches of so many tokens on; at most so many; with up to so many draft lengths.
MATCHES, MOSTS, NUM_LENGTHS = (2, 3, 5, 8), (4, 8, 16), 9
# Reports that copied after which the walk is followed anew; tokens by which the usual ones may be off until then.
WALK_REPORTS, USUAL_MOVED = 32, 0.2
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

    drafts: rows without a match whose drafts reached and passed each position, and how many were expected to, [3, n].
    """

    def __init__(self, step_times: StepTimes, copying: Copying, max_copied: int) -> None:
        self.copying, self.step_times = copying, step_times
        self.times = CopyTimes(step_times)
        self.drafts = np.zeros((3, step_times.num_lengths - 1))
        self.since_walked = 0
        self.prompt_s = 0.0  # that the draft model's prompts take, per token that a request puts out
        self.extend(max_copied)

    def extend(self, max_copied: int) -> None:
        """Make the grid that workers can play."""
        lengths = drafted_lengths(self.step_times.num_lengths)
        self.lengths = np.array(lengths)
        self.mosts = sorted({min(each, max_copied) for each in MOSTS})
        self.grid = [Plan(drafted, match, most) for match in MATCHES for most in self.mosts for drafted in lengths]
        self.place = {plan: at for at, plan in enumerate(self.grid)}
        self.length_at = np.array([lengths.index(plan.draft_length) for plan in self.grid])
        self.bounds = np.array([plan.copy_min_match for plan in self.grid])
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

    def knows_without_match(self, length: int) -> bool:
        """Whether as many rows without a match have drafted so far as a guess counts for."""
        return bool(self.drafts[EXPECTED, length - 1] >= PRIOR_ROWS)

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
        if self.walked is None or self.since_walked >= WALK_REPORTS:
            self.walked, self.since_walked = self.walk(self.usual), 0
        return self.walked

    def _follow_usual(self, drafted: FloatArray) -> None:
        """Where they have moved far: the walk hangs little on it and is dear."""
        usual = drafted.mean(axis=0)
        if np.abs(usual - self.usual).max() > USUAL_MOVED:
            self.usual, self.since_walked = usual, WALK_REPORTS

    def assess(self, buckets: np.ndarray, tokens: FloatArray) -> Assessed:
        """Predict every plan in these buckets. tokens: expected without copies, [buckets, lengths]."""
        drafted = self.draft_tokens(tokens)
        if not self.usual.any():
            self._follow_usual(drafted)
        share, copied, proposes = self.now()
        drafts = self.lengths[self.length_at]
        rows = self.times.rows[buckets][:, None]
        alone = drafted[:, self.length_at]  # tokens of rows that do not copy, [buckets, plans]
        per_row = copied + (1.0 - share) * alone
        some = 1.0 - share**rows
        if self.times.rectangular:
            width = max(proposes.shape[1], int(self.lengths[-1]))
            going = np.zeros((len(self.grid), width))
            going[:, : proposes.shape[1]] = proposes
            going += (1.0 - share)[:, None] * (np.arange(width) < drafts[:, None])
            columns = np.resize(COLUMNS, width)
            fed = (columns * (1.0 - (1.0 - np.minimum(going, 1.0)) ** rows[:, :, None])).sum(axis=-1)
            in_passes = rows * some * drafts
        else:
            fed = np.broadcast_to(proposes.sum(axis=1) + (1.0 - share) * drafts, per_row.shape)
            in_passes = rows * (1.0 - share) * drafts
        flat = [each.reshape(-1) for each in (some * drafts, in_passes, rows * (1.0 + fed))]
        seconds, gradients, own = self.times.predict(np.repeat(buckets, len(self.grid)), *flat)
        gain = (copied / np.maximum(share, 1e-9) - alone) / per_row
        of_tokens = self.copying.log_tokens_variance(self.bounds, share, gain)
        of_time = (self.times.surface.variance(gradients) + own).reshape(per_row.shape)
        shape = per_row.shape
        seconds = seconds.reshape(shape) + self.prompt_s * rows * per_row * (drafts > 0)
        return Assessed(
            *(per_row, seconds, gradients.reshape(*shape, -1), own.reshape(shape)),
            *(of_tokens, of_time),
        )

    def share_of(self, plan: Plan) -> float:
        """Of rows that copy under a plan of the grid."""
        return float(self.now().share[self.place[plan]]) if self.usual.any() else 0.0

    def right_behind(self, plan: Plan) -> tuple[float, ...]:
        """Chance that copied token 1, 2, ... is right if those before were, behind matches that the plan copies from."""
        return tuple(self.copying.right_behind(plan.copy_min_match, plan.copy_max_tokens).tolist())


def _stationary(kernels: FloatArray) -> FloatArray:
    """Where walks with these transitions stand, [n, states]."""
    size = kernels.shape[-1]
    equations = np.swapaxes(kernels, 1, 2) - np.eye(size)
    equations[:, -1] = 1.0
    stands: FloatArray = np.linalg.solve(equations, np.broadcast_to(np.eye(size)[-1][:, None], (len(kernels), size, 1)))
    return np.maximum(stands[..., 0], 0.0)


def drafted_lengths(num_lengths: int) -> list[int]:
    """Draft lengths of the grid: all, or some of many."""
    if num_lengths <= NUM_LENGTHS:
        return list(range(num_lengths))
    return sorted({round(each) for each in np.geomspace(1, num_lengths - 1, NUM_LENGTHS - 1).tolist()} | {0})


assert max(MATCHES) <= MAX_MATCH
