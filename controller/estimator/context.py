"""One context: models of step times and of acceptance, and the groups of workers that share one of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from speclen.controller.estimator.acceptance import Acceptance, Parts, band_of
from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.choice import LengthChoice
from speclen.controller.estimator.core import Bucket, ContextKey, Decision, DriftEvent, Limits, StepObservation
from speclen.controller.estimator.plans.choice import PlanChoice
from speclen.controller.estimator.plans.copying import Copying
from speclen.controller.estimator.plans.plan import Plan
from speclen.controller.estimator.policies.policy import Policy
from speclen.controller.estimator.step_time import MOST_EVIDENCE, UNLIKE_SD, Steps, StepTimes
from speclen.controller.estimator.workers import ACCEPTANCE, TIMES, Workers

# Reports of a band of load over which its usual mix of classes is averaged.
MIX_REPORTS = 100.0
# Resumptions over which their cost is averaged, and the most that one may count, in usual steps.
RESUMES_REMEMBERED, LARGEST_RESUME_STEPS = 20, 5.0
# Drift is named as the reason of a decision for so many reports. Workers whose newest length is remembered.
DRIFT_NAMED_REPORTS, WORKERS_REMEMBERED = 1000, 128


class Group:
    """Workers that are alike: what is believed about them, and what they play."""

    STATE = ("choice", "version", "lengths")

    def __init__(
        self, times: StepTimes, acceptance: Acceptance, choice: LengthChoice, plans: PlanChoice | None = None
    ) -> None:
        self.times, self.acceptance, self.choice, self.plans = times, acceptance, choice, plans
        self.version, self.seen = (
            0,
            (-1, -1, -1),
        )  # seen: versions of times, acceptance and plans that the choice rests on
        self.lengths: list[int] = []
        self.last_decision: dict[int, Decision] = {}

    @property
    def newest(self) -> tuple[int, int, int]:
        """Versions of step times, acceptance and what plans rest on by now."""
        return self.times.version, self.acceptance.version, 0 if self.plans is None else self.plans.version

    @property
    def played(self) -> list[Plan]:
        """By bucket."""
        if self.plans is None:
            return [Plan(length) for length in self.lengths]
        pairs = zip(self.lengths, self.plans.chosen, strict=False)
        return [plan or Plan(length) for length, plan in pairs]


class Context:
    """A new worker shares the first models; the first acceptance is that of the pair, for all devices.

    policy: chooses instead of the estimates, where another one was asked for.
    """

    STATE = (
        "workers",
        "mix",
        "last_length",
        "resume_s",
        "num_resumes",
        "reports_since_drift",
        "next_probe_id",
        "recent",
    )

    def __init__(
        self,
        key: ContextKey,
        limits: Limits,
        buckets: tuple[Bucket, ...],
        acceptance: Acceptance,
        policy: Policy | None = None,
        copying: Copying | None = None,
    ) -> None:
        self.key, self.limits, self.buckets, self.policy = key, limits, buckets, policy
        self.copying = copying or Copying()
        self.times = [self.new_times()]
        self.acceptances = [acceptance]
        self.groups: dict[tuple[int, int], Group] = {}
        self.main = self.group((0, 0))
        self.workers = Workers(len(buckets) * (limits.max_speculation_length + 1))
        self.band_of_batch = np.array([band_of(max(size, 1)) for size in range(limits.max_batch_size + 1)])
        self.bands = self.band_of_batch[[bucket.batch_max for bucket in buckets]]
        self.mix = np.zeros((self.bands.max() + 1, acceptance.shape[0]))  # usual share of classes by band
        self.mix[:, 0] = 1.0
        self.last_length: dict[str, int] = {}
        self.resume_s, self.num_resumes = 0.0, 0
        self.last_drift: DriftEvent | None = None
        self.reports_since_drift, self.next_probe_id = 0, 1
        self.recent: list[int] = []  # buckets of the newest reports

    def new_times(self) -> StepTimes:
        """Step times that know nothing."""
        return StepTimes(self.buckets, self.limits.max_speculation_length)

    def new_acceptance(self) -> Acceptance:
        """An acceptance that knows nothing."""
        classes, bands, positions = self.acceptances[0].shape
        return Acceptance(positions, bands, classes)

    def group_of(self, worker: str) -> Group:
        """The group that a worker belongs to."""
        peer = self.workers.peers.get(worker)
        return self.main if peer is None else self.group((peer.models[TIMES], peer.models[ACCEPTANCE]))

    def group(self, models: tuple[int, int], like: Group | None = None) -> Group:
        """The group with these models, a new one if need be; `like` gives its first lengths."""
        group = self.groups.get(models)
        if group is None:
            choice = LengthChoice(len(self.buckets), self.limits.max_speculation_length)
            times = self.times[models[TIMES]]
            group = Group(times, self.acceptances[models[ACCEPTANCE]], choice, self.new_plans(times))
            self.groups[models] = group
            if like is not None:
                group.version, group.lengths = like.version, list(like.lengths)
                if group.plans is not None and like.plans is not None:
                    group.plans.chosen = list(like.plans.chosen)
        return group

    def new_plans(self, times: StepTimes) -> PlanChoice | None:
        """Plans of workers with these times; None where none can copy, or another policy chooses."""
        if not self.limits.max_copied_tokens or self.policy is not None:
            return None
        return PlanChoice(times, self.copying, self.limits.max_copied_tokens)

    def allow_copies(self, limits: Limits) -> None:
        """Workers can copy, or more than before; nothing else of the limits has changed."""
        self.limits = limits
        for group in self.groups.values():
            if group.plans is None:
                group.plans = self.new_plans(group.times)
            else:
                group.plans.extend(limits.max_copied_tokens)

    def tokens(self, group: Group) -> FloatArray:
        """Expected tokens per row and step of the usual mix of classes, [buckets, lengths]."""
        known = group.acceptance.tokens[:, : len(self.mix), : self.limits.max_speculation_length + 1]
        mixed: FloatArray = (self.mix.T[:, :, None] * known).sum(axis=0)[self.bands]
        return np.maximum(mixed, 1.0)  # shares sum to 1 only about

    def redecide(self, group: Group, cause: str = "") -> list[Decision]:
        """Choose anew by the newest estimates; returns what changed, and why."""
        group.seen = group.newest
        group.choice.decide(self.tokens(group), group.times, self.resume_s)
        chosen: list[int] = group.choice.lengths.tolist() if self.policy is None else self.policy.pull_all()
        before: list[Plan | None] = [*group.played]
        group.lengths = chosen
        if group.plans is not None:
            self._decide_plans(group, group.plans)
        after = group.played
        if before == after:
            return []
        before += [None] * (len(after) - len(before))
        group.version += 1
        changed = [
            self._explained(group, bucket, old, new, cause)
            for bucket, old, new in zip(self.buckets, before, after, strict=True)
            if old != new
        ]
        group.last_decision |= {decision.bucket.index: decision for decision in changed}
        return changed

    def _decide_plans(self, group: Group, plans: PlanChoice) -> None:
        """Where rows copy, and how, in buckets that there is news of."""
        if not group.choice.decided:
            return
        buckets = plans.due(self.recent)
        if len(buckets):
            plans.decide(buckets, self.tokens(group)[buckets], group.choice)

    def ms_per_token(self, group: Group, bucket: Bucket, plan: Plan) -> float:
        """Expected time per row and token of a length or of a plan of the grid, in milliseconds."""
        if not plan.copy_min_match or group.plans is None:
            return 1e3 / float(group.choice.goodput[bucket.index, plan.draft_length])
        known = group.plans.assess(np.array([bucket.index]), self.tokens(group)[[bucket.index]])
        place = group.plans.place[plan]
        return 1e3 * float(known.seconds[0, place] / known.tokens[0, place])

    def _explained(self, group: Group, bucket: Bucket, old: Plan | None, new: Plan, cause: str) -> Decision:
        lengths = None if old is None else old.draft_length, new.draft_length
        plans = [each if each is not None and each.copy_min_match else None for each in (old, new)]
        if not group.times.known:
            reason = "nothing is known yet: a cautious length until the first steps were measured"
            return Decision(self.key, bucket, group.version, *lengths, None, None, reason, *plans)
        now, then = (
            self.ms_per_token(group, bucket, new),
            None if old is None else self.ms_per_token(group, bucket, old),
        )
        if then is None:
            reason = f"first choice: {in_words(new)} at {now:.4g} ms per token"
        else:
            gain = 100.0 * (then / now - 1.0)
            reason = (
                f"{in_words(new)} promises {now:.4g} ms per token, {in_words(old)} {then:.4g} ({gain:+.1f}% goodput)"
            )
        drift = self.last_drift
        if not cause and drift is not None and self.reports_since_drift < DRIFT_NAMED_REPORTS:
            verb = "rose" if drift.statistic > 0 else "fell"
            cause = f"{drift.factor} {verb} {self.reports_since_drift} reports ago"
        reason = f"{reason}; {cause}" if cause else reason
        return Decision(self.key, bucket, group.version, *lengths, then, now, reason, *plans)

    def probe(self, group: Group, bucket: int, longest: int, max_copied: int) -> Plan | None:
        """An exploratory length or plan for one step, charged to the bucket; mostly None.

        Where lengths are played, both are asked in turn; where a plan is, lengths are among what it is compared with.
        """
        plans = group.plans if max_copied else None
        if plans is None or (
            plans.chosen[bucket] is None and (self.next_probe_id % 2 or group.choice.to_follow[bucket])
        ):
            length = group.choice.probe(bucket, group.times, self.resume_s, longest)
            if length is not None or plans is None:
                return None if length is None else Plan(length)
        return plans.probe(bucket, self.tokens(group)[[bucket]], group.choice, (longest, max_copied))

    def learn_mix(self, parts: Parts) -> None:
        """Follow which classes of requests are usual at each load."""
        if not parts.kinds.any() and (self.mix[:, 0] == 1.0).all():
            return
        rows = np.zeros(self.mix.shape)
        np.add.at(rows, (parts.bands, parts.kinds), parts.share)
        seen = rows.sum(axis=1, keepdims=True)
        self.mix += (1.0 - np.exp(-seen / MIX_REPORTS)) * (rows / np.maximum(seen, 1e-9) - self.mix)

    def learn_resuming(self, steps: Sequence[StepObservation], worker: str) -> None:
        """Track what the first step with draft tokens after length 0 takes longer: the draft catches up in it.

        Workers flag such a step, so that it teaches no latency. Other flags may fall on it, hence the bounds.
        """
        group, previous = self.group_of(worker), self.last_length.pop(worker, -1)
        for step in steps:
            resumed = previous == 0 < step.speculation_length and step.copying is None and step.num_steps == 1
            if resumed and not step.teaches_latency and group.choice.decided:
                usual = float(group.choice.seconds[group.times.bucket_of[step.batch_size], step.speculation_length])
                extra = min(max(step.latency_s - usual, 0.0), LARGEST_RESUME_STEPS * usual)
                self.num_resumes += 1
                self.resume_s += (extra - self.resume_s) / min(self.num_resumes, RESUMES_REMEMBERED)
            previous = step.speculation_length
        self.last_length[worker] = previous
        if len(self.last_length) > WORKERS_REMEMBERED:
            del self.last_length[next(iter(self.last_length))]

    def record(self, group: Group, steps: Steps) -> None:
        """Keep for comparison what step times have just learned from."""
        times, (log_s, surprise) = group.times, group.times.newest
        if len(log_s) != len(steps.batch):
            return  # nothing was known yet
        cell = times.cell_of(steps.batch, steps.length)
        log_s, surprise = log_s + steps.offset, surprise + steps.offset
        for worker, span in steps.spans:
            peer = self.workers.peer(worker)
            if peer is not None:
                speed = times.watch.speed_of(worker).mean
                self.workers.record_times(peer, cell[span], log_s[span], surprise[span], speed, steps.num_steps[span])

    def compare(self, num_reports: int) -> list[DriftEvent]:
        """Compare workers when it is time; returns who was found unlike the others."""
        workers, events = self.workers, []
        if not workers.due(num_reports):
            return []
        for model in range(len(self.times)):
            while (worker := workers.unlike_in_time(model, self.times[model].noise)) is not None:
                events.append(self._set_times_apart(worker))
        for model in range(len(self.acceptances)):
            if (worker := workers.unlike_in_acceptance(model)) is not None:
                events.append(self._set_acceptance_apart(worker))
        return events

    def _set_times_apart(self, worker: str) -> DriftEvent:
        """A worker whose times are unlike gets its own."""
        workers, peer, like = self.workers, self.workers.peers[worker], self.group_of(worker)
        old, new = peer.models[TIMES], len(self.times)
        self.times.append(self.new_times())
        self.times[new].begin_like(like.times, UNLIKE_SD)
        peer.models[TIMES] = new
        for model in (old, new):
            sharing = [each for _, each in workers.sharing(TIMES, model)]
            for each in sharing:
                each.offset = 0.0
            self.times[model].rebuild(*workers.evidence(model, MOST_EVIDENCE))
            for each in sharing:
                each.level = each.over(self.times[model].log_seconds)
        self.group((new, peer.models[ACCEPTANCE]), like)
        return self._apart(worker, "step times")

    def _set_acceptance_apart(self, worker: str) -> DriftEvent:
        """A worker whose accepted tokens are unlike gets its own; the others' forget what was learned from it."""
        peer, like = self.workers.peers[worker], self.group_of(worker)
        peer.models[ACCEPTANCE] = len(self.acceptances)
        self.acceptances.append(self.new_acceptance())
        like.acceptance.forget_all()
        for each in self.workers.peers.values():
            each.tokens = [0.0, 0.0, 0.0]
        self.group((peer.models[TIMES], peer.models[ACCEPTANCE]), like)
        return self._apart(worker, "accepted tokens")

    def _apart(self, worker: str, what: str) -> DriftEvent:
        detail = f"{what} of worker {worker} are unlike the others': in this it is learned from for itself"
        return DriftEvent(self.key, "worker", 1.0, detail)


def in_words(plan: Plan | None) -> str:
    """A length is called so; plans have words of their own."""
    return str(plan) if plan is not None and plan.copy_min_match else f"length {plan.draft_length if plan else 0}"
