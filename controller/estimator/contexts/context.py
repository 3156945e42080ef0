"""One context: models of step times and of acceptance, and the groups of workers that share one of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from speclen.controller.estimator.acceptance import Acceptance, Parts, band_of
from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.choice import LengthChoice
from speclen.controller.estimator.contexts.group import Group
from speclen.controller.estimator.contexts.prompts import Prompts
from speclen.controller.estimator.contexts.workers import ACCEPTANCE, TIMES, Workers
from speclen.controller.estimator.core import Bucket, ContextKey, DriftEvent, Limits, StepObservation
from speclen.controller.estimator.plans.choice import PlanChoice
from speclen.controller.estimator.plans.copying import Copying
from speclen.controller.estimator.plans.plan import Plan
from speclen.controller.estimator.plans.reviews import TAUGHT_PRIOR
from speclen.controller.estimator.policies.policy import Policy
from speclen.controller.estimator.reports import typical
from speclen.controller.estimator.times.step_time import StepTimes
from speclen.controller.estimator.times.steps import Steps

# Reports of a band of load over which its usual mix of classes is averaged.
MIX_REPORTS = 100.0
# Likewise, for the classes in the tokens that requests put out: what is played is to suit all that come, not the newest few;
# reports that those of all loads count for at one.
CLASS_REPORTS, LOAD_PRIOR = 600.0, 20.0
# Resumptions over which their cost is averaged, and the most that one may count, in usual steps.
RESUMES_REMEMBERED, LARGEST_RESUME_STEPS = 20, 5.0
# Workers whose newest length is remembered.
WORKERS_REMEMBERED = 128


class Context:
    """A new worker shares the first models; the first acceptance is that of the pair, for all devices.

    policy: chooses instead of the estimates, where another one was asked for.
    """

    STATE = (
        "workers",
        "mix",
        "by_class",
        "last_length",
        "resume_s",
        "num_resumes",
        "prompts",
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
        self.band_of_batch = np.array([band_of(max(size, 1)) for size in range(limits.max_batch_size + 1)])
        self.bands = self.band_of_batch[[bucket.batch_max for bucket in buckets]]
        self.groups: dict[tuple[int, int], Group] = {}
        self.main = self.group((0, 0))
        self.workers = Workers(len(buckets) * (limits.max_speculation_length + 1), band_of(limits.max_batch_size) + 1)
        self.mix = np.zeros((self.bands.max() + 1, acceptance.shape[0]))  # usual share of classes by band
        self.mix[:, 0] = 1.0
        self.by_class = np.zeros_like(self.mix)  # tokens per row of reports, by class, summed, fading
        self.last_length: dict[str, int] = {}
        self.resume_s, self.num_resumes = 0.0, 0
        self.prompts = Prompts()
        self.last_drift: DriftEvent | None = None
        self.reports_since_drift, self.next_probe_id = 0, 1
        self.recent: list[int] = []  # buckets of the newest reports

    def go_on_from(self, old: Context) -> None:
        """Take over what a context with smaller limits was at, but for its estimates."""
        self.main.version, self.main.lengths = old.main.version, old.main.lengths[: len(self.buckets) - 1]
        for name in (
            "last_length",
            "resume_s",
            "num_resumes",
            "prompts",
            "last_drift",
            "reports_since_drift",
            "next_probe_id",
        ):
            setattr(self, name, getattr(old, name))
        self.mix[: len(old.mix)], self.by_class[: len(old.mix)] = old.mix, old.by_class
        if old.policy is not None:
            self.policy, old.policy.space.limits, old.policy.space.buckets = old.policy, self.limits, self.buckets
            old.policy.extend()

    def tell_policy(self, steps: Sequence[StepObservation]) -> None:
        """Another policy that chooses learns from single steps."""
        if self.policy is not None:
            alone = [typical(step) for step in steps]
            self.policy.update(self.main.times.bucket_of[[step.batch_size for step in alone]], alone)

    def new_times(self) -> StepTimes:
        """Step times that know nothing."""
        return StepTimes(self.buckets, self.limits.max_speculation_length)

    def new_acceptance(self) -> Acceptance:
        """An acceptance that knows nothing."""
        classes, bands, positions = self.acceptances[0].shape
        return Acceptance(positions, bands, classes)

    def group_of(self, worker: str) -> Group:
        """The group that a worker belongs to."""
        return self.group(self.workers.models_of(worker))

    def group(self, models: tuple[int, int], like: Group | None = None) -> Group:
        """The group with these models, a new one if need be; `like` gives its first lengths."""
        group = self.groups.get(models)
        if group is None:
            choice = LengthChoice(len(self.buckets), self.limits.max_speculation_length)
            times = self.times[models[TIMES]]
            acceptance = self.acceptances[models[ACCEPTANCE]]
            group = Group(times, acceptance, choice, self.new_plans(times, acceptance))
            self.groups[models] = group
            if like is not None:
                group.version, group.lengths = like.version, list(like.lengths)
                if group.plans is not None and like.plans is not None:
                    group.plans.chosen = list(like.plans.chosen)
        return group

    def drop_groups(self, place: int, model: int) -> None:
        """Groups of workers that have gone, whose model others are to have. place: `TIMES` or `ACCEPTANCE`."""
        for models in [each for each in self.groups if each[place] == model]:
            del self.groups[models]

    def tell_surfaces(self) -> None:
        """Let step times learn from steps that copied, too, of every group that has workers: of others nothing is new."""
        present = {(0, 0), *(tuple(peer.models) for peer in self.workers.peers.values())}
        for times in self.times:
            times.beside = []
        for models, group in self.groups.items():
            if group.plans is not None and models in present:
                group.times.beside.append(group.plans.times.told)

    def new_plans(self, times: StepTimes, acceptance: Acceptance) -> PlanChoice | None:
        """Plans of workers with these models; None where none can copy, or another policy chooses."""
        if not self.limits.max_copied_tokens or self.policy is not None:
            return None
        return PlanChoice(times, self.copying, self.limits.max_copied_tokens, acceptance)

    def allow_copies(self, limits: Limits) -> None:
        """Workers can copy, or more than before; nothing else of the limits has changed."""
        self.limits = limits
        for group in self.groups.values():
            if group.plans is None:
                group.plans = self.new_plans(group.times, group.acceptance)
            else:
                group.plans.extend(limits.max_copied_tokens)

    def tokens(self, group: Group) -> FloatArray:
        """Expected tokens per row and step of the usual mix of classes, [buckets, lengths]."""
        known = group.acceptance.tokens[:, : len(self.mix), : self.limits.max_speculation_length + 1]
        mixed: FloatArray = np.einsum("bk,kbl->bl", self.mix, known)
        if seen := group.acceptance.reviews.num_outputs:
            steps = np.einsum("bk,kbl->bl", self.classes(), 1.0 / known)
            mixed = (seen + TAUGHT_PRIOR) / (seen * steps + TAUGHT_PRIOR / mixed)
        of_buckets: FloatArray = np.maximum(mixed[self.bands], 1.0)  # shares sum to 1 only about
        return of_buckets

    def classes(self) -> FloatArray:
        """Shares of classes in the tokens that requests put out, by load, [bands, classes]."""
        total = self.by_class.sum(axis=0)
        if not total.any():
            return self.mix
        usual = LOAD_PRIOR * total / total.sum()
        shares: FloatArray = (self.by_class + usual) / (self.by_class.sum(axis=1, keepdims=True) + LOAD_PRIOR)
        return shares

    def tell_plans(self, group: Group) -> None:
        """What the plans of a group are judged by, beside their own: what prompts cost, and who asks for tokens."""
        if group.plans is not None:
            group.plans.prompts, group.plans.classes = self.prompts.share, self.classes()[self.bands]

    def probe(self, group: Group, bucket: int, limits: tuple[int, int], num_steps: int) -> Plan | None:
        """An exploratory length or plan for so many steps, charged to the bucket; mostly None. limits: as in `PlanChoice`.

        Where lengths are played, both are asked in turn; where a plan is, lengths are among what it is compared with. Where
        nothing is drafted, every second probe drafts, and is saved up for: only that shows whether it would pay again.
        """
        longest, max_copied = limits
        plans, choice = group.plans if max_copied else None, group.choice
        if plans is None or choice.to_follow[bucket]:
            return self._probe_length(group, bucket, longest, num_steps)
        plan = plans.chosen[bucket]
        drafts = plan.draft_length if plan is not None else choice.lengths[bucket]
        if not drafts and group.drafts_next[bucket] and longest and choice.decided:
            if choice.lengths[bucket] == 0:
                found = self._probe_length(group, bucket, longest, num_steps)
            else:
                tokens = self.tokens(group)[[bucket]]
                found = plans.probe_draft(bucket, tokens, choice, longest, self.resume_s, num_steps)
            group.drafts_next[bucket] = found is None
            return found
        if plan is None and self.next_probe_id % 2:
            length = self._probe_length(group, bucket, longest, num_steps)
            if length is not None:
                return length
        tokens = self.tokens(group)[[bucket]]
        self.tell_plans(group)
        found = plans.probe(bucket, tokens, choice, limits, self.resume_s, num_steps)
        group.drafts_next[bucket] |= found is not None
        return found

    def _probe_length(self, group: Group, bucket: int, longest: int, num_steps: int) -> Plan | None:
        length = group.choice.probe(bucket, group.times, self.resume_s, longest, num_steps)
        return None if length is None else Plan(length)

    def learn_mix(self, parts: Parts, tokens: FloatArray) -> None:
        """Follow which classes of requests are usual at each load. tokens: that a row of each part puts out in a step, [p].

        Requests that what is played gets through quickly are in few steps: their rows tell of more tokens each.
        """
        bands, kinds = self.mix.shape
        cells = parts.bands * kinds + parts.kinds
        rows, put_out = (
            np.bincount(cells, each, bands * kinds).reshape(bands, kinds)
            for each in (parts.share, parts.share * tokens)
        )
        seen = rows.sum(axis=1, keepdims=True)
        self.mix += (1.0 - np.exp(-seen / MIX_REPORTS)) * (rows / np.maximum(seen, 1e-9) - self.mix)
        self.by_class = self.by_class * np.exp(-seen / CLASS_REPORTS) + put_out

    def learn_resuming(self, steps: Sequence[StepObservation], worker: str) -> None:
        """Track what the first step with draft tokens after plans without takes longer: the draft catches up in it.

        Workers flag such a step, so that it teaches no latency. Other flags may fall on it, hence the bounds.
        """
        group, previous = self.group_of(worker), self.last_length.pop(worker, -1)
        for step in steps:
            copying = step.copying
            drafts = step.speculation_length if copying is None else copying.plan.draft_length
            flagged = not (step.teaches_latency if copying is None else copying.teaches_latency)
            if flagged and previous == 0 < step.speculation_length and step.num_steps == 1 and group.choice.decided:
                usual = group.usual_s(step)
                extra = min(max(step.latency_s - usual, 0.0), LARGEST_RESUME_STEPS * usual)
                self.num_resumes += 1
                self.resume_s += (extra - self.resume_s) / min(self.num_resumes, RESUMES_REMEMBERED)
            previous = drafts
        self.last_length[worker] = previous
        if len(self.last_length) > WORKERS_REMEMBERED:
            del self.last_length[next(iter(self.last_length))]

    def record(self, group: Group, steps: Steps) -> None:
        """Keep for comparison what step times have just learned from."""
        cell, log_s, surprise = group.times.newest
        if len(cell) == len(steps.batch):  # else nothing was known yet
            speeds, _ = group.times.watch.now(steps.spans)
            over = surprise + steps.offset
            if not (np.isfinite(over).all() and np.isfinite(speeds).all()):
                return  # the model's numbers are none any more: it starts anew, and is no yardstick
            self.workers.record_times(steps.spans, cell, log_s + steps.offset, over, speeds, steps.num_steps)
