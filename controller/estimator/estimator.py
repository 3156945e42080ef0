"""Learns step times and tokens per step of one context from reports, and selects arms. No I/O, no clock.

The same calls in the same order give the same decisions, bit for bit, even with `save` and `restore` in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError

from speclen.controller.estimator.choice import Estimates, Selection
from speclen.controller.estimator.grid import Cells, Grid, place_of
from speclen.controller.estimator.settings import EstimatorSettings
from speclen.controller.estimator.step_time import (
    CHUNK,
    COLD,
    Believed,
    Solution,
    Times,
    samples_of,
    solve,
)
from speclen.controller.estimator.tokens import (
    Ratios,
    TokenEvidence,
    histograms_of,
    num_requests,
    ratios_of,
    unseen_acceptance,
)
from speclen.controller.estimator.traffic import Load, Traffic
from speclen.controller.estimator.workers import COMPARED, EXPIRED, MOST_COMPARED, Worker, difference
from speclen.records import (
    Arm,
    ArmEstimate,
    Choice,
    ContextKey,
    Decision,
    DriftEvent,
    Limits,
    Probe,
    Profile,
    ProfileCell,
    StepFlag,
    StepRecord,
    Table,
)

POOL = ""  # name of the group of workers that share their evidence
CAUSED = {StepFlag.CATCH_UP, StepFlag.CHANGED_ARM}  # flags a probe can cause; other slow steps are not charged to it
MOST_SAVED = 12.0  # steps' worth of exploration that can be saved, or owed
FORM = 5  # of what `save` returns
Z_95 = 1.96
LONGEST_S, SHORTEST_S = 1e5, 1e-7  # of a step, as shown
LOCAL = ContextKey("target", "draft", "device", "dtype")


class Outcome(NamedTuple):
    """Changes that a group of reports brought."""

    decisions: list[Decision]
    drift_events: list[DriftEvent]


@dataclass(eq=False)
class Group:
    """Workers that share evidence and a table: all but isolated ones, each of which has its own.

    solution, ratios, load: the last estimates. num_learned: reports learned from.
    """

    selection: Selection
    times: Times
    tokens: TokenEvidence
    ratios: Ratios
    load: Load
    solution: Solution = COLD
    num_learned: int = 0


@dataclass(eq=False)
class State:
    """Everything that is saved. profiled: smallest and largest batch size of the profile."""

    form: int
    settings: EstimatorSettings
    limits: Limits
    traffic: Traffic
    groups: dict[str, Group]
    workers: dict[str, Worker] = field(default_factory=dict)
    cells: Cells = field(default_factory=Cells)
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
        self.key, s = key, settings or EstimatorSettings()
        num_ranges, longest = len(Grid(limits, s.range_width).low), limits.max_speculation_length
        tokens, traffic, times = TokenEvidence.none(longest), Traffic.none(num_ranges), Times(s.noise**2)
        ratios = ratios_of(tokens, unseen_acceptance(longest, (), s.first_accepted), s.prior_tokens, s)
        cold = Selection(np.full(num_ranges, place_of(Arm(s.cold_length).within(limits))))
        pool = Group(cold, times, tokens, ratios, traffic.load(s.prior_tokens, times.level))
        self._begin(State(FORM, s, limits, traffic, {POOL: pool}))

    def _begin(self, state: State) -> None:
        self._state, self.settings = state, state.settings
        self._grid = Grid(state.limits, state.settings.range_width)
        self._believed: dict[str, Believed] = {}
        self._estimates = {name: self._estimates_of(group) for name, group in state.groups.items()}

    # Tell.

    def observe(self, records: Sequence[StepRecord], worker: str = "") -> Outcome:
        """Learn from consecutive steps of one worker. Returns changed choices and detected changes."""
        if not records:
            return Outcome([], [])
        state, s = self._state, self.settings
        who = self._worker(worker)
        name = self._group_name(worker)
        state.num_reports += len(records)
        who.num_reports += len(records)
        who.last_seen, who.batch_size = state.num_reports, records[-1].batch_size
        # Many reports at once cost little more than few; at first every one counts.
        who.waiting += records
        group = state.groups[name]
        if group.num_learned >= 8 * s.solve_reports and len(who.waiting) < s.solve_reports:
            return Outcome([], [])
        records, who.waiting = who.waiting, []
        group.num_learned += len(records)
        ranges = self._grid.range_of[[record.batch_size for record in records]].tolist()
        state.traffic.count(records, ranges)
        self._earn(name, who, records, ranges)
        events = self._learn_tokens(name, who, records)
        usable = [record for record in records if not record.flags]
        for first in range(0, len(usable), CHUNK):
            self._learn_times(name, who, usable[first : first + CHUNK])
        if who.num_reports - who.compared_at >= COMPARED and len(state.workers) > 1 and worker != POOL:
            events += self._compare(worker, who)
            name = self._group_name(worker)
        return self._choose(name, events, "more tokens per second are expected")

    def _worker(self, name: str) -> Worker:
        """The worker of this name. A new one is added after expired ones were removed."""
        state = self._state
        if name not in state.workers:
            for gone in [each for each, who in state.workers.items() if state.num_reports - who.last_seen > EXPIRED]:
                del state.workers[gone]
                if gone != POOL and gone in state.groups:
                    self._drop(gone)
            state.workers[name] = Worker()
        return state.workers[name]

    def _learn_tokens(self, name: str, who: Worker, records: Sequence[StepRecord]) -> list[DriftEvent]:
        """Learn tokens per step. Where the text has changed, forget what was learned of the text before."""
        tokens, s, histograms = self._state.groups[name].tokens, self.settings, histograms_of(records)
        requests = num_requests(records, histograms, s)
        if len(self._state.workers) > 1:
            who.add_tokens(histograms, self._estimates[POOL].ratios, requests, s)
        tokens.add(records, histograms, requests, self._estimates[name].ratios, s)
        change = tokens.change(s)
        if change <= s.change or self._state.groups[name].num_learned <= 8 * s.solve_reports:
            return []  # at first, what was expected is a guess
        tokens.forget(s)
        return [DriftEvent(self.key, "acceptance", change, "the number of accepted tokens changed")]

    def _learn_times(self, name: str, who: Worker, usable: Sequence[StepRecord]) -> None:
        """Learn step times from usable samples."""
        cells, s, times = self._state.cells, self.settings, self._state.groups[name].times
        places, features, seconds = self._find_cells(usable)
        # Steps of a cell differ in context and n-gram tokens: each is put down to the features of the cell's first step.
        weights = np.exp(self._estimates[name].solution.phi)
        log_s = np.log(seconds * (cells.features[places] @ weights) / (features @ weights))
        contrasts, believed = who.recent.contrasts(places, log_s, s.gain), self._beliefs(name)
        if who.recent.level is not None:  # the first steps of a worker are warm-up
            times.add(contrasts, believed, who.recent, s)
            if len(self._state.workers) > 1:
                who.add_times(contrasts, cells, self._beliefs(POOL), s)
        times.count(places, log_s, believed.theta, who.recent, len(self._members(name)) == 1)

    def _find_cells(self, records: Sequence[StepRecord]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Indices of the cells of steps, added where they are new; the steps' features and seconds."""
        cells, (numbers, features, seconds) = self._state.cells, samples_of(records, self._grid)
        before, places = len(cells.numbers), cells.find(numbers, features)
        if len(cells.numbers) > before:
            self._believed.clear()
            for group in self._state.groups.values():
                group.times.grow(len(cells.numbers))
        return places, features, seconds

    def _beliefs(self, name: str) -> Believed:
        """Believed step times of every cell with evidence."""
        if name not in self._believed:
            group, cells = self._state.groups[name], self._state.cells
            self._believed[name] = group.times.believed(cells, group.solution, self.settings)
        return self._believed[name]

    def _earn(self, name: str, worker: Worker, records: Sequence[StepRecord], ranges: Sequence[int]) -> None:
        """Add to the exploration budget, and charge the time that probes took beyond their arms' expected step times.

        The slow steps after a probe, with which the arm in use returns, are charged as well.
        """
        worker.spare = min(worker.spare + self.settings.explored * len(records), MOST_SAVED)
        step_s: np.ndarray | None = None
        for at, record in zip(ranges, records, strict=True):
            worker.is_probing = bool(record.probe_id) or (worker.is_probing and StepFlag.CHANGED_ARM in record.flags)
            if worker.is_probing and record.flags and record.flags <= CAUSED:
                step_s = self._step_s(name) if step_s is None else step_s
                longer = record.latency_s / float(step_s[at, place_of(record.arm)]) - 1.0
                worker.spare = max(worker.spare - max(0.0, longer), -MOST_SAVED)

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
                self._add_profile(profile.cells)
        return self._choose(POOL, [], f"a profile was imported ({profile.source or 'unnamed'})").decisions

    def _add_profile(self, cells: Sequence[ProfileCell]) -> None:
        pool, s, records = self._state.groups[POOL], self.settings, []
        for size, length, step_s, _, _, context in cells:
            step = StepRecord(0, size, Arm(length), step_s, (), context, num_drafted_sequences=size)
            records.append(step._replace(num_verified_tokens=size * (length + 1)))
        _, features, seconds = samples_of(records, self._grid)
        errors = np.hypot(s.profile_sd, [cell.step_s_stderr / cell.step_s for cell in cells])
        pool.times.set_profile(features, np.log(seconds), errors, s)
        self._state.profiled = min(cell.batch_size for cell in cells), max(cell.batch_size for cell in cells)

    def guess(self, survival: Sequence[float], trials: float = 0.0) -> None:
        """Set the prior of acceptance. survival: as in a `Profile`; trials: its weight, 0 for the default."""
        self._state.survival, self._state.survival_trials = tuple(survival), trials
        self._solve(POOL)

    def widen(self, limits: Limits) -> list[Decision]:
        """Continue with larger limits, keeping what was learned."""
        state, wider = self._state, self._state.limits.widened(limits)
        if wider == state.limits:
            return []
        num_ranges = len(Grid(wider, self.settings.range_width).low)
        state.limits = wider
        state.traffic.widen(num_ranges)
        for group in state.groups.values():
            group.tokens.widen(wider.max_speculation_length)
            group.selection.widen(num_ranges)
            self._average(group)
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
        state, s = self._state, self.settings
        worker.compared_at = worker.num_reports
        pool, isolated = state.groups[POOL], self.is_isolated(name)
        others = [other for other in self._members(POOL) if other is not worker]
        others = sorted(others, key=lambda other: -other.last_seen)[:MOST_COMPARED]
        parts = difference(worker, others, isolated, pool.times.noise, s)
        if bool(parts) == isolated:
            return []
        if parts:
            own = state.groups[name] = deepcopy(pool)
            own.selection.version += 1
            own.times.fade(s.kept)
            own.tokens.forget(s)
            pool.times.fade(s.kept)
            pool.tokens = TokenEvidence.none(state.limits.max_speculation_length)
            sentence = f"{name} differs from the other workers in {parts}: it has a table of its own"
        else:
            pool.selection.version = max(pool.selection.version, state.groups[name].selection.version) + 1
            self._drop(name)
            sentence = f"{name} agrees with the other workers again"
        return [DriftEvent(self.key, "worker", 1.0, sentence)]

    def _drop(self, name: str) -> None:
        for values in (self._state.groups, self._estimates, self._believed):
            values.pop(name, None)

    # Estimates.

    def _choose(self, name: str, events: list[DriftEvent], reason: str) -> Outcome:
        """Solve again and select arms. After a detected change, do so for all groups."""
        state, decisions = self._state, []
        names = list(state.groups) if events else [name]
        for each in names:
            is_new = each not in self._estimates
            before = state.groups[each].selection.arms
            self._solve(each)
            selection, estimates = state.groups[each].selection, self._estimates[each]
            changed = selection.choose(estimates, self.settings) if self._has_evidence else []
            why = events[0].detail if events else reason
            everything = is_new and each != POOL
            ranges, old = (range(len(before)), None) if everything else (changed, before)
            decisions += self._decisions(each, ranges, old, why)
        return Outcome(decisions, events)

    @property
    def _has_evidence(self) -> bool:
        return bool(self._state.num_reports or self._state.profiled[1])

    def _solve(self, name: str) -> None:
        """Solve again for a group, with all evidence of its workers."""
        state, s = self._state, self.settings
        if len(state.cells.numbers) > s.max_cells:
            self._trim()
        group, members = state.groups[name], self._members(name)
        surprises = sorted(each.recent.surprise for each in members if len(each.recent.cells))
        if surprises and surprises[(len(surprises) - 1) // 2] > s.surprise:
            group.times.fade(s.kept)  # a part of the step has changed for most workers
            for each in members:
                each.recent.surprise = 1.0
        group.solution = solve(group.times, state.cells.features, group.solution, s)
        self._average(group)
        self._believed.pop(name, None)
        self._estimates[name] = self._estimates_of(group)

    def _average(self, group: Group) -> None:
        """Estimate tokens per step and traffic again."""
        state, s = self._state, self.settings
        unseen = unseen_acceptance(state.limits.max_speculation_length, state.survival, s.first_accepted)
        group.ratios = ratios_of(group.tokens, unseen, state.survival_trials or s.prior_tokens, s)
        group.load = state.traffic.load(s.prior_tokens, group.times.level)

    def _trim(self) -> None:
        """Forget the cells with the least evidence."""
        state, number = self._state, len(self._state.cells.numbers)
        theta = {name: self._beliefs(name).theta for name in state.groups}
        count = np.sum([np.diag(group.times.information) for group in state.groups.values()], axis=0)
        kept = np.sort(np.argsort(-count, kind="stable")[: self.settings.max_cells * 3 // 4])
        place = np.full(number, -1)
        place[kept] = np.arange(len(kept))
        state.cells = Cells(state.cells.numbers[kept], state.cells.features[kept])
        for name, group in state.groups.items():  # indices changed: no group may keep a solution of the old ones
            group.times.keep(kept, theta[name])
            group.solution = replace(group.solution, rho=np.zeros(0), shrinkage=np.zeros((0, 0)))
        for worker in state.workers.values():
            worker.recent.keep(place)
        self._estimates = {name: self._estimates_of(state.groups[name]) for name in self._estimates}
        self._believed.clear()

    def _estimates_of(self, group: Group) -> Estimates:
        return Estimates(self._grid, self._state.cells, group.solution, group.ratios, group.load)

    def _members(self, name: str) -> list[Worker]:
        return [worker for each, worker in self._state.workers.items() if self._group_name(each) == name]

    def _samples(self, name: str) -> np.ndarray:
        """Usable samples of every cell and their seconds, fading, and samples that do not fade, [3, ranges, arms]."""
        values, times = np.zeros((3, *self._grid.shape)), self._state.groups[name].times
        values[:, self._state.cells.ranges, self._state.cells.places] = times.samples
        return values

    def _step_s(self, name: str) -> np.ndarray:
        """Expected seconds of a step, [ranges, arms].

        The level of a range is measured on its own samples, or interpolated between its neighbours. Contrasts compare
        batch sizes only when the load changes, which is enough to select arms but not to report step times.
        """
        log_time, log_sizes = self._estimates[name].log_time, np.log(self._grid.sizes)
        count, seconds, _ = self._samples(name)
        expected, seconds = (count * np.exp(log_time)).sum(axis=1), seconds.sum(axis=1)
        known = expected > 1e-3 * np.exp(log_time.min(axis=1))
        level = np.full(len(known), self._state.groups[name].times.level)
        if known.any():
            level = np.interp(log_sizes, log_sizes[known], np.log(seconds[known] / expected[known]))
        step_s: np.ndarray = np.clip(np.exp(np.minimum(log_time + level[:, None], 20.0)), SHORTEST_S, LONGEST_S)
        return step_s

    def _ms_per_token(self, name: str) -> np.ndarray | None:
        """Expected milliseconds per token of a sequence, [ranges, arms]; None if nothing was seen."""
        if not self._has_evidence:
            return None
        ms: np.ndarray = 1000.0 * self._step_s(name) / np.exp(self._estimates[name].log_tokens)
        return ms

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
        who = state.workers.get(worker)
        if who is None or who.spare < num_steps * s.least_cost:
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
        if not self._has_evidence:
            return []
        estimates, selection, steps_s = self._estimates[POOL], state.groups[POOL].selection, self._step_s(POOL)
        level_variance = state.groups[POOL].times.noise / max(min(state.num_reports, 300.0) / 10.0, 1.0)
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

    def survival(self) -> list[tuple[float, float]]:
        """P(the first i draft tokens are all accepted), and the evidence for it, by position."""
        estimates = self._estimates[POOL]
        survival = np.cumprod(estimates.load.mix.mean(axis=0) @ estimates.ratios.accepted)
        return list(zip(survival.tolist(), estimates.ratios.trials.tolist(), strict=True))

    def decisions(self, reason: str) -> list[Decision]:
        """The first choices, of every range."""
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
        before = self._state
        try:
            state, trial = STATE.validate_json(content), STATE.validate_json(content)
            for what, found, wanted in (
                ("form", state.form, FORM),
                ("limits", state.limits, before.limits),
                ("settings", state.settings, before.settings),
            ):
                if found != wanted:
                    raise ValueError(f"its {what} is {found}, and {wanted} is expected")
            self._begin(trial)
            for name in trial.groups:
                self._choose(name, [], "")
            self.rows()
            self._begin(state)
        except ValidationError as error:
            self._begin(before)
            raise ValueError(f"this is not a state of this estimator: {error.errors()[0]['msg']}") from error
        except (ValueError, IndexError, KeyError) as error:
            self._begin(before)
            raise ValueError(f"the state does not fit together: {error}") from error


class Estimators(dict[ContextKey, Estimator]):
    """One estimator for each context, oldest first. One thread uses it."""

    def __init__(self, settings: EstimatorSettings | None = None) -> None:
        super().__init__()
        self.settings = settings or EstimatorSettings()

    def add(self, key: ContextKey, limits: Limits, first_survival: Sequence[float] | None = None) -> list[Decision]:
        """Add a context, or widen it; returns the choices that this brought.

        first_survival: guess of a new context's acceptance, as in a `Profile`; by default that of the context of its pair
        with the most evidence.
        """
        if key in self:
            return self[key].widen(limits)
        if first_survival is None:
            alike = [each.survival() for each in self.values() if each.key.pair == key.pair]
            best = max(alike, key=lambda survival: survival[0][1] if survival else 0.0, default=[])
            first_survival = [chance for chance, _ in best]
        estimator = self[key] = Estimator(self.settings, limits, key)
        estimator.guess(first_survival)
        return estimator.decisions("the context was added")

    def reset(self, key: ContextKey, reason: str) -> Outcome:
        """Forget what was learned of a context."""
        estimator = self[key] = self[key].reset()
        event = DriftEvent(key, "reset", 0.0, f"{reason}: what was learned of this context was forgotten")
        return Outcome(estimator.decisions("the context was reset"), [event])
