"""Learns step times and tokens per step of one context from reports, and selects arms. No I/O, no clock.

The same calls in the same order give the same decisions, bit for bit, even with `save` and `restore` in between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError

from speclen.controller.estimator.choice import Estimates, Load, Selection
from speclen.controller.estimator.grid import Array, Cells, Grid, features_of, shares
from speclen.controller.estimator.settings import EstimatorSettings
from speclen.controller.estimator.step_time import (
    CHUNK,
    COLD,
    Believed,
    Evidence,
    Prior,
    Solution,
    believed_of,
    prior_of,
    solve,
)
from speclen.controller.estimator.tokens import Ratios, TokenEvidence, ratios_of, unseen_acceptance
from speclen.controller.estimator.workers import Worker, Workers
from speclen.records import (
    NUM_CLASSES,
    Arm,
    ArmEstimate,
    Choice,
    ContextKey,
    Decision,
    DriftEvent,
    Limits,
    Probe,
    Profile,
    RequestClass,
    StepFlag,
    StepRecord,
    Table,
    num_tokens_of,
)

POOL = ""  # name of the group of workers that share their evidence
CAUSED = {StepFlag.CATCH_UP, StepFlag.CHANGED_ARM}  # flags a probe can cause; other slow steps are not charged to it
TRAFFIC_MEMORY = 1000.0  # steps over which class mix, context, prefill and waiting are averaged
MOST_SAVED = 12.0  # steps' worth of exploration that can be saved, or owed
FORM = 4  # of what `save` returns
Z_95 = 1.96
LONGEST_S, SHORTEST_S = 1e5, 1e-7  # of a step, as shown
LOCAL = ContextKey("target", "draft", "device", "dtype")


class Outcome(NamedTuple):
    """Changes that a group of reports brought."""

    decisions: list[Decision]
    drift_events: list[DriftEvent]


@dataclass(eq=False)
class Group:
    """Workers that share a table: all but isolated ones, each of which has its own.

    solution, ratios, load: the last estimates, None before the first. profile_share: weight of the profile's evidence. It
    never rises again after live reports contradicted the profile. num_learned: reports learned from.
    """

    selection: Selection
    solution: Solution = COLD
    ratios: Ratios | None = None
    load: Load | None = None
    profile_share: float = 1.0
    num_learned: int = 0


@dataclass(eq=False)
class Traffic:
    """Fading sums over the steps of all workers. class_tokens: generated, [ranges, classes]; held: tokens held per
    sequence, and steps, [ranges, 2]; seen: usable samples, not fading, [ranges]; rates: draft-model prefill seconds and
    new sequences."""

    class_tokens: Array
    held: Array
    seen: Array
    rates: Array

    @classmethod
    def none(cls, num_ranges: int) -> Traffic:
        """Before any step."""
        return cls(np.zeros((num_ranges, NUM_CLASSES)), np.zeros((num_ranges, 2)), np.zeros(num_ranges), np.zeros(2))

    def widened(self, num_ranges: int) -> Traffic:
        """The same with room for larger batch sizes."""
        new = Traffic.none(num_ranges)
        for name in ("class_tokens", "held", "seen"):
            getattr(new, name)[: len(self.seen)] = getattr(self, name)
        new.rates += self.rates
        return new

    def count(self, records: Sequence[StepRecord], ranges: Sequence[int]) -> None:
        """Count steps. ranges: of each."""
        fade = float(np.exp(-len(records) / TRAFFIC_MEMORY))
        for values in (self.class_tokens, self.held, self.rates):
            values *= fade
        tokens: dict[tuple[int, int], int] = defaultdict(int)
        held: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        prefill_s, started = 0.0, 0
        for at, record in zip(ranges, records, strict=True):
            for kind, histogram in record.class_histograms or ((0, record.accepted_histogram),):
                tokens[at, kind] += num_tokens_of(histogram)
            sums = held[at]
            sums[0] += record.mean_context_length
            sums[1] += 1.0
            sums[2] += not record.flags
            prefill_s += record.draft_prefill_s
            started += record.num_new_sequences
        for place, number in tokens.items():
            self.class_tokens[place] += number
        for at, sums in held.items():
            self.held[at] += sums[:2]
            self.seen[at] += sums[2]
        self.rates += prefill_s, started

    def load(self, prior_tokens: float, level: float) -> Load:
        """The averages, each range's shrunk towards those of all."""
        total = self.class_tokens.sum(axis=0) + np.array([1.0, 0.0, 0.0])
        mixed = self.class_tokens + prior_tokens * total / total.sum()
        held, steps = self.held.T
        context = (held + held.sum() / max(float(steps.sum()), 1.0)) / (steps + 1.0)
        prefill_s, waiting = (self.rates / max(float(self.class_tokens.sum()), 1.0)).tolist()
        return Load(mixed / mixed.sum(axis=1, keepdims=True), context, prefill_s, waiting, level)


@dataclass(eq=False)
class State:
    """Everything that is saved. profiled: smallest and largest batch size of the profile."""

    form: int
    settings: EstimatorSettings
    limits: Limits
    cells: Cells
    traffic: Traffic
    workers: Workers
    groups: dict[str, Group]
    prior: Prior | None = None
    survival: tuple[float, ...] = ()
    survival_trials: float = 0.0
    profiled: tuple[int, int] = (0, 0)
    num_reports: int = 0
    num_probes: int = 0


STATE = TypeAdapter(State)


class Estimator:
    """Takes reports of steps, and returns arms and probes. One thread calls it.

    limits: the workers' largest batch size and speculation length; key: the context that decisions name.
    """

    def __init__(
        self,
        settings: EstimatorSettings | None = None,
        limits: Limits = Limits(),  # noqa: B008
        key: ContextKey = LOCAL,
    ) -> None:
        self.key = key
        settings = settings or EstimatorSettings()
        grid = Grid(limits, settings.range_width)
        shared = _new_worker(limits, settings)
        groups = {POOL: Group(Selection.cold(grid, settings))}
        traffic = Traffic.none(len(grid.low))
        self._begin(State(FORM, settings, limits, Cells(), traffic, Workers(shared), groups))

    def _begin(self, state: State) -> None:
        self._state, self.settings = state, state.settings
        self._grid = Grid(state.limits, state.settings.range_width)
        self._around = self._grid.around(state.settings.near)
        self._believed: dict[str, tuple[int, Believed]] = {}
        self._profiled: np.ndarray = np.zeros((len(self._grid.low), self._grid.num_arms))
        if state.prior is not None:
            numbers = np.arange(self._profiled.size)
            self._profiled = state.prior.residual_of(numbers, self._grid).reshape(self._profiled.shape)
        self._estimates = {
            name: self._estimates_of(group) for name, group in state.groups.items() if group.ratios is not None
        }

    # Tell.

    def observe(self, records: Sequence[StepRecord], worker: str = "") -> Outcome:
        """Learn from consecutive steps of one worker. Returns changed choices and detected changes."""
        if not records:
            return Outcome([], [])
        state, s = self._state, self.settings
        who = state.workers.find(worker, state.num_reports, state.groups, lambda: _new_worker(state.limits, s))
        for name in [name for name in state.groups if name != POOL and name not in state.workers.tracked]:
            del state.groups[name]
        name = self._group_name(worker)
        if POOL not in self._estimates or name not in self._estimates:
            self._solve(name)
        state.num_reports += len(records)
        who.num_reports += len(records)
        who.last_seen, who.batch_size = state.num_reports, records[-1].batch_size
        # Many reports at once cost little more than few; at first every one counts.
        who.waiting += records
        group = state.groups[name]
        if group.num_learned >= 8 * s.solve_reports and len(who.waiting) < s.solve_reports:
            return Outcome([], [])
        records, who.waiting = who.waiting, []
        ranges = self._grid.range_of[[record.batch_size for record in records]].tolist()
        state.traffic.count(records, ranges)
        tokens = (who if worker in state.workers.tracked else state.workers.shared).tokens
        tokens.add(records, self._estimates[name].ratios, s)
        events = [self._changed(tokens, *change) for change in tokens.changes(s)]
        self._earn(name, who, records, ranges)
        usable = [(at, record) for at, record in zip(ranges, records, strict=True) if not record.flags]
        for first in range(0, len(usable), CHUNK):
            self._learn_times(name, who, usable[first : first + CHUNK])
        if worker in state.workers.tracked and who.is_due:
            events += self._compare(worker, who)
            name = self._group_name(worker)
        state.groups[name].num_learned += len(records)
        return self._choose(name, events, "more tokens per second are expected")

    def _changed(self, tokens: TokenEvidence, kind: int, statistic: float) -> DriftEvent:
        """Forget a class's tokens per step from before its text changed."""
        tokens.forget(kind, self.settings)
        text = f"accepted tokens of {RequestClass(kind).name.lower().replace('_', '-')} requests changed"
        return DriftEvent(self.key, "acceptance", statistic, text)

    def _learn_times(self, name: str, worker: Worker, usable: Sequence[tuple[int, StepRecord]]) -> None:
        state, grid = self._state, self._grid
        columns, numbers, seconds = [], [], []
        for at, record in usable:
            length, ngram = record.arm
            drafted = record.num_drafted_sequences
            # Where all sequences had an n-gram match, the step took the time of n-grams alone.
            place = grid.num_lengths if ngram and not drafted else ngram * grid.num_lengths + length
            numbers.append(at * grid.num_arms + place)
            passes = length if drafted else 0
            columns.append((record.batch_size, passes, drafted, record.num_verified_tokens, record.mean_context_length))
            seconds.append(record.latency_s)
        features = features_of(np.array(columns, dtype=float).T)
        places = np.array(state.cells.places(numbers, features))
        # Steps of a cell differ in context and n-gram tokens: each is put down to the features of the cell's first step.
        weights = np.exp(self._estimates[name].solution.phi)
        log_s = np.log(np.array(seconds) * (state.cells.features[places] @ weights) / (features @ weights))
        state.workers.add_times(worker, places, log_s, self._beliefs(name), self.settings)

    def _beliefs(self, name: str) -> Believed:
        """Believed step times of every cell with evidence."""
        cells, (count, known) = self._state.cells, self._believed.get(name, (-1, None))
        if known is None or count != len(cells.numbers):
            profiled, prior = self._profiled.reshape(-1)[cells.numbers], self._state.prior
            weighted = profiled * self._state.groups[name].profile_share
            known = believed_of(cells.features, self._estimates[name].solution, self.settings.residual, weighted)
            if prior is not None:
                known.profiled = shares(cells.features, prior.phi)[0] + profiled
            self._believed[name] = len(cells.numbers), known
        return known

    def _earn(self, name: str, worker: Worker, records: Sequence[StepRecord], ranges: Sequence[int]) -> None:
        """Add to the exploration budget, and charge the time that probes took beyond their arms' expected step times.

        The slow steps after a probe, with which the arm in use returns, are charged as well.
        """
        worker.spare = min(worker.spare + self.settings.explored * len(records), MOST_SAVED)
        for at, record in zip(ranges, records, strict=True):
            worker.is_probing = bool(record.probe_id) or (worker.is_probing and StepFlag.CHANGED_ARM in record.flags)
            if worker.is_probing and record.flags and record.flags <= CAUSED:
                expected_s = float(self._step_s(name)[at, self._grid.place(record.arm)])
                worker.spare = max(worker.spare - max(0.0, record.latency_s / expected_s - 1.0), -MOST_SAVED)

    def seed(self, profile: Profile) -> list[Decision]:
        """Use an offline profile as the prior. It is ignored once reports were learned from.

        Raises ValueError for cells beyond the limits.
        """
        state = self._state
        for cell in profile.cells:
            for what, value, most in (
                ("batch_size", cell.batch_size, state.limits.max_batch_size),
                ("speculation_length", cell.speculation_length, state.limits.max_speculation_length),
            ):
                if value > most:
                    raise ValueError(f"{what} {value} of the profile is beyond the context's limit of {most}")
        if not state.num_reports:
            if profile.survival:
                self.guess(profile.survival, 4.0 * self.settings.prior_tokens)
            if len(profile.cells) > 1:
                sizes = [cell.batch_size for cell in profile.cells]
                state.prior, state.profiled = prior_of(profile, self.settings), (min(sizes), max(sizes))
            self._begin(state)
        return self._choose(POOL, [], f"a profile was imported ({profile.source or 'unnamed'})").decisions

    def guess(self, survival: Sequence[float], trials: float = 0.0) -> None:
        """Set the prior of acceptance. survival: as in a `Profile`; trials: its weight, 0 for the default."""
        self._state.survival, self._state.survival_trials = tuple(survival), trials

    def widen(self, limits: Limits) -> list[Decision]:
        """Continue with larger limits, keeping what was learned."""
        state, old = self._state, self._grid
        wider = state.limits.widened(limits)
        if wider == state.limits:
            return []
        grid = Grid(wider, self.settings.range_width)
        for worker in state.workers.everyone:
            tokens = TokenEvidence.none(wider.max_speculation_length)
            tokens.absorb(worker.tokens)
            worker.tokens = tokens
        for group in state.groups.values():
            group.selection, group.ratios = group.selection.widened(old, grid), None
        state.limits, state.cells = wider, state.cells.renumbered(old, grid)
        state.traffic = state.traffic.widened(len(grid.low))
        self._begin(state)
        outcomes = [self._choose(name, [], "the context was widened") for name in state.groups]
        return [decision for outcome in outcomes for decision in outcome.decisions]

    # Workers that differ.

    def _group_name(self, worker: str) -> str:
        return worker if worker in self._state.groups else POOL

    def is_isolated(self, worker: str) -> bool:
        """True if a worker differs from the others and has a table of its own."""
        return self._group_name(worker) != POOL

    @property
    def num_isolated(self) -> int:
        """Workers that have tables of their own."""
        return len(self._state.groups) - 1

    def _compare(self, name: str, worker: Worker) -> list[DriftEvent]:
        """Compare a worker with the others; isolate it if it differs, or let it join again."""
        state, most = self._state, self.settings.worker_difference
        tracked = state.workers.tracked
        if len(tracked) < 2:
            return []
        worker.note(state.cells.features, self._unseen(), self.settings)
        before, worker.apart = worker.apart, worker.differs(list(tracked.values()), most)
        return [self._regroup(name, worker)] if any(before) != any(worker.apart) else []

    def _regroup(self, name: str, worker: Worker) -> DriftEvent:
        groups = self._state.groups
        pool = groups[POOL].selection
        if any(worker.apart):
            groups[name] = Group(Selection(pool.arms.copy(), pool.version + 1))
            worker.times.fade(self.settings.kept)  # its contrasts were clipped around the others' times
            parts = zip(("step times", "accepted tokens"), worker.apart, strict=True)
            what = " and ".join(part for part, apart in parts if apart)
            sentence = f"{name} differs from the other workers in {what}: it has a table of its own"
        else:
            pool.version = max(pool.version, groups.pop(name).selection.version) + 1
            self._estimates.pop(name, None)
            sentence = f"{name} agrees with the other workers again"
        return DriftEvent(self.key, "worker", 1.0, sentence)

    # Estimates.

    def _choose(self, name: str, events: list[DriftEvent], reason: str) -> Outcome:
        """Solve again and select arms. After a detected change, do so for all groups."""
        state, decisions = self._state, []
        names = list(state.groups) if events else [name]
        for each in names:
            is_new = each not in self._estimates
            before = state.groups[each].selection.arms
            self._solve(each)
            known = self._known()
            changed = state.groups[each].selection.choose(self._estimates[each], known, self.settings)
            why = events[0].detail if events else reason
            everything = is_new and each != POOL
            ranges, old = (range(len(before)), None) if everything else (changed, before)
            decisions += self._decisions(each, ranges, old, why)
        return Outcome(decisions, events)

    def _known(self) -> np.ndarray:
        """True for the ranges that were profiled, or have usable samples nearby, [ranges]."""
        state, grid = self._state, self._grid
        total = np.concatenate([[0.0], np.cumsum(state.traffic.seen)])
        low, high = self._around
        known: np.ndarray = total[high] > total[low]
        return known | ((grid.high >= state.profiled[0]) & (grid.low <= state.profiled[1]))

    def _solve(self, name: str) -> None:
        """Solve again for a group, with all evidence of its workers."""
        state, s = self._state, self.settings
        group, before = state.groups[name], state.cells
        state.cells = state.workers.trim(before, s.max_cells)
        if state.cells is not before:  # places changed: no other group may keep a solution of the old ones
            for each in state.groups.values():
                each.solution = Solution(each.solution.phi, each.solution.precision, np.zeros(0), np.zeros((0, 0)))
            self._estimates = {each: self._estimates_of(state.groups[each]) for each in self._estimates if each != name}
            self._believed.clear()
        times = [worker.times for worker in self._of(name, 0) if len(worker.times.cells)]
        surprises = sorted(each.surprise for each in times)
        if times and surprises[(len(times) - 1) // 2] > s.surprise:  # a part of the step has changed for most workers
            for changed in times:
                changed.fade(s.kept)
                changed.surprise = 1.0
        prior = self._profile(name)
        information, moment = self._evidence(name)
        profiled = group.profile_share * self._profiled.reshape(-1)[state.cells.numbers]
        for _ in range(3):
            last = group.solution
            group.solution = solve(information, moment, state.cells.features, last, prior, profiled, s.residual)
            if np.abs(group.solution.phi - last.phi).max() < 0.1:
                break
        workers = self._of(name, 1)
        total = TokenEvidence.sum_of([worker.tokens for worker in workers])
        group.ratios = ratios_of(total, self._unseen(), state.survival_trials or s.prior_tokens, s)
        group.load = state.traffic.load(s.prior_tokens, self._level(name))
        self._believed.pop(name, None)
        self._estimates[name] = self._estimates_of(group)

    def _estimates_of(self, group: Group) -> Estimates:
        assert group.ratios is not None
        assert group.load is not None
        expected = group.profile_share * self._profiled
        return Estimates(self._grid, self._state.cells, group.solution, group.ratios, group.load, expected)

    def _of(self, name: str, part: int) -> list[Worker]:
        """Workers whose evidence a group uses: of step times (0) or of tokens (1)."""
        workers = self._state.workers
        isolated = name != POOL and workers.tracked[name].apart[part]
        return [workers.tracked[name]] if isolated else workers.agreeing(part)

    def _evidence(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        count = len(self._state.cells.numbers)
        information, moment = np.zeros((count, count)), np.zeros(count)
        for worker in self._of(name, 0):
            known = len(worker.times.moment)
            information[:known, :known] += worker.times.information
            moment[:known] += worker.times.moment
        return information, moment

    def _profile(self, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Weighted precision of the profile and its phi, after the group's share of the profile was lowered."""
        prior, group = self._state.prior, self._state.groups[name]
        if prior is None:
            return None
        fit = sum((worker.times.fit for worker in self._of(name, 0)), np.zeros(2))
        group.profile_share = min(group.profile_share, prior.weight(fit))
        return group.profile_share * prior.precision, prior.phi

    def _level(self, name: str) -> float:
        """Mean log seconds without theta of a group's workers."""
        levels = [worker.times.level for worker in self._of(name, 0) if len(worker.times.cells)]
        prior = self._state.prior
        return float(np.mean(levels)) if levels else prior.level if prior else 0.0

    def _step_s(self, name: str) -> np.ndarray:
        """Expected seconds of a step, [ranges, arms].

        The level of a range is measured on its own samples, or interpolated between its neighbours. Contrasts compare
        batch sizes only when the load changes, which is enough to select arms but not to report step times.
        """
        log_time, log_sizes = self._estimates[name].log_time, np.log(self._grid.sizes)
        count, seconds, _ = self._samples(name)
        expected, seconds = (count * np.exp(log_time)).sum(axis=1), seconds.sum(axis=1)
        known = expected > 1e-3 * np.exp(log_time.min(axis=1))
        level = np.full(len(known), self._level(name))
        if known.any():
            level = np.interp(log_sizes, log_sizes[known], np.log(seconds[known] / expected[known]))
        step_s: np.ndarray = np.clip(np.exp(np.minimum(log_time + level[:, None], 20.0)), SHORTEST_S, LONGEST_S)
        return step_s

    def _ms_per_token(self, name: str) -> np.ndarray | None:
        """Expected milliseconds per token of a sequence, [ranges, arms]; None if nothing was seen."""
        if name not in self._estimates or not (self._state.num_reports or self._state.prior):
            return None
        ms: np.ndarray = 1000.0 * self._step_s(name) / np.exp(self._estimates[name].log_tokens)
        return ms

    def _unseen(self) -> np.ndarray:
        return unseen_acceptance(
            self._state.limits.max_speculation_length, self._state.survival, self.settings.first_accepted
        )

    # Ask.

    @property
    def limits(self) -> Limits:
        """Largest limits of the workers."""
        return self._state.limits

    @property
    def first_survival(self) -> tuple[float, ...]:
        """The guess of acceptance before anything was seen."""
        return self._state.survival

    def arm_for(self, batch_size: int, worker: str = "") -> Arm:
        """The arm in use for a batch size; larger sizes than the limit use the last."""
        at = self._grid.range_of[min(batch_size, self.limits.max_batch_size)]
        return self._grid.arms[self._state.groups[self._group_name(worker)].selection.arms[at]]

    def table(self, worker: str = "") -> Table:
        """The arm in use at every batch size for a worker, without exploration."""
        name, grid = self._group_name(worker), self._grid
        selection, ms = self._state.groups[name].selection, self._ms_per_token(name)
        choices = [
            Choice(low, high, grid.arms[place], None if ms is None else float(ms[at, place]))
            for at, (low, high, place) in enumerate(
                zip(grid.low.tolist(), grid.high.tolist(), selection.arms.tolist(), strict=True)
            )
        ]
        return Table(selection.version, tuple(choices))

    def probe(
        self, worker: str = "", batch_size: int | None = None, limits: Limits | None = None, num_steps: int = 3
    ) -> Probe | None:
        """An exploratory arm for the next few steps of a worker, charged at once; mostly None.

        batch_size: of the worker's newest step when absent; limits: of the worker, None for all.
        """
        state, grid, s = self._state, self._grid, self.settings
        name = self._group_name(worker)
        who = state.workers.tracked.get(worker) or state.workers.untracked.get(worker)
        if who is None or name not in self._estimates or who.spare < num_steps * s.least_cost:
            return None
        batch_size = batch_size or who.batch_size
        at = int(grid.range_of[min(batch_size, state.limits.max_batch_size)])
        allowed = grid.allowed & grid.within(limits or state.limits)
        found = state.groups[name].selection.probe(at, self._estimates[name], allowed, s)
        if found is None or num_steps * found[1] > who.spare:
            return None
        place, cost = found
        who.spare -= num_steps * cost
        state.num_probes += 1
        low, high = int(np.ceil(batch_size / s.near)), min(int(batch_size * s.near), state.limits.max_batch_size)
        return Probe(state.num_probes, low, high, grid.arms[place], num_steps)

    def rows(self) -> list[ArmEstimate]:
        """The learned table: one row per batch range and arm."""
        state, grid = self._state, self._grid
        if POOL not in self._estimates or not (state.num_reports or state.prior):
            return []
        estimates, selection, steps_s = self._estimates[POOL], state.groups[POOL].selection, self._step_s(POOL)
        noise = float(np.mean([worker.times.noise for worker in state.workers.agreeing(0)]))
        level_variance = noise / max(min(state.num_reports, 300.0) / 10.0, 1.0)
        (count, seconds, seen), rows = self._samples(POOL), []
        for at, (low, high) in enumerate(zip(grid.low.tolist(), grid.high.tolist(), strict=True)):
            variance = estimates.variance(at, int(selection.arms[at]), self.settings) + level_variance
            profiled = state.profiled[0] <= high and low <= state.profiled[1]
            for place in np.flatnonzero(grid.allowed).tolist():
                cell, arm = (at, place), grid.arms[place]
                step_s, tokens = float(steps_s[cell]), float(np.exp(estimates.log_tokens[cell]))
                ms, factor = 1000.0 * step_s / tokens, float(np.exp(min(Z_95 * np.sqrt(variance[place]), 5.0)))
                has, told = bool(seen[cell]), profiled and not arm.ngram
                rows.append(
                    ArmEstimate(
                        *(low, high, arm, tokens, step_s, ms, ms / factor, ms * factor, round(float(seen[cell]))),
                        observed_step_s=float(seconds[cell] / count[cell]) if count[cell] > 1e-6 else None,
                        source=("both" if told else "online") if has else ("profile" if told else "prior"),
                        is_best=int(selection.arms[at]) == place,
                    )
                )
        return rows

    def _samples(self, name: str) -> np.ndarray:
        """Usable samples of every cell and their seconds, fading, and samples that do not fade, [3, ranges, arms]."""
        values = np.zeros((3, self._profiled.size))
        for worker in self._of(name, 0):
            numbers = self._state.cells.numbers[: len(worker.times.count)]
            values[:, numbers] += worker.times.count, worker.times.sum_s, worker.times.seen
        return values.reshape(3, *self._profiled.shape)

    def survival(self) -> list[tuple[float, float]]:
        """P(the first i draft tokens are all accepted), and the evidence for it, by position."""
        if POOL not in self._estimates:
            self._solve(POOL)
        estimates = self._estimates[POOL]
        survival = np.cumprod(estimates.load.mix.mean(axis=0) @ estimates.ratios.accepted)
        return list(zip(survival.tolist(), estimates.ratios.trials.tolist(), strict=True))

    def decisions(self, reason: str) -> list[Decision]:
        """The first choices, of every range."""
        if POOL not in self._estimates:
            self._choose(POOL, [], reason)
        return self._decisions(POOL, range(len(self._grid.low)), None, reason)

    def _decisions(self, name: str, ranges: Sequence[int], before: np.ndarray | None, reason: str) -> list[Decision]:
        if not len(ranges):
            return []
        grid, ms, selection = self._grid, self._ms_per_token(name), self._state.groups[name].selection
        found = []
        for at in ranges:
            old, new = None if before is None else int(before[at]), int(selection.arms[at])
            arms = None if old is None else grid.arms[old], grid.arms[new]
            before_ms = None if ms is None or old is None else float(ms[at, old])
            figures = before_ms, None if ms is None else float(ms[at, new])
            bounds = int(grid.low[at]), int(grid.high[at])
            found.append(Decision(self.key, *bounds, selection.version, *arms, *figures, reason, name != POOL))
        return found

    # Keep.

    def reset(self) -> Estimator:
        """A new estimator of the same context that has learned nothing. Versions and probes continue their numbers."""
        state = self._state
        new = Estimator(self.settings, state.limits, self.key)
        new.guess(state.survival, state.survival_trials)
        new._state.groups[POOL].selection.version = state.groups[POOL].selection.version + 1
        new._state.num_probes = state.num_probes
        return new

    def save(self) -> bytes:
        """Everything that was learned, as JSON."""
        return STATE.dump_json(self._state)

    def restore(self, content: bytes) -> None:
        """Continue from what was saved. Raises ValueError, and changes nothing, if it is not a state of these limits."""
        limits, settings, before = self._state.limits, self.settings, self._state
        try:
            state = STATE.validate_json(content)
            if state.form != FORM:
                raise ValueError(f"its form is {state.form}, and {FORM} is read")
            if state.limits != limits:
                raise ValueError(f"it was saved with limits {state.limits}, the context has {limits}")
            if state.settings != settings:
                raise ValueError("it was saved with other settings")
            self._begin(state)
            trial = STATE.validate_json(content)
            self._begin(trial)
            for name in trial.groups:
                self._choose(name, [], "")
            self.rows()
            self._begin(state)
        except ValidationError as error:
            self._begin(before)
            raise ValueError(f"this is not a state of this estimator: {error.errors()[0]['msg']}") from error
        except (ValueError, IndexError, KeyError, AssertionError) as error:
            self._begin(before)
            raise ValueError(f"the state does not fit together: {error}") from error


def _new_worker(limits: Limits, settings: EstimatorSettings) -> Worker:
    return Worker(Evidence(settings.noise**2), TokenEvidence.none(limits.max_speculation_length))
