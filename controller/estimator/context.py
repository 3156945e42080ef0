"""Learned state of one context: hardware, engine and models. One thread calls it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from speclen.controller.estimator.choice import Selection
from speclen.controller.estimator.features import Prior, features_of, num_slopes, prior_of
from speclen.controller.estimator.isolation import Worker, is_apart
from speclen.controller.estimator.load import Traffic
from speclen.controller.estimator.model import Estimates, Grid, Saved, estimate
from speclen.controller.estimator.sizes import Cells, ranges_to
from speclen.controller.estimator.step_time import Evidence, Samples
from speclen.controller.estimator.tokens import Ratios, TokenEvidence, TokenPrior, ratios_of
from speclen.controller.estimator.workers import Workers, fair_weights
from speclen.records import NGRAM_MAX_TOKENS, Arm, ContextKey, DriftEvent, Limits, RequestClass, StepFlag, StepRecord

Array = np.ndarray

FIRST_SOLVE, LAST_SOLVE, SOLVE_GROWTH = 8.0, 512.0, 0.1  # reports between two solutions: at first, at most, per report
POOL = ""  # name of the group that agrees
CAUSED = {StepFlag.CATCH_UP, StepFlag.CHANGED_ARM}  # what else takes longer is no cost of a probe
NEAR_PROBE = 1.5  # a probe may run at batch sizes up to so many times larger or smaller


class Group:
    """Workers that share a table, all but those that differ. num_learned: reports so far; pending: since the solution."""

    STATE = ("pending", "num_learned")

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self.estimates: Estimates | None = None
        self.saved: Saved | None = None  # while it is saved or restored
        self.pending = self.num_learned = 0.0
        self._believed: tuple[Estimates | None, Array, Array] = (None, np.zeros(0), np.zeros(0))

    def believed(self, cells: Cells, offset: Array) -> tuple[Array, Array]:
        """Log time of every cell, and its variance, by the newest estimates."""
        assert self.estimates is not None
        known, theta, variance = self._believed
        if known is not self.estimates or len(theta) != len(cells.numbers):
            theta, variance = self.estimates.believed(cells, offset)
            self._believed = (self.estimates, theta, variance)
        return theta, variance


class Context:
    """Cells, workers and groups of one context. siblings: all contexts of the pair, which share accepted tokens."""

    STATE = ("prior_mean", "prior_precision", "level", "offset", "profiled")

    def __init__(self, key: ContextKey, limits: Limits, token_prior: TokenPrior, siblings: Sequence[Context]) -> None:
        self.key, self.limits, self.token_prior, self.siblings = key, limits, token_prior, siblings
        lengths = limits.max_speculation_length + 1
        widest = max(lengths, NGRAM_MAX_TOKENS + 1 if limits.ngram else 1)
        self.grid = Grid(ranges_to(limits.max_batch_size), lengths, num_slopes(limits.max_batch_size * widest))
        self.prior_mean, self.prior_precision = prior_of(self.grid.slopes)
        self.level = 0.0  # log seconds, before any report
        self.offset = np.zeros(self.grid.num_cells)  # residuals of a profile
        self.profiled = np.zeros(len(self.grid.sizes), dtype=bool)
        self.cells = Cells(len(self.prior.mean))
        self.traffic = Traffic(len(self.grid.sizes))
        self.workers = Workers(len(self.prior.mean), len(token_prior.accepted))
        self.has_decided = False
        self.num_reports = 0
        self.num_probes = 0
        self.groups = {POOL: self.new_group()}

    @property
    def prior(self) -> Prior:
        """Of the weights of the surface."""
        return Prior(self.prior_mean, self.prior_precision)

    def arm(self, place: int) -> Arm:
        """The arm at a place of [2 x lengths]."""
        ngram, length = divmod(place, self.grid.num_lengths)
        return Arm(length, bool(ngram))

    def arms_in_use(self) -> dict[str, Array]:
        """Places of the arms in use, by group, [ranges]."""
        return {name: group.selection.arms.copy() for name, group in self.groups.items()}

    def select(self, lengths: Array) -> None:
        """Use these lengths, of a policy that does not learn."""
        selection = self.groups[POOL].selection
        selection.version += bool((selection.arms != lengths).any())
        selection.arms, selection.frozen = lengths.astype(int), True

    def extend_tokens(self, max_length: int) -> None:
        """Make room for longer lengths of the pair."""
        for tokens in self.workers.all_tokens():
            tokens.extend(max_length)
        for group in self.groups.values():
            group.estimates = None

    def go_on_from(self, narrower: Context) -> None:
        """Take over from the context before it was widened: evidence of tokens, arms in use and counts."""
        self.has_decided, self.num_probes = narrower.has_decided, narrower.num_probes
        self.workers.tokens = narrower.workers.tokens
        for name, worker in narrower.workers.tracked.items():
            new = self.workers.tracked[name] = self.workers.new()
            new.tokens, new.tail.level = worker.tokens, worker.tail.level
        old, new_choice = narrower.groups[POOL].selection, self.groups[POOL].selection
        at = narrower.grid.ranges.of[np.minimum(self.grid.sizes, narrower.limits.max_batch_size)]
        ngram, length = np.divmod(old.arms[at], old.num_lengths)
        new_choice.arms, new_choice.version = ngram * self.grid.num_lengths + length, old.version + 1
        self.traffic.seen = np.where(self.grid.sizes <= narrower.limits.max_batch_size, narrower.traffic.seen[at], 0.0)

    def new_group(self) -> Group:
        """A group that knows nothing yet."""
        lengths = self.grid.num_lengths
        allowed = np.array([[True] * lengths, [self.limits.ngram] * lengths])
        return Group(Selection(len(self.grid.sizes), lengths, allowed))

    def group_name(self, worker_id: str) -> str:
        """Name of the group that a worker belongs to: its own where it differs from the others."""
        return worker_id if worker_id in self.groups else POOL

    def group_of(self, worker_id: str) -> Group:
        """The group that a worker belongs to."""
        return self.groups[self.group_name(worker_id)]

    # Learning

    def observe(self, records: Sequence[StepRecord], worker_id: str) -> tuple[list[int], list[DriftEvent]]:
        """Learn from consecutive steps of one worker; returns ranges of sizes whose arm changed, and detected changes."""
        worker = self.workers.find(worker_id, self.num_reports, self.groups)
        self.groups = {name: each for name, each in self.groups.items() if name in self.workers.tracked or name == POOL}
        group, (times, tokens) = self.group_of(worker_id), self.workers.evidence_of(worker_id)
        self.num_reports += len(records)
        worker.num_reports += len(records)
        worker.last_seen = self.num_reports
        if group.estimates is None:
            self.solve(self.group_name(worker_id))
        events = self._learn_tokens(tokens, group, records)
        self.traffic.count(records, self.grid.ranges.of)
        if usable := [record for record in records if not record.flags]:
            self._learn_times(worker, times, group, usable)
        self._earn(group, records)
        if worker_id in self.workers.tracked and worker.is_due:
            events += self._compare(worker_id, worker)
            group = self.group_of(worker_id)
        group.pending += len(records)
        group.num_learned += len(records)
        if events or group.pending >= min(FIRST_SOLVE + SOLVE_GROWTH * group.num_learned, LAST_SOLVE):
            return self.solve(self.group_name(worker_id)), events
        return [], events

    def _learn_tokens(self, tokens: TokenEvidence, group: Group, records: Sequence[StepRecord]) -> list[DriftEvent]:
        assert group.estimates is not None
        changes = tokens.add(records, group.estimates.ratios)
        words = "accepted tokens of {} requests changed"
        return [
            DriftEvent(
                self.key, "acceptance", statistic, words.format(RequestClass(kind).name.lower().replace("_", "-"))
            )
            for kind, statistic in changes
        ]

    def _learn_times(self, worker: Worker, evidence: Evidence, group: Group, records: list[StepRecord]) -> None:
        assert group.estimates is not None
        values = np.array([
            (r.batch_size, r.arm.speculation_length, r.num_drafted_sequences, r.num_verified_tokens,
             r.mean_context_length, r.latency_s, r.arm.ngram)
            for r in records
        ], dtype=float).T  # fmt: skip
        batch, length, drafted, verified, held, seconds, ngram = values
        features = features_of([batch, np.where(drafted > 0, length, 0.0), drafted, verified, held], self.grid.slopes)
        batch, ngram, length = values[[0, 6, 1]].astype(int)
        places = self.cells.places(self.grid.cells_at(batch, ngram, length), features)
        evidence.grow(len(self.cells.numbers))
        weights = np.exp(group.estimates.solution.phi)
        theta, variance = group.believed(self.cells, self.offset)
        # What a step took is put down to the features of its cell's first step: they differ in context and n-gram tokens.
        log_s = np.log(seconds * (self.cells.features[places] @ weights) / (features @ weights))
        evidence.add(worker.tail, Samples(places, features, log_s), theta, variance)

    def _earn(self, group: Group, records: Sequence[StepRecord]) -> None:
        """Give steps' time to the exploration budget, and charge what steps of probes took longer."""
        usual = np.array([(r.batch_size, r.latency_s) for r in records if not r.probe_id]).reshape(-1, 2)
        group.selection.earn(self.grid.ranges.of[usual[:, 0].astype(int)], usual[:, 1])
        for record in records:
            if record.probe_id and record.flags <= CAUSED:
                place = record.arm.ngram * self.grid.num_lengths + record.arm.speculation_length
                group.selection.pay(self.grid.ranges.of[record.batch_size], place, record.latency_s)

    def _compare(self, worker_id: str, worker: Worker) -> list[DriftEvent]:
        """Hold a worker against the others; isolate it, or let it join them again."""
        if len(self.workers.tracked) < 2:
            return []
        worker.note(self.cells.features, self.prior, self.token_prior)
        events = []
        for name, other in self.workers.tracked.items():
            before = other.apart
            if other.compared_at:
                other.apart = is_apart(other, self.workers.tracked.values())
            if any(before) != any(other.apart):
                events.append(self._regroup(name, other))
        return events

    def _regroup(self, name: str, worker: Worker) -> DriftEvent:
        if any(worker.apart):
            group = self.groups[name] = self.new_group()
            group.selection.go_on_from(self.groups[POOL].selection)
            parts = zip(("step times", "accepted tokens"), worker.apart, strict=True)
            what = " and ".join(part for part, apart in parts if apart)
            sentence = f"{name} differs from the other workers in {what}: it has a table of its own"
        else:
            version = self.groups.pop(name).selection.version
            pool = self.groups[POOL].selection
            pool.version = max(pool.version, version) + 1
            sentence = f"{name} agrees with the other workers again"
        self.solve(POOL)
        return DriftEvent(self.key, "worker", 1.0, sentence)

    # Estimates

    def solve(self, name: str) -> list[int]:
        """Estimate anew for a group and select; returns the ranges of sizes whose arm changed."""
        group = self.groups[name]
        group.pending = 0.0
        self.workers.drop_cells(self.cells)
        times = self._times_of(name)
        weights = fair_weights([float(each.count.sum()) for each in times])
        last = None if group.estimates is None else group.estimates.solution
        load = self.traffic.load()
        group.estimates = estimate(
            self.grid, self.cells, times, weights, self._ratios_of(name), self.prior, load, last, self.offset,
            self._level_of(name),
        )  # fmt: skip
        return group.selection.choose(group.estimates, self.traffic.seen, self.profiled, self.grid.sizes)

    def _times_of(self, name: str) -> list[Evidence]:
        isolated = name != POOL and self.workers.tracked[name].apart[0]
        return [self.workers.tracked[name].times] if isolated else self.workers.shared_times()

    def _level_of(self, name: str) -> float:
        if name != POOL and self.workers.tracked[name].tail.num_samples:
            return self.workers.tracked[name].tail.level
        shared = self.workers.shared_level()
        return self.level if shared is None else shared

    def _ratios_of(self, name: str) -> Ratios:
        if name != POOL and self.workers.tracked[name].apart[1]:
            return ratios_of([self.workers.tracked[name].tokens], [1.0], self.token_prior)
        evidence = [each for sibling in self.siblings for each in sibling.workers.shared_tokens()]
        return ratios_of(evidence, fair_weights([each.amount for each in evidence]), self.token_prior)

    def shared_amount(self) -> float:
        """Tokens of all contexts of the pair that there is evidence of."""
        return sum(each.amount for sibling in self.siblings for each in sibling.workers.shared_tokens())

    def survival(self) -> list[tuple[float, float]]:
        """P(the first i draft tokens are all accepted), and the evidence for it, by position."""
        ratios = self._ratios_of(POOL)
        share = self.traffic.load().mix.mean(axis=0)
        survival = np.cumprod(share @ ratios.accepted)
        return list(zip(survival.tolist(), ratios.trials.tolist(), strict=True))

    def samples(self) -> tuple[Array, Array]:
        """Samples of every cell number, fading, and the sum of their log times."""
        count, log_sum = np.zeros((2, len(self.offset)))
        for each in self._times_of(POOL):
            numbers = self.cells.numbers[: len(each.count)]
            count[numbers] += each.count
            log_sum[numbers] += each.log_sum
        return count, log_sum

    def level_variance(self) -> float:
        """Variance of the level: how far step times wander, over the samples that it is averaged over."""
        return self.workers.noise() ** 2 / max(min(self.num_reports, 300.0) / 10.0, 1.0)

    # Exploration

    def take_probe(
        self, batch_size: int, limits: Limits, num_steps: int, worker_id: str
    ) -> tuple[int, int, int, Arm] | None:
        """Id, range of batch sizes and arm of a probe, charged; mostly None."""
        group = self.group_of(worker_id)
        index = self.grid.ranges.of[min(batch_size, self.limits.max_batch_size)]
        allowed = np.zeros((2, self.grid.num_lengths), dtype=bool)
        allowed[: 1 + limits.ngram, : limits.max_speculation_length + 1] = True
        place = group.selection.probe(index, allowed, num_steps)
        if place is None:
            return None
        self.num_probes += 1
        ngram, length = divmod(place, self.grid.num_lengths)
        low, high = int(np.ceil(batch_size / NEAR_PROBE)), int(batch_size * NEAR_PROBE)
        return self.num_probes, low, min(high, self.limits.max_batch_size), Arm(length, bool(ngram))
