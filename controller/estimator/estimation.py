"""Learns from observed steps and decides the length of every bucket: no I/O, no clock, no gRPC.

The same calls in the same order give the same decisions, bit for bit, also after export_state and restore in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from speclen.controller.estimator.acceptance import AcceptanceModel, band_of
from speclen.controller.estimator.buckets import DOUBLING, buckets_for
from speclen.controller.estimator.context import ContextModel, acceptance_is_sound
from speclen.controller.estimator.core import (
    Choice,
    ContextKey,
    Decision,
    DriftEvent,
    LearnedRow,
    Limits,
    ObserveOutcome,
    Probe,
    Profile,
    StepObservation,
    Table,
)
from speclen.controller.estimator.policies import make_policy
from speclen.controller.estimator.policies.policy import Policy


class _Chooser:
    """What chooses for one context: its model, its policy and the table it last gave out."""

    def __init__(self, model: ContextModel, policy: Policy) -> None:
        self.model = model
        self.policy = policy
        self.version = 0
        self.lengths: list[int] = []
        self.last_drift: DriftEvent | None = None
        self.reports_since_drift = 0
        self.next_probe_id = 1
        self.last_decision: dict[int, Decision] = {}


class Estimator:
    """Contexts by key. One thread calls it."""

    def __init__(self, policy: str = "adaptive", seed: int = 0, buckets: str = DOUBLING) -> None:
        """policy: a name of `policies`; buckets: see `buckets`. ValueError if either is unknown."""
        self.policy_name = policy
        self.seed = seed
        self.bucket_spec = buckets
        self._contexts: dict[ContextKey, _Chooser] = {}
        self._acceptance: dict[tuple[str, str], AcceptanceModel] = {}
        make_policy(policy, self._model(ContextKey("", "", "", ""), Limits(1, 1), AcceptanceModel(1, 1)), seed)
        buckets_for(buckets, 1)

    def knows(self, key: ContextKey) -> bool:
        """Whether the context was added."""
        return key in self._contexts

    @property
    def contexts(self) -> tuple[ContextKey, ...]:
        """Keys of all contexts, oldest first."""
        return tuple(self._contexts)

    def model(self, key: ContextKey) -> ContextModel:
        """What is believed about a context, for reading. KeyError if it is unknown."""
        return self._contexts[key].model

    def limits(self, key: ContextKey) -> Limits:
        """The largest limits of a context's workers. KeyError if it is unknown."""
        return self._contexts[key].model.limits

    def last_decision(self, key: ContextKey, bucket: int) -> Decision | None:
        """The newest change of a bucket's choice since the start of this process."""
        return self._contexts[key].last_decision.get(bucket)

    def add_context(self, key: ContextKey, limits: Limits) -> ObserveOutcome:
        """Make a context known, or extend it to larger limits; returns the choices that this brought.

        A new one starts with its pair's acceptance, and with the step times of the nearest context on its device.
        """
        context = self._contexts.get(key)
        if context is None:
            return self._begin(key, limits)
        known = context.model.limits
        wider = Limits(
            max(known.max_batch_size, limits.max_batch_size),
            max(known.max_speculation_length, limits.max_speculation_length),
        )
        return ObserveOutcome() if wider == known else self._widen(context, wider)

    def _begin(self, key: ContextKey, limits: Limits) -> ObserveOutcome:
        model = self._model(key, limits, self._acceptance_for(key.pair, limits))
        nearest = self._nearest(key)
        if nearest is not None:
            model.latency.seed_from(nearest.latency)
            model.refresh()
        context = _Chooser(model, make_policy(self.policy_name, model, self._policy_seed(key)))
        self._contexts[key] = context
        return ObserveOutcome(self._redecide(context))

    def _widen(self, context: _Chooser, limits: Limits) -> ObserveOutcome:
        def widen() -> ObserveOutcome:
            self._acceptance_for(context.model.key.pair, limits)
            context.model.extend(limits, buckets_for(self.bucket_spec, limits.max_batch_size))
            context.policy.extend()
            context.lengths = context.lengths[: len(context.model.buckets) - 1]
            cause = (
                f"the context was widened to {limits.max_batch_size} rows and length {limits.max_speculation_length}"
            )
            return ObserveOutcome(self._redecide(context, cause))

        return self._within_bounds(context, widen)

    def _model(self, key: ContextKey, limits: Limits, acceptance: AcceptanceModel) -> ContextModel:
        return ContextModel(key, limits, buckets_for(self.bucket_spec, limits.max_batch_size), acceptance)

    def _policy_seed(self, key: ContextKey) -> int:
        """One stream of random numbers per context, in order of arrival."""
        return self.seed * 1_000_003 + len(self._contexts)

    def _acceptance_for(self, pair: tuple[str, str], limits: Limits) -> AcceptanceModel:
        """The acceptance that all contexts of a pair share, large enough for these limits."""
        num_bands = band_of(limits.max_batch_size) + 1
        model = self._acceptance.get(pair)
        if model is None:
            model = self._acceptance[pair] = AcceptanceModel(limits.max_speculation_length, num_bands)
        model.extend(limits.max_speculation_length, num_bands)
        return model

    def _nearest(self, key: ContextKey) -> ContextModel | None:
        """The context whose step times resemble those of a new one most: same device, models and dtype; None if none."""
        for known, context in reversed(self._contexts.items()):
            same = (known.pair, known.device, known.dtype) == (key.pair, key.device, key.dtype)
            if same and context.model.latency.known:
                return context.model
        return None

    def seed_profile(self, key: ContextKey, profile: Profile) -> ObserveOutcome:
        """Take an offline profile as a prior of limited weight for step times and acceptance."""
        context = self._contexts[key]
        limits = context.model.limits
        for cell in profile.cells:
            if not 1 <= cell.batch_size <= limits.max_batch_size:
                raise ValueError(
                    f"profile cell has batch_size {cell.batch_size}, allowed: 1 to {limits.max_batch_size}"
                )
            if not 0 <= cell.speculation_length <= limits.max_speculation_length:
                raise ValueError(
                    f"profile cell has speculation_length {cell.speculation_length}, "
                    f"allowed: 0 to {limits.max_speculation_length}"
                )

        def seed() -> ObserveOutcome:
            if profile.survival:
                context.model.acceptance.seed(profile.survival, profile.num_survival_rows)
            if profile.cells:
                context.model.seed(profile)
            context.model.refresh()
            context.policy.seed(profile)
            return ObserveOutcome(self._redecide(context, f"a profile was imported ({profile.source or 'unnamed'})"))

        return self._within_bounds(context, seed)

    def observe(
        self, key: ContextKey, observations: Sequence[StepObservation], worker_id: str | Sequence[str] = ""
    ) -> ObserveOutcome:
        """Learn from a group of steps, already validated, and decide anew.

        worker_id: who sent them, or one name per step for a group of several workers, those of one side by side.
        Raises KeyError for an unknown context, ValueError for steps beyond its limits.
        """
        context = self._contexts[key]
        if not observations:
            return ObserveOutcome()
        model = context.model
        batch = [each.batch_size for each in observations]
        if max(batch) > model.limits.max_batch_size:
            raise ValueError(f"batch_size {max(batch)} is beyond the context's limit of {model.limits.max_batch_size}")
        longest = max(each.speculation_length for each in observations)
        if longest > model.limits.max_speculation_length:
            raise ValueError(
                f"speculation_length {longest} is beyond the context's limit of {model.limits.max_speculation_length}"
            )
        workers = [worker_id] * len(observations) if isinstance(worker_id, str) else worker_id

        def learn() -> ObserveOutcome:
            events = model.learn(observations, workers)
            context.reports_since_drift += len(observations)
            if events:
                context.last_drift, context.reports_since_drift = events[-1], 0
            context.policy.update(model.latency.bucket_of[batch], observations)
            return ObserveOutcome(self._redecide(context), events)

        return self._within_bounds(context, learn)

    def _within_bounds(self, context: _Chooser, change: Callable[[], ObserveOutcome]) -> ObserveOutcome:
        """Make a change; where it takes the context's numbers out of what can be represented, the context starts anew."""
        try:
            with np.errstate(all="ignore"):  # what comes of it is looked at as a whole
                outcome = change()
                if context.model.sound():
                    return outcome
            reason = "its numbers became implausible"
        except (ArithmeticError, ValueError, IndexError) as error:
            reason = str(error)
        return self._start_anew(context, reason)

    def start_anew(self, key: ContextKey, reason: str) -> ObserveOutcome:
        """Forget what is believed of a context. KeyError if it is unknown."""
        return self._start_anew(self._contexts[key], reason)

    def _start_anew(self, context: _Chooser, reason: str) -> ObserveOutcome:
        """Forget what one context believes of step times, and of acceptance where that is the cause, and nothing else."""
        key, limits, acceptance = context.model.key, context.model.limits, context.model.acceptance
        if not acceptance_is_sound(acceptance):
            acceptance.restore(AcceptanceModel(acceptance.max_length, len(acceptance.band_reached)).export_state())
        model = self._model(key, limits, acceptance)
        fresh = _Chooser(model, make_policy(self.policy_name, model, self._policy_seed(key)))
        fresh.version, fresh.lengths, fresh.next_probe_id = context.version, context.lengths, context.next_probe_id
        event = DriftEvent(key, "reset", 0.0, f"{reason}: what was learned of this context was forgotten")
        fresh.last_drift = event
        self._contexts[key] = fresh
        return ObserveOutcome(self._redecide(fresh, "the context started anew"), [event])

    def _redecide(self, context: _Chooser, cause: str = "") -> list[Decision]:
        """Ask the policy for every bucket; returns what changed, and why."""
        chosen = context.policy.pull_all()
        if chosen == context.lengths:
            return []
        before, context.lengths = context.lengths, chosen
        context.version += 1
        decisions = []
        for bucket, length in zip(context.model.buckets, chosen, strict=True):
            old = before[bucket.index] if bucket.index < len(before) else None
            if old == length:
                continue
            decision = self._explain_change(context, bucket.index, old, length, cause)
            context.last_decision[bucket.index] = decision
            decisions.append(decision)
        return decisions

    def _explain_change(self, context: _Chooser, index: int, old: int | None, new: int, cause: str) -> Decision:
        model = context.model
        bucket = model.buckets[index]
        if not model.latency.known:
            reason = "nothing is known yet: a cautious length until the first steps were measured"
            return Decision(model.key, bucket, context.version, old, new, None, None, reason)
        per_token = 1e3 * model.seconds[index] / model.tokens[index]
        now, then = float(per_token[new]), None if old is None else float(per_token[old])
        if then is None or old is None:
            reason = f"first choice: length {new} at {now:.4g} ms per token"
        else:
            gain = 100.0 * (then / now - 1.0)
            reason = f"length {new} promises {now:.4g} ms per token, length {old} {then:.4g} ({gain:+.1f}% goodput)"
        drift = context.last_drift
        if cause:
            reason += f"; {cause}"
        elif drift is not None and drift.factor != "reset" and context.reports_since_drift < 1000:
            verb = "rose" if drift.statistic > 0 else "fell"
            reason += f"; {drift.factor} {verb} {context.reports_since_drift} reports ago"
        return Decision(model.key, bucket, context.version, old, new, then, now, reason)

    def table(self, key: ContextKey) -> Table:
        """The best length known for every bucket. No exploration in it."""
        context = self._contexts[key]
        model = context.model
        known = model.latency.known
        choices = []
        for bucket, length in zip(model.buckets, context.lengths, strict=True):
            ms = (
                1e3 * float(model.seconds[bucket.index, length] / model.tokens[bucket.index, length]) if known else None
            )
            choices.append(Choice(bucket, length, ms))
        return Table(context.version, tuple(choices))

    def length_for(self, key: ContextKey, batch_size: int) -> int:
        """The table's length for a batch size, without building the table. Sizes beyond the limit use the last bucket."""
        return self._contexts[key].lengths[self.bucket_index(key, batch_size)]

    def bucket_index(self, key: ContextKey, batch_size: int) -> int:
        """Which bucket a batch size belongs to. Sizes beyond the limit belong to the last."""
        model = self._contexts[key].model
        return int(model.latency.bucket_of[min(batch_size, model.limits.max_batch_size)])

    def take_probe(self, key: ContextKey, batch_size: int | None = None, max_length: int | None = None) -> Probe | None:
        """Hand out at most one exploratory step, charged to its bucket at once; mostly None.

        batch_size None: any bucket of the newest reports. max_length: of the worker that is to do it, None for the
        context's. A probe is one step of one worker and is never repeated.
        """
        context = self._contexts[key]
        model = context.model
        buckets = model.latency.recent_buckets if batch_size is None else [self.bucket_index(key, batch_size)]
        for bucket in buckets:
            length = context.policy.probe(bucket, max_length)
            if length is not None:
                probe = Probe(context.next_probe_id, model.buckets[bucket], length)
                context.next_probe_id += 1
                return probe
        return None

    def probe_goes_on(self, key: ContextKey, batch_size: int) -> bool:
        """Whether the last probe of this batch size is only complete with another one right after it."""
        return self._contexts[key].policy.probe_goes_on(self.bucket_index(key, batch_size))

    def learned_rows(self, key: ContextKey) -> list[LearnedRow]:
        """Every bucket and length with what is believed and on how much evidence; empty while nothing is known.

        A cell that nobody measured takes its estimate from the surface through the others, and its source from them
        too: num_steps 0 tells it apart. "prior" is left to contexts that took everything from a similar one.
        """
        context = self._contexts[key]
        model = context.model
        if not model.latency.known:
            return []
        inferred = source_of(bool(model.latency.profiled.any()), bool(model.latency.num_steps.any()))
        rows = []
        for bucket, chosen in zip(model.buckets, context.lengths, strict=True):
            for estimate in model.estimates(bucket.index):
                length = estimate.speculation_length
                num_steps = int(model.latency.num_steps[bucket.index, length])
                profiled = bool(model.latency.profiled[bucket.index, length])
                source = source_of(profiled, num_steps > 0) if profiled or num_steps else inferred
                rows.append(LearnedRow(bucket, estimate, num_steps, source, length == chosen))
        return rows

    def survival(self, key: ContextKey, bucket: int | None = None) -> list[float]:
        """P(draft tokens 0..i all accepted) by position; of everybody, or of a bucket's band of load."""
        model = self._contexts[key].model
        if bucket is None:
            values = model.acceptance.acceptance.cumprod()
        else:
            values = model.acceptance.band_survival[model.bands[bucket]]
        return [float(value) for value in values[: model.limits.max_speculation_length]]

    def export_state(self, key: ContextKey) -> dict[str, Any]:
        """Everything that a context needs to go on exactly, as JSON-able values; see export_pair_state for the rest."""
        context = self._contexts[key]
        drift = context.last_drift
        return {
            "policy": self.policy_name,
            "buckets": [bucket.batch_max for bucket in context.model.buckets],
            "model": context.model.export_state(),
            "choice": context.policy.export_state(),
            "version": context.version,
            "lengths": list(context.lengths),
            "next_probe_id": context.next_probe_id,
            "reports_since_drift": context.reports_since_drift,
            "last_drift": None if drift is None else [drift.factor, drift.statistic, drift.detail],
        }

    def export_pair_state(self, pair: tuple[str, str]) -> dict[str, Any]:
        """The acceptance that all contexts of a pair share, as JSON-able values."""
        return self._acceptance[pair].export_state()

    def restore(
        self, key: ContextKey, limits: Limits, state: dict[str, Any] | None, pair_state: dict[str, Any] | None
    ) -> None:
        """Go on from exported states: of every context before the first observation.

        A state of another policy or of other buckets gives up what cannot be used of it, and keeps the acceptance.
        Raises ValueError if a state is not one, and leaves what other contexts use as it was.
        """
        try:
            with np.errstate(all="ignore"):
                acceptance = self._restored_acceptance(key.pair, limits, pair_state)
                model = self._model(key, limits, acceptance)
                context = _Chooser(model, make_policy(self.policy_name, model, self._policy_seed(key)))
                if state is not None and state["buckets"] == [bucket.batch_max for bucket in model.buckets]:
                    self._restore_context(context, state)
                else:
                    self._redecide(context)
                check_restored(context)
        except (KeyError, TypeError, IndexError, AttributeError, ArithmeticError, ValueError) as error:
            raise ValueError(
                f"state of {key.target} with {key.draft} on {key.device} is not usable: {error!r}"
            ) from error
        self._contexts[key], self._acceptance[key.pair] = context, acceptance

    def _restored_acceptance(
        self, pair: tuple[str, str], limits: Limits, state: dict[str, Any] | None
    ) -> AcceptanceModel:
        """The pair's acceptance: that of its other contexts, or one of the stored state."""
        if state is None or pair in self._acceptance:
            return self._acceptance_for(pair, limits)
        num_bands = band_of(limits.max_batch_size) + 1
        acceptance = AcceptanceModel(limits.max_speculation_length, num_bands)
        acceptance.restore(state)
        if not acceptance_is_sound(acceptance):
            raise ValueError("the acceptance counts are no counts")
        acceptance.extend(limits.max_speculation_length, num_bands)
        return acceptance

    def _restore_context(self, context: _Chooser, state: dict[str, Any]) -> None:
        context.model.restore(state["model"])
        context.version = int(state["version"])
        context.lengths = [int(length) for length in state["lengths"]]
        context.next_probe_id = int(state["next_probe_id"])
        context.reports_since_drift = int(state["reports_since_drift"])
        drift = state["last_drift"]
        context.last_drift = None if drift is None else DriftEvent(context.model.key, drift[0], drift[1], drift[2])
        if state["policy"] == self.policy_name:
            context.policy.restore(state["choice"])
        else:
            context.policy.extend()
            self._redecide(context, f"the policy changed from {state['policy']} to {self.policy_name}")


def check_restored(context: _Chooser) -> None:
    """Raise ValueError where a restored context could not go on."""
    lengths, longest = context.lengths, context.model.limits.max_speculation_length
    if len(lengths) != len(context.model.buckets) or not all(0 <= length <= longest for length in lengths):
        raise ValueError(f"{lengths} are not the lengths of {len(context.model.buckets)} buckets")
    if not context.model.sound():
        raise ValueError("its numbers are implausible")


def source_of(profiled: bool, online: bool) -> str:
    """Where an estimate comes from, as the learned table says it."""
    return "both" if profiled and online else "profile" if profiled else "online" if online else "prior"
