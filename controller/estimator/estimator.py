"""Learns from reported steps and selects arms: the calls of this package. No I/O, no clock.

The same calls in the same order give the same decisions, bit for bit, also with `save` and `restore` in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError

from speclen.controller.estimator import settings as current_settings
from speclen.controller.estimator.choice import ADAPTIVE, check_policy, lengths_of
from speclen.controller.estimator.context import POOL, Context
from speclen.controller.estimator.seeding import check_profile
from speclen.controller.estimator.settings import DEFAULT, EstimatorSettings
from speclen.controller.estimator.shown import ms_per_token, rows_of
from speclen.records import (
    ArmEstimate,
    Choice,
    ContextKey,
    Decision,
    DriftEvent,
    Limits,
    Probe,
    Profile,
    StepRecord,
    Table,
)

PairKey = tuple[str, str]


class Outcome(NamedTuple):
    """Changes that a group of reports brought."""

    decisions: list[Decision]
    drift_events: list[DriftEvent]


STATE = TypeAdapter(list[Context])


class Estimator:
    """Contexts by key. policy: "adaptive", or one that does not learn, see `choice`. One thread calls it."""

    def __init__(self, settings: EstimatorSettings = DEFAULT, policy: str = ADAPTIVE) -> None:
        """Raises ValueError for an unknown policy."""
        current_settings.current = settings
        self.settings = settings
        self.policy = check_policy(policy)
        self._contexts: dict[ContextKey, Context] = {}
        self._pairs: dict[PairKey, list[Context]] = {}
        self._profiles: dict[ContextKey, Profile] = {}

    @property
    def contexts(self) -> tuple[ContextKey, ...]:
        """Keys of all contexts, oldest first."""
        return tuple(self._contexts)

    @property
    def pairs(self) -> tuple[PairKey, ...]:
        """Target and draft of all pairs."""
        return tuple(self._pairs)

    def knows(self, key: ContextKey) -> bool:
        """True if the context was added."""
        return key in self._contexts

    def limits(self, key: ContextKey) -> Limits:
        """Largest limits of a context's workers. KeyError if it is unknown."""
        return self._contexts[key].limits

    def add_context(self, key: ContextKey, limits: Limits) -> list[Decision]:
        """Make a context known, or widen it; returns the choices that this brought."""
        context = self._contexts.get(key)
        if context is None:
            context = self._contexts[key] = Context.new(key, limits)
            pair = self._pairs.setdefault(key.pair, [])
            if pair:  # its first guess of acceptance
                context.survival_prior = tuple(chance for chance, _ in self.survival(key.pair))
            pair.append(context)
            return self._decide_all(context, "the context was added")
        wider = context.limits.widened(limits)
        if wider == context.limits:
            return []
        context.widen(wider)
        return self._decide_all(context, "the context was widened")

    def seed_profile(self, key: ContextKey, profile: Profile) -> list[Decision]:
        """Take an offline profile as evidence of limited weight. KeyError; ValueError for cells beyond the limits."""
        context = self._contexts[key]
        check_profile(profile, context.limits)
        self._profiles[key] = profile
        context.seed(profile)
        return self._decide_all(context, f"a profile was imported ({profile.source or 'unnamed'})")

    def observe(self, key: ContextKey, records: Sequence[StepRecord], worker_id: str = "") -> Outcome:
        """Learn from consecutive steps of one worker, already validated. KeyError for an unknown context."""
        context = self._contexts[key]
        if not records:
            return Outcome([], [])
        before = context.arms_in_use()
        changed, events = context.observe(records, worker_id)
        if self.policy != ADAPTIVE:
            return Outcome([], events)
        decisions = self._decisions(context, before, self._reason(events)) if changed or events else []
        return Outcome(decisions, events)

    @staticmethod
    def _reason(events: Sequence[DriftEvent]) -> str:
        return events[0].detail if events else "more tokens per second are expected"

    def _decide_all(self, context: Context, reason: str) -> list[Decision]:
        before = context.arms_in_use() if context.has_decided else {}
        if self.policy != ADAPTIVE:
            profile = self._profiles.get(context.key)
            lengths = lengths_of(self.policy, context.grid.sizes, context.limits.max_speculation_length, profile)
            context.groups[POOL].selection.freeze(lengths)
        for name in context.groups:
            context.solve(name)
        context.has_decided = True
        return self._decisions(context, before, reason)

    def _decisions(self, context: Context, before: dict[str, np.ndarray], reason: str) -> list[Decision]:
        """One for every range of batch sizes whose arm changed, by group."""
        found = []
        for name, after in context.arms_in_use().items():
            known = before.get(name)
            changed = np.arange(len(after)) if known is None else np.flatnonzero(after != known)
            version = context.groups[name].selection.version
            for at in changed.tolist():
                previous = None if known is None else context.grid.arm(int(known[at]))
                arm = context.grid.arm(int(after[at]))
                before_ms = None if previous is None else ms_per_token(context, name, at, previous)
                ms = ms_per_token(context, name, at, arm)
                low, high = int(context.grid.low[at]), int(context.grid.high[at])
                isolated = name != POOL
                found.append(Decision(context.key, low, high, version, previous, arm, before_ms, ms, reason, isolated))
        return found

    def start_anew(self, key: ContextKey, reason: str) -> Outcome:
        """Forget what is believed of a context. KeyError if it is unknown."""
        old = self._contexts[key]
        new = self._contexts[key] = Context.new(key, old.limits)
        new.groups[POOL].selection.version = old.groups[POOL].selection.version + 1
        new.num_probes = old.num_probes
        new.survival_prior = old.survival_prior
        pair = self._pairs[key.pair]
        pair[pair.index(old)] = new
        event = DriftEvent(key, "reset", 0.0, f"{reason}: what was learned of this context was forgotten")
        return Outcome(self._decide_all(new, "the context started anew"), [event])

    def table(self, key: ContextKey, worker_id: str = "") -> Table:
        """The arm in use at every batch size for a worker. No exploration in it."""
        context = self._contexts[key]
        name = context.group_name(worker_id)
        group, grid = context.groups[name], context.grid
        ranges = zip(grid.low.tolist(), grid.high.tolist(), map(grid.arm, group.selection.arms.tolist()), strict=True)
        choices = tuple(Choice(*each, ms_per_token(context, name, at, each[2])) for at, each in enumerate(ranges))
        return Table(group.selection.version, choices)

    def take_probe(
        self,
        key: ContextKey,
        worker_id: str = "",
        batch_size: int | None = None,
        limits: Limits | None = None,
        num_steps: int = 3,
    ) -> Probe | None:
        """Hand out at most one exploratory arm for a few steps of one worker, charged at once; mostly None.

        batch_size: of the worker's newest report; limits: of the worker, None for the context's.
        """
        context = self._contexts[key]
        if self.policy != ADAPTIVE or not batch_size:
            return None
        found = context.take_probe(batch_size, limits or context.limits, num_steps, worker_id)
        return None if found is None else Probe(*found, num_steps)

    def rows(self, key: ContextKey) -> list[ArmEstimate]:
        """The learned table: one row per range of batch sizes and arm."""
        return rows_of(self._contexts[key])

    def survival(self, pair: PairKey) -> list[tuple[float, float]]:
        """P(the first i draft tokens are all accepted), and the evidence for it, by position, where it is known best."""
        return max(self._pairs[pair], key=lambda context: context.num_tokens).survival()

    def is_isolated(self, key: ContextKey, worker_id: str) -> bool:
        """True if a worker differs from the others and has a table of its own."""
        return self._contexts[key].group_name(worker_id) != POOL

    def num_isolated(self, key: ContextKey) -> int:
        """Workers of a context that have tables of their own."""
        return len(self._contexts[key].groups) - 1

    def save(self, pair: PairKey) -> bytes:
        """Everything that was learned of a pair, as JSON."""
        return STATE.dump_json(self._pairs[pair])

    def restore(self, pair: PairKey, content: bytes) -> None:
        """Go on from what was saved of contexts that have been added. ValueError for what is no state of them.

        All or nothing: where it raises, everything is as before.
        """
        pair_now = self._pairs[pair]
        restored = {context.key: context for context in _read_state(content)}
        known = {context.key: context.limits for context in pair_now}
        for key, context in restored.items():
            if known.get(key) != context.limits:
                raise ValueError(f"it was saved with limits {context.limits}, the context has {known.get(key)}")
        contexts = [restored.get(context.key, context) for context in pair_now]
        for context in contexts:
            self._contexts[context.key] = context
        self._pairs[pair] = contexts
        if self.policy != ADAPTIVE:
            for context in contexts:
                self._decide_all(context, "the state was restored")


def _read_state(content: bytes) -> list[Context]:
    """Contexts that were saved, once a copy has been tried. ValueError for what is no state."""
    try:
        for context in STATE.validate_json(content):
            for name in context.groups:
                context.estimate(name)
            rows_of(context)
    except ValidationError as error:
        raise ValueError(f"this is no state of an estimator: {error.errors()[0]['msg']}") from error
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"the state does not fit together: {error}") from error
    return STATE.validate_json(content)
