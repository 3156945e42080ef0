"""Which plan to play in each bucket, and which to try.

The best length without copies is `choice.py`'s of the estimator; a plan that copies takes its place where it promises more
after doubt (`prediction.py`), and pays for its probes from the same account.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from speclen.controller.estimator.acceptance import Acceptance
from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.choice import (
    CAP_STEPS,
    CHANGE,
    LEAST_CHARGE,
    OPTIMISM,
    RISK,
    LengthChoice,
    least_cost,
    oldest_of,
    untried_sd,
)
from speclen.controller.estimator.plans.copying import Copying
from speclen.controller.estimator.plans.plan import Plan, plan_from
from speclen.controller.estimator.plans.prediction import Assessed, PlanPrediction
from speclen.controller.estimator.times.step_time import StepTimes

# Relative gain that a change to, between and from plans must promise.
MARGIN = 0.005
# Buckets of a group that are chosen in anew; groups after which one is although there is no news of plans.
MOST_BUCKETS, IDLE_GROUPS = 6, 8


class PlanEstimate(NamedTuple):
    """What is believed of a plan in a bucket. interval: 95% of ms per token."""

    plan: Plan
    expected_tokens: float
    step_s: float
    ms_per_token: float
    ms_per_token_low: float
    ms_per_token_high: float


class ShownPlan(NamedTuple):
    """A plan as people see it. is_best: in use."""

    estimate: PlanEstimate
    is_best: bool


class Try(NamedTuple):
    """A plan that might be played: its log goodput over what is played, with optimism; seconds; tokens per row and s."""

    plan: Plan
    hope: float
    seconds: float
    goodput: float


class Account(NamedTuple):
    """What a probe may cost, in usual steps. credit: what was earned; near: of that, for what drafts as many tokens as is
    played; num_steps: that it takes; resume: what its first one takes longer if it drafts.
    """

    credit: float
    near: float
    num_steps: int
    resume: float

    def cost(self, seconds: FloatArray | float, goodput: FloatArray | float, usual: Try) -> FloatArray:
        """Expected loss of steps that take so long and make so much, in usual steps, without resuming."""
        loss: FloatArray = np.maximum(seconds / usual.seconds * (1.0 - goodput / usual.goodput), LEAST_CHARGE)
        return self.num_steps * loss + CHANGE * (self.num_steps > 1)

    def pays(self, cost: FloatArray, lengths: np.ndarray, usual: Try) -> np.ndarray:
        """Whether for both. A full one pays for resuming drafts however dear, or it could never be tried.

        lengths: of the draft.
        """
        credit = np.where(lengths == usual.plan.draft_length, self.near, self.credit)
        pays: np.ndarray = (cost <= credit) & ((cost + self.resume * (lengths > 0) <= credit) | (credit >= CAP_STEPS))
        return pays


class PlanChoice(PlanPrediction):
    """Plans of the workers of a group.

    chosen: by bucket, None where the length without copies is played. aside: kept by bucket for probes of other draft
    lengths, in steps: those that differ only in how they copy cost next to nothing, and would spend all that is earned.
    """

    STATE = ("times", "drafts", "usual", "started", "turn", "since_walked", "aside")

    def __init__(
        self, step_times: StepTimes, copying: Copying, max_copied: int, seen: Acceptance | None = None
    ) -> None:
        self.chosen: list[Plan | None] = [None] * len(step_times.buckets)
        self.started = np.zeros(len(self.chosen), dtype=bool)  # buckets whose account was filled for the first probes
        self.aside = np.zeros(len(self.chosen))
        self.last: dict[str, Plan] = {}  # of each worker's newest step
        self.readers: set[str] = set()  # those of them that tell what they read, which they do once in many steps
        self.turn, self.decided_with = 0, -1
        super().__init__(step_times, copying, max_copied, seen)

    def extend(self, max_copied: int) -> None:
        """Make the grid that workers can play."""
        super().extend(max_copied)
        self.chosen = [plan if plan in self.place else None for plan in self.chosen]

    @property
    def news(self) -> bool:
        """Whether anything came since the last choice."""
        return self.decided_with != self.version

    def due(self, recent: list[int]) -> np.ndarray:
        """Buckets to choose in anew: the newest reports', and one more in turn; none while there is little news of plans."""
        self.turn += 1
        if self.turn % IDLE_GROUPS == 0:
            self.times.follow_surface()
        if self.turn % IDLE_GROUPS and not self.news:
            return np.zeros(0, dtype=int)
        self.decided_with = self.version
        buckets = [*recent[:MOST_BUCKETS], self.turn % len(self.chosen)]
        return np.array(list(dict.fromkeys(buckets)))

    def decide(self, buckets: np.ndarray, tokens: FloatArray, choice: LengthChoice) -> None:
        """Choose anew in these buckets. tokens: expected without copies, [buckets, lengths], of these."""
        fresh = buckets[~self.started[buckets]]
        choice.credit[fresh] = np.maximum(choice.credit[fresh], CAP_STEPS)  # nothing at all is known of copies
        self.started[fresh] = True
        self._follow_usual(self.draft_tokens(tokens))
        known = self.assess(buckets, tokens)
        promised = np.log(known.tokens / known.seconds) - RISK * known.of_time
        best: list[int] = promised.argmax(axis=1).tolist()
        for at, bucket in enumerate(buckets.tolist()):
            length = choice.lengths[bucket]
            plain = float(np.log(choice.goodput[bucket, length]) - choice.doubt[bucket, length])
            now, rival = self.chosen[bucket], float(promised[at, best[at]])
            played = plain if now is None else float(promised[at, self.place[now]])
            if max(plain, rival) > played + MARGIN:
                self.chosen[bucket] = None if plain >= rival else self.grid[best[at]]

    def probe(
        self,
        bucket: int,
        tokens: FloatArray,
        choice: LengthChoice,
        limits: tuple[int, int],
        resume_s: float,
        num_steps: int = 1,
    ) -> Plan | None:
        """A plan, or a length, that may well be better than what is played, if its expected loss has been earned; charged.

        tokens: expected without copies, [1, lengths]; limits: drafted and copied tokens that the worker can do; resume_s:
        what it takes longer to draft after a step that did not, as such probes of a plan that does not draft have to.
        num_steps: that the worker will take at it.
        """
        if not choice.decided or choice.credit[bucket] < least_cost(num_steps):
            return None
        known = self.assess(np.array([bucket]), tokens)
        usual = self._usual(bucket, known, choice)
        resume = 0.0 if usual.plan.draft_length else resume_s / usual.seconds
        credit, aside = float(choice.credit[bucket]), float(self.aside[bucket])
        near = credit
        if usual.plan.draft_length:  # as much again is set aside, until that is enough for any
            near = 0.5 * credit if aside < CAP_STEPS else 0.0
        account = Account(credit + aside, near, num_steps, resume)
        tries = [self._best_plan(known, usual, limits, account)]
        if self.chosen[bucket] is not None:
            tries.append(self._best_length(bucket, choice, usual, limits[0], account))
        best = max(tries, key=lambda each: each.hope)
        if best.hope <= 0.0:
            oldest = self._oldest_length(bucket, choice, usual, limits[0], account)
            if oldest is None:
                return None
            best = oldest
        resume *= best.plan.draft_length > 0
        charge = float(account.cost(best.seconds, best.goodput, usual)) + resume
        moved = 0.0  # from the account to what is set aside
        if best.plan.draft_length != usual.plan.draft_length:
            moved = -min(aside, charge)
        elif usual.plan.draft_length:
            moved = charge
        self.aside[bucket] += moved
        choice.credit[bucket] -= moved
        choice.charge(bucket, charge, num_steps, usual.seconds, resume)
        return best.plan

    def probe_draft(
        self, bucket: int, tokens: FloatArray, choice: LengthChoice, longest: int, resume_s: float, num_steps: int
    ) -> Plan | None:
        """The best length, whatever is believed of it, beside a plan that does not draft; see `probe`."""
        usual = self._usual(bucket, self.assess(np.array([bucket]), tokens), choice)
        credit = float(choice.credit[bucket])
        account = Account(credit, credit, num_steps, resume_s / usual.seconds)
        best = of_length(bucket, choice, min(int(choice.lengths[bucket]), longest), 0.0)
        cost = float(account.cost(best.seconds, best.goodput, usual)) + account.resume
        # A full account pays for one however dear, and is in debt for it: what is believed of drafting may be wrong.
        if cost > credit and credit < CAP_STEPS:
            return None
        choice.charge(bucket, cost, num_steps, usual.seconds, account.resume)
        return best.plan

    def _usual(self, bucket: int, known: Assessed, choice: LengthChoice) -> Try:
        """What is played. known: of this bucket. hope: the part of its variance that is no other plan's."""
        plan = self.chosen[bucket]
        if plan is None:
            length = int(choice.lengths[bucket])
            return of_length(bucket, choice, length, float(choice.doubt[bucket, length]) / RISK)
        place = self.place[plan]
        seconds, goodput = float(known.seconds[0, place]), float(known.tokens[0, place] / known.seconds[0, place])
        return Try(plan, float(known.own[0, place]), seconds, goodput)

    def _best_plan(self, known: Assessed, usual: Try, limits: tuple[int, int], account: Account) -> Try:
        """The plan of the grid that may most plausibly be better, of those whose expected loss has been earned."""
        shares, goodput = known.shares[0], known.tokens[0] / known.seconds[0]
        if usual.plan in self.place:
            shares = shares - shares[self.place[usual.plan]]  # what is unsure about both alike cancels
        unsure = self.times.surface.variance(shares) + known.own[0] + known.of_tokens[0] + usual.hope
        hope = np.log(goodput / usual.goodput) + OPTIMISM * np.sqrt(unsure)
        hope[[plan == usual.plan or plan.within(*limits) != plan for plan in self.grid]] = -np.inf
        cost = account.cost(known.seconds[0], goodput, usual)
        hope[~account.pays(cost, self.lengths[self.length_at], usual)] = -np.inf
        place = int(hope.argmax())
        return Try(self.grid[place], float(hope[place]), float(known.seconds[0, place]), float(goodput[place]))

    def _best_length(self, bucket: int, choice: LengthChoice, usual: Try, longest: int, account: Account) -> Try:
        """The length without copies that may most plausibly be better, likewise."""
        unsure = choice.doubt[bucket] / RISK + usual.hope
        unsure[0] += untried_sd(self.step_times) ** 2
        hope = np.log(choice.goodput[bucket] / usual.goodput) + OPTIMISM * np.sqrt(unsure)
        cost = account.cost(choice.seconds[bucket], choice.goodput[bucket], usual)
        hope[~account.pays(cost, np.arange(len(hope)), usual)] = -np.inf
        hope[longest + 1 :] = -np.inf
        length = int(hope.argmax())
        return of_length(bucket, choice, length, float(hope[length]))

    def _oldest_length(
        self, bucket: int, choice: LengthChoice, usual: Try, longest: int, account: Account
    ) -> Try | None:
        """Where nothing is hoped of any and the account is full: another length, of which what is known is oldest."""
        if account.credit < CAP_STEPS:
            return None
        cost = account.cost(choice.seconds[bucket], choice.goodput[bucket], usual)
        length = oldest_of(bucket, self.step_times, cost, account.credit, usual.plan.draft_length, longest)
        return None if length is None else of_length(bucket, choice, length, 0.0)

    @property
    def visited(self) -> np.ndarray:
        """Buckets in which rows copied, or are to."""
        seen = self.times.evidence[..., 0].any(axis=(1, 2))
        return np.flatnonzero(seen | self.at_plans)

    @property
    def at_plans(self) -> np.ndarray:
        """Whether a plan is played, by bucket."""
        return np.array([plan is not None for plan in self.chosen])

    def estimates(self, buckets: np.ndarray, tokens: FloatArray, most: int = 2) -> list[list[PlanEstimate]]:
        """In each bucket the plan that is played, if it copies, and then the best others, `most` in all."""
        if not len(buckets):
            return []
        known = self.assess(buckets, tokens)
        order = np.argsort(known.seconds / known.tokens, axis=1)
        return [
            [self._estimate(known, at, place) for place in self._shown(bucket, order[at].tolist(), most)]
            for at, bucket in enumerate(buckets.tolist())
        ]

    def _shown(self, bucket: int, order: list[int], most: int) -> list[int]:
        now = self.chosen[bucket]
        first = [] if now is None else [self.place[now]]
        return (first + [place for place in order if place not in first])[:most]

    def _estimate(self, known: Assessed, at: int, place: int) -> PlanEstimate:
        tokens, seconds = float(known.tokens[at, place]), float(known.seconds[at, place])
        ms = 1e3 * seconds / tokens
        unsure = float(known.of_time[at, place] + known.of_tokens[at, place])
        spread = float(np.exp(min(1.96 * np.sqrt(unsure), 6.0)))
        return PlanEstimate(self.grid[place], tokens, seconds, ms, ms / spread, ms * spread)

    def restore(self, chosen: list[list[int] | None], news: bool) -> None:
        """Go on with these plans, which may be of a larger grid. news: whether anything came since the last choice."""
        plans = [None if each is None else plan_from(each) for each in chosen]
        self.chosen = [plan if plan in self.place else None for plan in plans]
        self.times.renew()
        self.decided_with = -1 if news else self.version


def of_length(bucket: int, choice: LengthChoice, length: int, hope: float) -> Try:
    """A length without copies, as something that might be played."""
    return Try(Plan(length), hope, float(choice.seconds[bucket, length]), float(choice.goodput[bucket, length]))
