"""Learns from observed steps and decides lengths: what callers use. No I/O, no clock.

The same calls in the same order give the same decisions, bit for bit, also after export_state and restore in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from speclen.controller.estimator.acceptance import NUM_CLASSES, Acceptance, band_of
from speclen.controller.estimator.buckets import FINE, buckets_for
from speclen.controller.estimator.contexts.answers import mix, probe, table
from speclen.controller.estimator.contexts.context import Context
from speclen.controller.estimator.contexts.deciding import redecide
from speclen.controller.estimator.contexts.learning import learn
from speclen.controller.estimator.contexts.saved import (
    FORMAT,
    exported_context,
    restore_context,
    restored_acceptance,
    restored_copying,
)
from speclen.controller.estimator.contexts.shown import learned_rows, plan_estimates
from speclen.controller.estimator.contexts.workers import ACCEPTANCE, Peer
from speclen.controller.estimator.core import (
    Bucket,
    ContextKey,
    Decision,
    DriftEvent,
    LearnedRow,
    Limits,
    Mix,
    ObserveOutcome,
    Probe,
    Profile,
    StepObservation,
    Table,
)
from speclen.controller.estimator.plans.choice import ShownPlan
from speclen.controller.estimator.plans.copying import Copying
from speclen.controller.estimator.policies import ADAPTIVE, check_policy, make_policy
from speclen.controller.estimator.policies.policy import Space
from speclen.controller.estimator.state import exported, forget
from speclen.controller.estimator.times.priors import check_profile, seed, seed_from

# Log-sd by which step times of another engine on the same device may differ in every weight; of the same, with wider limits.
NEAREST_SD, WIDENED_SD = 0.3, 0.1

# What reading a state that is none may raise.
UNUSABLE = (KeyError, TypeError, IndexError, ValueError, AttributeError, ArithmeticError)


class Estimator:
    """Contexts by key. One thread calls it."""

    def __init__(self, buckets: str = FINE, policy: str = ADAPTIVE, seed: int = 0) -> None:
        """buckets: see `buckets`; policy: what chooses, a name of `policies`; ValueError if one is unknown."""
        self.bucket_spec, self.policy_name, self.seed = buckets, check_policy(policy), seed
        self._contexts: dict[ContextKey, Context] = {}
        self._acceptance: dict[tuple[str, str], Acceptance] = {}
        self._copying: dict[str, Copying] = {}  # by target
        buckets_for(buckets, 1)

    def knows(self, key: ContextKey) -> bool:
        """Whether the context was added."""
        return key in self._contexts

    @property
    def contexts(self) -> tuple[ContextKey, ...]:
        """Keys of all contexts, oldest first."""
        return tuple(self._contexts)

    def context(self, key: ContextKey) -> Context:
        """What is believed about a context, for reading. KeyError if it is unknown."""
        return self._contexts[key]

    def limits(self, key: ContextKey) -> Limits:
        """The largest limits of a context's workers. KeyError if it is unknown."""
        return self._contexts[key].limits

    def acceptance(self, pair: tuple[str, str]) -> Acceptance:
        """What all contexts of a pair share, for reading. KeyError if it is unknown."""
        return self._acceptance[pair]

    def add_context(self, key: ContextKey, limits: Limits) -> ObserveOutcome:
        """Make a context known, or extend it to larger limits; returns the choices that this brought.

        A new one starts with its pair's acceptance, and with the step times of the nearest context on its device.
        """
        known = self._contexts.get(key)
        if known is not None:
            return ObserveOutcome(self._widen(known, limits))
        context = self._new_context(key, limits)
        near = [other for other in self._contexts.values() if is_near(other.key, key) and other.main.times.known]
        if near:
            nearest = max(near, key=lambda other: (num_alike(other.key, key), other.main.times.num_seen.sum()))
            seed_from(context.main.times, nearest.main.times, NEAREST_SD)
        self._contexts[key] = context
        return ObserveOutcome(redecide(context, context.main))

    def _new_context(self, key: ContextKey, limits: Limits) -> Context:
        buckets, policy = buckets_for(self.bucket_spec, limits.max_batch_size), None
        if self.policy_name != ADAPTIVE:
            seed = self.seed * 1_000_003 + len(self._contexts)  # a stream of random numbers of its own
            policy = make_policy(self.policy_name, Space(limits, buckets), seed)
        copying = self._copying.setdefault(key.target, Copying())
        context = Context(key, limits, buckets, self._shared(key.pair, limits), policy, copying)
        context.workers.elsewhere = partial(self._elsewhere, key)
        return context

    def _elsewhere(self, key: ContextKey) -> list[Peer]:
        """Workers of the pair's other contexts that share its acceptance and still report; see `Workers`."""
        here, heard = self._contexts[key].workers.peers, self._acceptance[key.pair].heard.last
        return [
            peer
            for other, context in self._contexts.items()
            if other.pair == key.pair and other != key
            for worker, peer in context.workers.peers.items()
            if not peer.models[ACCEPTANCE] and worker in heard and worker not in here
        ]

    def _shared(self, pair: tuple[str, str], limits: Limits) -> Acceptance:
        """The acceptance that all contexts of a pair share, large enough for these limits."""
        bands = band_of(limits.max_batch_size) + 1
        model = self._acceptance.get(pair)
        if model is None:
            model = self._acceptance[pair] = Acceptance(limits.max_speculation_length, bands, NUM_CLASSES)
        model.extend(limits.max_speculation_length, bands)
        return model

    def _widen(self, old: Context, limits: Limits) -> list[Decision]:
        """Larger limits: a new context that starts from what the old one believes, and goes on with its version."""
        wider = Limits(
            max(old.limits.max_batch_size, limits.max_batch_size),
            max(old.limits.max_speculation_length, limits.max_speculation_length),
            max(old.limits.max_copied_tokens, limits.max_copied_tokens),
        )
        if wider == old.limits:
            return []
        if replace(wider, max_copied_tokens=old.limits.max_copied_tokens) == old.limits:
            old.allow_copies(wider)
            return []
        new = self._contexts[old.key] = self._new_context(old.key, wider)
        new.times += [new.new_times() for _ in old.times[1:]]
        for times, known in zip(new.times, old.times, strict=True):
            seed_from(times, known, WIDENED_SD)
            times.learned_before = known.has_learned
        for acceptance in old.acceptances[1:]:
            acceptance.extend(wider.max_speculation_length, band_of(wider.max_batch_size) + 1)
        new.acceptances += old.acceptances[1:]
        new.workers.go_on_from(old.workers)
        new.go_on_from(old)
        for models, group in old.groups.items():
            same = new.group(models)
            same.version, same.lengths = group.version, group.lengths[: len(new.buckets) - 1]
        cause = f"the context was widened to {wider.max_batch_size} rows and length {wider.max_speculation_length}"
        return [decision for group in new.groups.values() for decision in redecide(new, group, cause)]

    def start_anew(self, key: ContextKey, reason: str) -> ObserveOutcome:
        """Forget what is believed of a context. KeyError if it is unknown."""
        old, shared = self._contexts[key], self._acceptance[key.pair]
        if not shared.sound:
            forget(shared, old.new_acceptance())
        new = self._contexts[key] = self._new_context(key, old.limits)
        new.main.version, new.main.lengths, new.next_probe_id = old.main.version, old.main.lengths, old.next_probe_id
        event = DriftEvent(key, "reset", 0.0, f"{reason}: what was learned of this context was forgotten")
        return ObserveOutcome(redecide(new, new.main, "the context started anew"), [event])

    def count_from(self, key: ContextKey, version: int) -> None:
        """Let the versions of a context's tables go on from one that was given out before."""
        main = self._contexts[key].main
        main.version = max(main.version, version)

    def seed_profile(self, key: ContextKey, profile: Profile) -> ObserveOutcome:
        """Take an offline profile as a prior of limited weight for step times and acceptance. ValueError beyond limits."""
        context = self._contexts[key]
        main = context.main
        check_profile(profile, context.limits)
        if profile.survival:
            main.acceptance.seed(profile.survival, profile.num_survival_rows)
        if profile.cells and not (main.times.evidence.any() or main.times.has_learned):
            seed(main.times, profile)
        if context.policy is not None:
            context.policy.seed(profile)
        return ObserveOutcome(redecide(context, main, f"a profile was imported ({profile.source or 'unnamed'})"))

    def seed_policy(self, key: ContextKey, profile: Profile) -> None:
        """Give the policy that chooses in our stead a profile that was imported before it did. KeyError if unknown."""
        context = self._contexts[key]
        if context.policy is not None:
            context.policy.seed(profile)
            redecide(context, context.main, f"a profile is stored ({profile.source or 'unnamed'})")

    def observe(
        self, key: ContextKey, observations: Sequence[StepObservation], worker_id: str | Sequence[str] = ""
    ) -> ObserveOutcome:
        """Learn from a group of steps, already validated, and decide anew.

        worker_id: who sent them, or one name per step for a group of several, those of one side by side. KeyError for an
        unknown context, ValueError for steps beyond its limits. What leaves the representable starts anew, as an event.
        """
        context, outcome = self._contexts[key], ObserveOutcome()
        if not observations:
            return outcome
        workers = [worker_id] * len(observations) if isinstance(worker_id, str) else list(worker_id)
        outcome.drift_events += learn(context, observations, workers)
        context.reports_since_drift += len(observations)
        if outcome.drift_events:
            context.last_drift, context.reports_since_drift = outcome.drift_events[-1], 0
        context.tell_policy(observations)
        for group in context.groups.values():
            if group.seen != group.newest:
                outcome.decisions += redecide(context, group)
        return outcome

    def num_apart(self, key: ContextKey) -> int:
        """Workers of a context that share neither step times nor acceptance, or not both, with the others."""
        return sum(any(peer.models) for peer in self._contexts[key].workers.peers.values())

    def tells_apart(self, key: ContextKey, worker_id: str) -> bool:
        """Whether a worker is known by itself; there are too many for it otherwise. KeyError for an unknown context."""
        return self._contexts[key].workers.tells_apart(worker_id)

    def models_of(self, key: ContextKey, worker_id: str) -> tuple[int, int]:
        """Which step times and which acceptance a worker shares with others; (0, 0) unless it is unlike them."""
        return self._contexts[key].workers.models_of(worker_id)

    def table(self, key: ContextKey, worker_id: str = "") -> Table:
        """The best length known for every bucket for a worker. No exploration in it."""
        context = self._contexts[key]
        return table(context, context.group_of(worker_id))

    def mix(self, key: ContextKey, worker_id: str = "") -> Mix | None:
        """The numbers by which a worker finds the length for the classes of its rows; None while nothing is known."""
        context = self._contexts[key]
        return mix(context, context.group_of(worker_id))

    def is_mixed(self, key: ContextKey) -> bool:
        """Whether requests of another class than the first were seen: the table alone is not enough then."""
        return bool((self._contexts[key].mix[:, 0] < 1.0).any())

    def length_for(self, key: ContextKey, batch_size: int, worker_id: str = "") -> int:
        """The table's length for a batch size, without building the table. Sizes beyond the limit use the last bucket."""
        return self._contexts[key].group_of(worker_id).lengths[self.bucket_index(key, batch_size)]

    def bucket_index(self, key: ContextKey, batch_size: int) -> int:
        """Which bucket a batch size belongs to. Sizes beyond the limit belong to the last."""
        context = self._contexts[key]
        return int(context.main.times.bucket_of[min(batch_size, context.limits.max_batch_size)])

    def take_probe(
        self,
        key: ContextKey,
        batch_size: int | None = None,
        max_length: int | None = None,
        worker_id: str = "",
        max_copied: int = 0,
        num_steps: int = 1,
    ) -> Probe | None:
        """Hand out at most one exploratory step, charged to its bucket at once; mostly None.

        batch_size None: any bucket of the newest reports. max_length, max_copied: of the worker that is to do it, None for
        the context's. num_steps: that it will take, each of which is paid for. Each probe is one worker's, never repeated.
        """
        context = self._contexts[key]
        if context.policy is not None:
            return None
        longest = context.limits.max_speculation_length
        longest = longest if max_length is None else min(longest, max_length)
        buckets = context.recent if batch_size is None else [self.bucket_index(key, batch_size)]
        return probe(context, context.group_of(worker_id), buckets, longest, max_copied, num_steps)

    def probe_goes_on(self, key: ContextKey, batch_size: int, worker_id: str = "") -> bool:
        """Whether the last probe of this batch size is only complete with another one right after it."""
        return bool(self._contexts[key].group_of(worker_id).choice.to_follow[self.bucket_index(key, batch_size)])

    def last_decision(self, key: ContextKey, bucket: int, worker_id: str = "") -> Decision | None:
        """The newest change of a bucket's choice since the start of this process."""
        return self._contexts[key].group_of(worker_id).last_decision.get(bucket)

    def survival(self, key: ContextKey, bucket: int | None = None) -> list[float]:
        """P(draft tokens 0..i all accepted) by position; of everybody, or of everybody at a bucket's load."""
        context = self._contexts[key]
        model = context.main.acceptance
        values = model.shared if bucket is None else model.of_band()[context.bands[bucket]]
        return [float(value) for value in values.cumprod()[: context.limits.max_speculation_length]]

    def learned_rows(self, key: ContextKey, worker_id: str = "") -> list[LearnedRow]:
        """Every bucket and length with what is believed, what was seen, and on how much evidence; empty while unknown."""
        context = self._contexts[key]
        return learned_rows(context, context.group_of(worker_id))

    def plan_estimates(
        self, key: ContextKey, worker_id: str = "", bucket: int | None = None
    ) -> dict[Bucket, list[ShownPlan]]:
        """Plans that copy, of one bucket or of those where rows did: the one in use, if one is, then the best others."""
        context = self._contexts[key]
        return plan_estimates(context, context.group_of(worker_id), bucket)

    def export_state(self, key: ContextKey) -> dict[str, Any]:
        """Everything that a context needs to go on exactly, as JSON-able values; see export_pair_state for the rest."""
        return exported_context(self._contexts[key], self.policy_name)

    def export_pair_state(self, pair: tuple[str, str]) -> dict[str, Any]:
        """The acceptance that all contexts of a pair share, as JSON-able values."""
        state: dict[str, Any] = exported(self._acceptance[pair])
        copying = self._copying.get(pair[0])
        return state | {"format": FORMAT} | ({} if copying is None else {"copying": exported(copying)})

    def restore_copying(self, target: str, pair_state: dict[str, Any]) -> None:
        """Go on from what the state of a pair says of its target's copying, where nothing is known of that yet.

        ValueError if it is not usable; nothing has changed then.
        """
        try:
            if "copying" in pair_state and target not in self._copying:
                with np.errstate(all="ignore"):  # what comes of it is looked at
                    self._copying[target] = restored_copying(pair_state["copying"])
        except UNUSABLE as error:
            raise ValueError(f"what is known of copying for {target} is not usable: {error!r}") from error

    def restore(
        self, key: ContextKey, limits: Limits, state: dict[str, Any] | None, pair_state: dict[str, Any] | None
    ) -> None:
        """Go on from exported states: of every context before the first observation.

        ValueError if one is not of this format or these limits; nothing has changed then.
        """
        shared = self._acceptance.get(key.pair)
        try:
            with np.errstate(all="ignore"):  # what comes of it is looked at
                if pair_state is not None and shared is None:
                    self._acceptance[key.pair] = restored_acceptance(pair_state)
                if pair_state is not None:
                    self.restore_copying(key.target, pair_state)
                context = self._new_context(key, limits)
                cause = "" if state is None else restore_context(context, state, self.policy_name)
                if cause or state is None:
                    redecide(context, context.main, cause)
            self._contexts[key] = context
        except UNUSABLE as error:
            if shared is None:
                self._acceptance.pop(key.pair, None)
            reason = f"state of {key.target} with {key.draft} on {key.device} is not usable: {error!r}"
            raise ValueError(reason) from error


def is_near(one: ContextKey, other: ContextKey) -> bool:
    """Whether two contexts differ in their engines alone."""
    return (one.pair, one.device, one.dtype) == (other.pair, other.device, other.dtype)


def num_alike(one: ContextKey, other: ContextKey) -> int:
    """How many parts of the engines' fingerprints are the same: backend, threads, versions."""
    return len({*one.engine_fingerprint.split(",")} & {*other.engine_fingerprint.split(",")})
