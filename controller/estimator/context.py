"""Learned state of one context: hardware, engine and models. One thread calls it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speclen.controller.estimator import settings
from speclen.controller.estimator.choice import Selection, pause
from speclen.controller.estimator.features import features_of
from speclen.controller.estimator.isolation import Worker, is_apart
from speclen.controller.estimator.load import Traffic
from speclen.controller.estimator.model import Estimates, estimates_of, solve_all
from speclen.controller.estimator.saving import Array
from speclen.controller.estimator.seeding import evidence_of
from speclen.controller.estimator.sizes import Cells, Grid
from speclen.controller.estimator.step_time import NOTHING, Evidence, Samples
from speclen.controller.estimator.tokens import Ratios, TokenEvidence, ratios_of, unseen_acceptance
from speclen.controller.estimator.workers import Workers, fair_weights
from speclen.records import Arm, ContextKey, DriftEvent, Limits, Profile, RequestClass, StepFlag, StepRecord

POOL = ""  # name of the group that agrees
CAUSED = {StepFlag.CATCH_UP, StepFlag.CHANGED_ARM}  # what else takes longer is no cost of a probe


@dataclass(eq=False)
class Group:
    """Workers that share a table: all but those that differ. pending: reports since the estimates were made."""

    selection: Selection
    estimates: Estimates | None = None
    num_learned: int = 0
    pending: int = 0

    @property
    def is_due(self) -> bool:
        """True when there is enough to estimate anew."""
        return self.pending >= pause(self.num_learned, settings.current.most_pending)


@dataclass(eq=False)
class Context:
    """Cells, workers and groups of one context.

    profiled: ranges that a profile tells of; level: its log seconds; survival_prior: its survival by draft position.
    """

    key: ContextKey
    limits: Limits
    profiled: Array
    cells: Cells
    traffic: Traffic
    workers: Workers
    groups: dict[str, Group]
    level: float = 0.0
    survival_prior: tuple[float, ...] = ()
    has_decided: bool = False
    num_reports: int = 0
    num_probes: int = 0

    def __post_init__(self) -> None:
        self.grid = Grid.of(self.limits)
        self._believed: tuple[Estimates | None, np.ndarray, np.ndarray] = (None, np.zeros(0), np.zeros(0))

    @classmethod
    def new(cls, key: ContextKey, limits: Limits) -> Context:
        """One that knows nothing."""
        grid = Grid.of(limits)
        workers = Workers(TokenEvidence.none(limits.max_speculation_length))
        groups = {POOL: Group(Selection.cold(grid, limits.ngram))}
        return cls(key, limits, np.zeros(len(grid.low), bool), Cells(), Traffic.none(len(grid.low)), workers, groups)

    @property
    def is_known(self) -> bool:
        """True if there is anything to show."""
        return bool(self.num_reports or self.profiled.any())

    @property
    def num_tokens(self) -> float:
        """Tokens that acceptance rests on."""
        return sum(each.amount for each in self.workers.shared_tokens())

    @property
    def unseen(self) -> np.ndarray:
        """Acceptance by draft position before anything was seen, [positions]."""
        return unseen_acceptance(self.workers.tokens.reached.shape[1], self.survival_prior)

    def arms_in_use(self) -> dict[str, np.ndarray]:
        """Places of the arms in use, by group, [ranges]."""
        return {name: group.selection.arms.copy() for name, group in self.groups.items()}

    def group_name(self, worker_id: str) -> str:
        """Name of the group that a worker belongs to: its own where it differs from the others."""
        return worker_id if worker_id in self.groups else POOL

    def widen(self, limits: Limits) -> None:
        """Go on with larger limits."""
        old, self.limits, self.grid = self.grid, limits, Grid.of(limits)
        self.cells = self.cells.renumbered(old.num_lengths, self.grid.num_lengths)
        self.profiled = np.pad(self.profiled, (0, len(self.grid.low) - len(old.low)))
        self.traffic.extend(len(self.grid.low))
        for group in self.groups.values():
            group.selection.widen(self.grid, limits.ngram)
        self.workers.extend_tokens(limits.max_speculation_length)

    def seed(self, profile: Profile) -> None:
        """Take an offline profile as evidence of limited weight, as far as nothing is known from workers."""
        if profile.survival and not self.num_tokens:
            self.survival_prior = profile.survival
        if len(profile.cells) > 1 and not self.num_reports:
            self.workers.times, self.level = evidence_of(profile, self.grid, self.cells)
            sizes = [cell.batch_size for cell in profile.cells]
            self.profiled = (self.grid.high >= min(sizes)) & (self.grid.low <= max(sizes))

    # Learning

    def observe(self, records: Sequence[StepRecord], worker_id: str) -> tuple[list[int], list[DriftEvent]]:
        """Learn from consecutive steps of one worker; returns ranges of sizes whose arm changed, and detected changes."""
        worker = self.workers.find(worker_id, self.num_reports, self.groups)
        self.groups = {name: each for name, each in self.groups.items() if name in self.workers.tracked or name == POOL}
        name, (times, tokens) = self.group_name(worker_id), self.workers.evidence_of(worker_id)
        self.num_reports += len(records)
        worker.num_reports += len(records)
        worker.last_seen = self.num_reports
        estimates = self.groups[name].estimates or self.estimate(name)
        forgot, changes = tokens.add(records, estimates.ratios)
        events = [self._acceptance_changed(*change) for change in changes]
        self.traffic.count(records, self.grid.range_of)
        if usable := [record for record in records if not record.flags]:
            self._learn_times(worker, times, estimates, usable)
        self._earn(self.groups[name].selection, estimates, records)
        if worker_id in self.workers.tracked and worker.is_due:
            events += self._compare(worker)
            name = self.group_name(worker_id)
        group = self.groups[name]
        group.pending += len(records)
        group.num_learned += len(records)
        return (self.solve(name) if forgot or events or group.is_due else []), events

    def _acceptance_changed(self, kind: int, statistic: float) -> DriftEvent:
        name = RequestClass(kind).name.lower().replace("_", "-")
        return DriftEvent(self.key, "acceptance", statistic, f"accepted tokens of {name} requests changed")

    def _learn_times(
        self, worker: Worker, evidence: Evidence, estimates: Estimates, records: Sequence[StepRecord]
    ) -> None:
        values = [
            (r.batch_size, r.arm.speculation_length if r.num_drafted_sequences else 0, r.num_drafted_sequences,
             r.num_verified_tokens, r.mean_context_length, self._place_of(r), r.latency_s)
            for r in records
        ]  # fmt: skip
        *columns, place, seconds = np.array(values, dtype=float).T
        features = features_of(*columns)
        places = self.cells.places(self.grid.cells_at(columns[0].astype(int), place.astype(int)), features)
        evidence.grow(len(self.cells.numbers))
        weights = np.exp(estimates.solution.phi)
        # What a step took is put down to the features of its cell's first step: they differ in context and n-gram tokens.
        log_s = np.log(seconds * (self.cells.features[places] @ weights) / (features @ weights))
        if self._believed[0] is not estimates or len(self._believed[1]) != len(self.cells.numbers):
            self._believed = (estimates, *estimates.of_cells(self.cells))
        evidence.add(worker.tail, Samples(places, log_s), *self._believed[1:])

    def _place_of(self, record: StepRecord) -> int:
        """Place of the arm that a step took the time of: where all had n-grams, the draft model made no pass."""
        arm = record.arm
        return self.grid.place(Arm(0, True) if arm.ngram and not record.num_drafted_sequences else arm)

    def _earn(self, selection: Selection, estimates: Estimates, records: Sequence[StepRecord]) -> None:
        """Give steps' time to the exploration budget, and charge what steps of probes took longer."""
        usual = np.array([(r.batch_size, r.latency_s) for r in records if not r.probe_id]).reshape(-1, 2)
        selection.earn(self.grid.range_of[usual[:, 0].astype(int)], usual[:, 1])
        for record in records:
            if record.probe_id and record.flags <= CAUSED:
                at = int(self.grid.range_of[record.batch_size])
                expected_s = estimates.step_s(at, int(record.arm.ngram), record.arm.speculation_length)
                selection.pay(at, record.latency_s, expected_s)

    def _compare(self, worker: Worker) -> list[DriftEvent]:
        """Hold a worker against the others; isolate those that differ, or let them join again."""
        if len(self.workers.tracked) < 2:
            return []
        worker.note(self.cells.features, self.unseen)
        events = []
        for name, other in self.workers.tracked.items():
            before = other.apart
            if other.compared_at:
                other.apart = is_apart(other, self.workers.tracked.values())
            if any(before) != any(other.apart):
                events.append(self._regroup(name, other))
        return events

    def _regroup(self, name: str, worker: Worker) -> DriftEvent:
        pool = self.groups[POOL].selection
        if any(worker.apart):
            group = self.groups[name] = Group(Selection.cold(self.grid, self.limits.ngram))
            group.selection.go_on_from(pool)
            parts = zip(("step times", "accepted tokens"), worker.apart, strict=True)
            what = " and ".join(part for part, apart in parts if apart)
            sentence = f"{name} differs from the other workers in {what}: it has a table of its own"
        else:
            pool.version = max(pool.version, self.groups.pop(name).selection.version) + 1
            sentence = f"{name} agrees with the other workers again"
        self.solve(POOL)
        return DriftEvent(self.key, "worker", 1.0, sentence)

    # Estimates

    def solve(self, name: str) -> list[int]:
        """Estimate anew for a group and select; returns the ranges of sizes whose arm changed."""
        estimates = self.estimate(name)
        known = (self.traffic.seen >= settings.current.first_after) | self.profiled
        return self.groups[name].selection.choose(estimates.score, known, self.grid.sizes)

    def estimate(self, name: str) -> Estimates:
        """Estimate anew for a group."""
        group = self.groups[name]
        self.cells = self.workers.trim(self.cells)
        times = self._times_of(name)
        weights = fair_weights([float(each.count.sum()) for each in times])
        last = NOTHING if group.estimates is None else group.estimates.solution
        solution = solve_all(self.cells, times, weights, last)
        group.pending = 0
        believed = solution, self._ratios_of(name), self.traffic.load(), self._level_of(name)
        group.estimates = estimates_of(self.grid, self.cells, times, *believed)
        return group.estimates

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
            return ratios_of([self.workers.tracked[name].tokens], [1.0], self.unseen)
        evidence = self.workers.shared_tokens()
        return ratios_of(evidence, fair_weights([each.amount for each in evidence]), self.unseen)

    def survival(self) -> list[tuple[float, float]]:
        """P(the first i draft tokens are all accepted), and the evidence for it, by position."""
        estimates = self.groups[POOL].estimates
        ratios = self._ratios_of(POOL) if estimates is None else estimates.ratios  # as in the rows of arms
        share = self.traffic.load().mix.mean(axis=0)
        survival = np.cumprod(share @ ratios.accepted)
        return list(zip(survival.tolist(), ratios.trials.tolist(), strict=True))

    def samples(self) -> tuple[np.ndarray, np.ndarray]:
        """Samples of every cell, fading, and the sum of their log times, [ranges, 2, lengths]."""
        count, log_sum = np.zeros((2, np.prod(self.grid.shape)))
        for each in self._times_of(POOL):
            numbers = self.cells.numbers[: len(each.count)]
            count[numbers] += each.count
            log_sum[numbers] += each.log_sum
        return count.reshape(self.grid.shape), log_sum.reshape(self.grid.shape)

    # Exploration

    def take_probe(
        self, batch_size: int, limits: Limits, num_steps: int, worker_id: str
    ) -> tuple[int, int, int, Arm] | None:
        """Id, range of batch sizes and arm of a probe, charged; mostly None."""
        group = self.groups[self.group_name(worker_id)]
        if group.estimates is None:
            return None
        at = int(self.grid.range_of[min(batch_size, self.limits.max_batch_size)])
        allowed = np.zeros((2, self.grid.num_lengths), dtype=bool)
        allowed[: 1 + limits.ngram, : limits.max_speculation_length + 1] = True
        low, high = (
            int(np.ceil(batch_size / settings.current.near_probe)),
            int(batch_size * settings.current.near_probe),
        )
        near = np.flatnonzero((self.grid.high >= low) & (self.grid.low <= high))
        place = group.selection.probe(at, near, group.estimates, allowed, num_steps)
        if place is None:
            return None
        self.num_probes += 1
        return self.num_probes, low, min(high, self.limits.max_batch_size), self.grid.arm(place)
