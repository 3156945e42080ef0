"""Learns from observed steps and decides lengths: contexts, groups of like workers, tables, probes. No I/O, no clock.

The same calls in the same order give the same decisions, bit for bit, also after export_state and restore in between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, compress, groupby
from typing import Any

import numpy as np

from controller.arrays import FloatArray
from controller.buckets import buckets_for
from controller.core import (
    Bucket,
    Choice,
    ContextKey,
    Decision,
    DriftEvent,
    LearnedRow,
    LengthEstimate,
    Limits,
    Mix,
    ObserveOutcome,
    Probe,
    Profile,
    StepObservation,
    Table,
)
from controller.estimator.acceptance import Acceptance, band_of
from controller.estimator.choice import LengthChoice
from controller.estimator.step_time import MOST_EVIDENCE, StepTimes
from controller.estimator.workers import ACCEPTANCE, TIMES, Peer, Workers

# Classes of requests that a report may tell apart: greedy, cool, hot. Reports that don't are all of the first.
NUM_CLASSES = 3
# Reports with a band's load over which its usual mix of classes is averaged.
MIX_REPORTS = 100.0
# Log-sd by which a worker that is found unlike may differ from those it was taken for in every weight.
UNLIKE_SD = 0.4
# Resumptions over which their cost is averaged, and the most that one may count, in usual steps.
RESUMES_REMEMBERED, LARGEST_RESUME_STEPS = 20, 5.0
# Drift this many reports ago is named as the reason of a decision.
DRIFT_NAMED_REPORTS = 1000


class Group:
    """Workers that are alike: what is believed about them, and what they play."""

    def __init__(self, times: StepTimes, acceptance: Acceptance, choice: LengthChoice) -> None:
        self.times, self.acceptance, self.choice = times, acceptance, choice
        self.version = 0
        self.lengths: list[int] = []
        self.seen_acceptance = -1
        self.last_decision: dict[int, Decision] = {}


class Context:
    """One context: models of step times and of acceptance, and the groups of workers that share one of each.

    A new worker shares the first ones; the first acceptance is that of the pair, for all devices.
    """

    def __init__(self, key: ContextKey, limits: Limits, buckets: tuple[Bucket, ...], acceptance: Acceptance) -> None:
        self.key, self.limits, self.buckets = key, limits, buckets
        self.times = [StepTimes(buckets, limits.max_speculation_length)]
        self.acceptances = [acceptance]
        self.groups: dict[tuple[int, int], Group] = {}
        self.main = self.group((0, 0))
        self.workers = Workers(len(buckets) * (limits.max_speculation_length + 1))
        self.bands = np.array([band_of(bucket.batch_max) for bucket in buckets])
        self.band_of_size = np.array([0, *(band_of(size) for size in range(1, limits.max_batch_size + 1))])
        self.mix = np.zeros((self.bands.max() + 1, NUM_CLASSES))
        self.mix[:, 0] = 1.0
        self.last_length: dict[str, int] = {}
        self.resume_s, self.num_resumes = 0.0, 0
        self.last_drift: DriftEvent | None = None
        self.reports_since_drift = 0
        self.next_probe_id = 1
        self.recent: list[int] = []  # buckets of the newest reports

    def group_of(self, worker: str) -> Group:
        """The group that a worker belongs to."""
        peer = self.workers.peers.get(worker)
        return self.main if peer is None else self.group((peer.models[TIMES], peer.models[ACCEPTANCE]))

    def group(self, models: tuple[int, int], like: Group | None = None) -> Group:
        """The group with these models, a new one if need be; `like` gives its first lengths."""
        group = self.groups.get(models)
        if group is None:
            choice = LengthChoice(len(self.buckets), self.limits.max_speculation_length)
            group = self.groups[models] = Group(self.times[models[TIMES]], self.acceptances[models[ACCEPTANCE]], choice)
            if like is not None:
                group.version, group.lengths = like.version, list(like.lengths)
        return group

    def tokens(self, group: Group) -> FloatArray:
        """Expected tokens per row and step of the usual mix of classes, [buckets, lengths]."""
        known = group.acceptance.tokens[:, : len(self.mix), : self.limits.max_speculation_length + 1]
        mixed: FloatArray = np.einsum("kc,ckl->kl", self.mix, known)[self.bands]
        return mixed

    def redecide(self, group: Group, cause: str = "") -> list[Decision]:
        """Choose anew by the newest estimates; returns what changed, and why."""
        group.seen_acceptance = group.acceptance.version
        group.choice.decide(self.tokens(group), group.times, self.resume_s)
        chosen: list[int] = group.choice.lengths.tolist()
        if chosen == group.lengths:
            return []
        before, group.lengths = group.lengths, chosen
        group.version += 1
        decisions = []
        for bucket, length in zip(self.buckets, chosen, strict=True):
            old = before[bucket.index] if bucket.index < len(before) else None
            if old != length:
                decision = self._explained(group, bucket, old, length, cause)
                group.last_decision[bucket.index] = decision
                decisions.append(decision)
        return decisions

    def _explained(self, group: Group, bucket: Bucket, old: int | None, new: int, cause: str) -> Decision:
        if not group.times.known:
            reason = "nothing is known yet: a cautious length until the first steps were measured"
            return Decision(self.key, bucket, group.version, old, new, None, None, reason)
        per_token = 1e3 / group.choice.goodput[bucket.index]
        now, then = float(per_token[new]), None if old is None else float(per_token[old])
        if then is None:
            reason = f"first choice: length {new} at {now:.4g} ms per token"
        else:
            gain = 100.0 * (then / now - 1.0)
            reason = f"length {new} promises {now:.4g} ms per token, length {old} {then:.4g} ({gain:+.1f}% goodput)"
        drift = self.last_drift
        if cause:
            reason += f"; {cause}"
        elif drift is not None and self.reports_since_drift < DRIFT_NAMED_REPORTS:
            verb = "rose" if drift.statistic > 0 else "fell"
            reason += f"; {drift.factor} {verb} {self.reports_since_drift} reports ago"
        return Decision(self.key, bucket, group.version, old, new, then, now, reason)


class Estimator:
    """Contexts by key. One thread calls it."""

    def __init__(self, buckets: str = "fine") -> None:
        """buckets: see `controller.buckets`; ValueError if unknown."""
        self.bucket_spec = buckets
        self._contexts: dict[ContextKey, Context] = {}
        self._acceptance: dict[tuple[str, str], Acceptance] = {}
        buckets_for(buckets, 1)

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

    def add_context(self, key: ContextKey, limits: Limits) -> list[Decision]:
        """Make a context known, or extend it to larger limits.

        A new one starts with its pair's acceptance, and with the step times of the nearest context on its device.
        """
        known = self._contexts.get(key)
        if known is None:
            context = self._new_context(key, limits)
            for other in reversed(self._contexts.values()):
                same = (other.key.pair, other.key.device, other.key.dtype) == (key.pair, key.device, key.dtype)
                if same and other.main.times.known:
                    context.main.times.seed_from(other.main.times, 0.3)
                    break
            self._contexts[key] = context
            return context.redecide(context.main)
        wider = Limits(
            max(known.limits.max_batch_size, limits.max_batch_size),
            max(known.limits.max_speculation_length, limits.max_speculation_length),
        )
        return [] if wider == known.limits else self._widen(known, wider)

    def _new_context(self, key: ContextKey, limits: Limits) -> Context:
        buckets = buckets_for(self.bucket_spec, limits.max_batch_size)
        return Context(key, limits, buckets, self._shared(key.pair, limits))

    def _shared(self, pair: tuple[str, str], limits: Limits) -> Acceptance:
        """The acceptance that all contexts of a pair share, large enough for these limits."""
        bands = band_of(limits.max_batch_size) + 1
        model = self._acceptance.get(pair)
        if model is None:
            model = self._acceptance[pair] = Acceptance(limits.max_speculation_length, bands, NUM_CLASSES)
        model.extend(limits.max_speculation_length, bands)
        return model

    def _widen(self, old: Context, limits: Limits) -> list[Decision]:
        """Larger limits: a new context that starts from the old one's surface, keeps its cells and its version."""
        new = self._contexts[old.key] = self._new_context(old.key, limits)
        before, group = old.main, new.main
        group.times.seed_from(before.times, 0.1)
        group.version, group.lengths = before.version, before.lengths[: len(new.buckets) - 1]
        for name in ("last_length", "resume_s", "num_resumes", "last_drift", "reports_since_drift", "next_probe_id"):
            setattr(new, name, getattr(old, name))
        new.mix[: len(old.mix)] = old.mix
        return new.redecide(group)

    def seed_profile(self, key: ContextKey, profile: Profile) -> ObserveOutcome:
        """Take an offline profile as a prior of limited weight for step times and acceptance. ValueError beyond limits."""
        context = self._contexts[key]
        for cell in profile.cells:
            for name, least, most in (
                ("batch_size", 1, context.limits.max_batch_size),
                ("speculation_length", 0, context.limits.max_speculation_length),
            ):
                if not least <= getattr(cell, name) <= most:
                    raise ValueError(f"profile cell has {name} {getattr(cell, name)}, allowed: {least} to {most}")
        group = context.main
        if profile.survival:
            group.acceptance.seed(profile.survival, profile.num_survival_rows)
        if profile.cells and group.times.evidence.sum() == 0.0:
            group.times.seed(profile)
        cause = f"a profile was imported ({profile.source or 'unnamed'})"
        return ObserveOutcome(decisions=context.redecide(group, cause))

    def observe(
        self, key: ContextKey, observations: Sequence[StepObservation], worker: str | Sequence[str] = ""
    ) -> ObserveOutcome:
        """Learn from a group of steps, already validated, and decide anew.

        worker: who sent them, or one name per step for a group of several, those of one side by side. KeyError for an
        unknown context, ValueError for steps beyond its limits. What can no longer be represented starts anew, as an event.
        """
        context = self._contexts[key]
        outcome = ObserveOutcome()
        if not observations:
            return outcome
        if isinstance(worker, str):
            spans = [(worker, observations)]
        else:
            pairs = groupby(zip(worker, observations, strict=True), key=lambda pair: pair[0])
            spans = [(name, [step for _, step in members]) for name, members in pairs]
        touched: dict[int, Group] = {}
        for group, members in _by_group(context, spans):
            touched[id(group)] = group
            with np.errstate(all="ignore"):
                outcome.drift_events += self._learn(context, group, _Reports(context, members))
        for worker_id, steps in spans:
            _learn_resuming(context, steps, worker_id)
        outcome.drift_events += self._compare(context, len(observations))
        context.reports_since_drift += len(observations)
        if outcome.drift_events:
            context.last_drift, context.reports_since_drift = outcome.drift_events[-1], 0
        for group in context.groups.values():
            if id(group) in touched or group.seen_acceptance != group.acceptance.version:
                outcome.decisions += context.redecide(group)
        return outcome

    def _learn(self, context: Context, group: Group, reports: _Reports) -> list[DriftEvent]:
        """Update a group's models with reports of its workers; returns what drifted."""
        events, times, acceptance = [], group.times, group.acceptance
        peers = [(context.workers.peer(worker), place) for worker, place in reports.spans]
        weight = np.concatenate([np.full(_size(place), context.workers.weight(peer)) for peer, place in peers])
        self._record_tokens(context, acceptance, reports, peers)
        found = acceptance.learn(
            reports.passed,
            reports.reached,
            reports.kinds,
            reports.bands[reports.report],
            weight[reports.report],
            [reports.senders[at] for at in reports.report.tolist()],
        )
        if found:
            events.append(_event(context, "acceptance", found, "95% of the acceptance counts were forgotten"))
        _learn_mix(context, reports)
        teaches = reports.teaches_latency
        if teaches.any():
            offset = np.concatenate(
                [np.full(_size(place), 0.0 if peer is None else peer.offset) for peer, place in peers]
            )
            found = times.update(
                *(values[teaches] for values in (reports.batch, reports.length, reports.context, reports.seconds)),
                *(values[teaches] for values in (offset, weight)),
                list(compress(reports.senders, teaches.tolist())),
            )
            if found:
                events.append(_event(context, "latency", found, "the surface of step times may move again"))
            if len(context.workers.peers) > 1:
                self._record_times(context, times, reports, peers)
        group.choice.earn(times.bucket_of[reports.batch], acceptance.rising)
        context.recent = list(dict.fromkeys(times.bucket_of[reports.batch].tolist()))
        if not (times.sound and acceptance.sound):
            events.append(self._reset(context, group))
        return events

    def _record_tokens(
        self, context: Context, acceptance: Acceptance, reports: _Reports, peers: list[tuple[Peer | None, slice]]
    ) -> None:
        accepted, expected, variance = acceptance.judge(
            reports.passed, reports.reached, reports.kinds, reports.bands[reports.report]
        )
        for peer, place in peers:
            if peer is not None:
                mine = (reports.report >= place.start) & (reports.report < place.stop)
                sums = (float(values[mine].sum()) for values in (accepted, expected, variance))
                context.workers.record_tokens(peer, *sums, num_reports=_size(place))

    def _record_times(
        self, context: Context, times: StepTimes, reports: _Reports, peers: list[tuple[Peer | None, slice]]
    ) -> None:
        """Keep for comparison what was just learned: clipped, so that pauses do not make a suspect."""
        use = np.flatnonzero(reports.teaches_latency)
        if len(times.surprise) != len(use):
            return  # nothing was known yet
        cell = (times.bucket_of[reports.batch] * times.num_lengths + reports.length)[use]
        log_s = times.log_seconds[cell] + times.surprise
        for (peer, place), (worker, _) in zip(peers, reports.spans, strict=True):
            mine = slice(*np.searchsorted(use, (place.start, place.stop)).tolist())
            if peer is not None and mine.stop > mine.start:
                surprise = times.surprise[mine] + peer.offset
                without_speed = log_s[mine] + peer.offset - times.speeds[worker].mean
                context.workers.record_times(peer, cell[mine], without_speed, surprise)

    def _compare(self, context: Context, num_reports: int) -> list[DriftEvent]:
        """Compare workers when it is time; returns who was found unlike the others."""
        workers = context.workers
        if not workers.due(num_reports):
            return []
        events = []
        for model, times in enumerate(list(context.times)):
            alone = workers.sharing(TIMES, model)
            if len(alone) == 1 and len(context.times) > 1:
                self._rejoin(context, alone[0][0])
            while (worker := workers.unlike_in_time(model, times.noise)) is not None:
                events.append(self._set_times_apart(context, worker))
        for model, acceptance in enumerate(list(context.acceptances)):
            worker = workers.unlike_in_acceptance(model, float(acceptance.dispersion.max()))
            if worker is not None:
                events.append(self._set_acceptance_apart(context, worker))
        return events

    def _rejoin(self, context: Context, worker: str) -> None:
        """A worker with step times of its own that clearly agrees with others shares theirs, unless it was unlike before."""
        peer, noise = context.workers.peers[worker], context.group_of(worker).times.noise
        if peer.times_apart > 1:
            return
        for model in range(len(context.times)):
            if model != peer.models[TIMES] and context.workers.fits(worker, model, noise):
                like = context.group_of(worker)
                peer.models[TIMES] = model
                peer.level = peer.offset = peer.over(context.times[model].log_seconds)
                context.group((model, peer.models[ACCEPTANCE]), like)
                return

    def _set_times_apart(self, context: Context, worker: str) -> DriftEvent:
        """A worker whose times are unlike: it shares those of workers that it fits, or gets its own."""
        workers, peer, like = context.workers, context.workers.peers[worker], context.group_of(worker)
        old = peer.models[TIMES]
        fitting = (at for at in range(len(context.times)) if at != old and workers.fits(worker, at, like.times.noise))
        new = next(fitting, len(context.times))
        if new == len(context.times):
            context.times.append(StepTimes(context.buckets, context.limits.max_speculation_length))
            context.times[new].seed_from(like.times, UNLIKE_SD)
        peer.models[TIMES] = new
        peer.times_apart += 1
        for model in (old, new):
            sharing = workers.sharing(TIMES, model)
            for _, each in sharing:
                each.offset = 0.0
            context.times[model].rebuild(*workers.evidence(model, MOST_EVIDENCE))
            for _, each in sharing:
                each.level = each.over(context.times[model].log_seconds)
        context.group((new, peer.models[ACCEPTANCE]), like)
        return _apart(context, worker, "step times")

    def _set_acceptance_apart(self, context: Context, worker: str) -> DriftEvent:
        """A worker whose accepted tokens are unlike gets its own acceptance; the others' forgets what it had learned from it."""
        peer, like = context.workers.peers[worker], context.group_of(worker)
        classes, bands, positions = like.acceptance.shape
        peer.models[ACCEPTANCE] = len(context.acceptances)
        context.acceptances.append(Acceptance(positions, bands, classes))
        like.acceptance.forget_all()
        for each in context.workers.peers.values():
            each.tokens = [0.0, 0.0, 0.0]
        context.group((peer.models[TIMES], peer.models[ACCEPTANCE]), like)
        return _apart(context, worker, "accepted tokens")

    def _reset(self, context: Context, group: Group) -> DriftEvent:
        """A group whose numbers have left the representable starts anew, alone."""
        longest = context.limits.max_speculation_length
        group.choice = LengthChoice(len(context.buckets), longest)
        if not group.times.sound:
            group.times.restore(StepTimes(context.buckets, longest).export_state())
        if not group.acceptance.sound:
            classes, bands, positions = group.acceptance.shape
            group.acceptance.restore(Acceptance(positions, bands, classes).export_state())
        return DriftEvent(context.key, "reset", 0.0, "numbers left the representable: this context starts anew")

    def table(self, key: ContextKey, worker: str = "") -> Table:
        """The best length known for every bucket for a worker. No exploration in it."""
        context = self._contexts[key]
        group = context.group_of(worker)
        known = group.times.known
        choices = []
        for bucket, length in zip(context.buckets, group.lengths, strict=True):
            ms = 1e3 / float(group.choice.goodput[bucket.index, length]) if known else None
            choices.append(Choice(bucket, length, ms))
        return Table(group.version, tuple(choices))

    def mix(self, key: ContextKey, worker: str = "") -> Mix | None:
        """The numbers by which a worker finds the length for the classes of its present rows; None while nothing is known."""
        context = self._contexts[key]
        group = context.group_of(worker)
        if not group.times.known:
            return None
        tokens = group.acceptance.tokens[:, context.bands, : context.limits.max_speculation_length + 1]
        counted = np.exp(np.log(group.choice.seconds) + group.choice.doubt)
        return Mix(tuple(bucket.batch_max for bucket in context.buckets), counted, tokens)

    def length_for(self, key: ContextKey, batch_size: int, worker: str = "") -> int:
        """The table's length for a batch size, without building the table. Sizes beyond the limit use the last bucket."""
        context = self._contexts[key]
        return context.group_of(worker).lengths[self.bucket_index(key, batch_size)]

    def bucket_index(self, key: ContextKey, batch_size: int) -> int:
        """Which bucket a batch size belongs to. Sizes beyond the limit belong to the last."""
        context = self._contexts[key]
        return int(context.main.times.bucket_of[min(batch_size, context.limits.max_batch_size)])

    def take_probe(
        self, key: ContextKey, batch_size: int | None = None, max_length: int | None = None, worker: str = ""
    ) -> Probe | None:
        """Hand out at most one exploratory step, charged to its bucket at once; mostly None.

        batch_size None: any bucket of the newest reports. max_length: of the worker that is to do it, None for the
        context's. A probe is one step of one worker and is never repeated.
        """
        context = self._contexts[key]
        group = context.group_of(worker)
        longest = context.limits.max_speculation_length
        longest = longest if max_length is None else min(longest, max_length)
        for bucket in context.recent if batch_size is None else [self.bucket_index(key, batch_size)]:
            length = group.choice.probe(bucket, group.times, group.acceptance.rising, context.resume_s, longest)
            if length is not None:
                context.next_probe_id += 1
                return Probe(context.next_probe_id - 1, context.buckets[bucket], length)
        return None

    def probe_goes_on(self, key: ContextKey, batch_size: int, worker: str = "") -> bool:
        """Whether the last probe of this batch size is only complete with another one right after it."""
        group = self._contexts[key].group_of(worker)
        return bool(group.choice.to_follow[self.bucket_index(key, batch_size)])

    def last_decision(self, key: ContextKey, bucket: int, worker: str = "") -> Decision | None:
        """The newest change of a bucket's choice since the start of this process."""
        return self._contexts[key].group_of(worker).last_decision.get(bucket)

    def survival(self, key: ContextKey, bucket: int | None = None, kind: int = 0) -> list[float]:
        """P(draft tokens 0..i all accepted) by position; of everybody, or of a class of requests in a bucket's band."""
        context = self._contexts[key]
        model = context.main.acceptance
        values = model.shared if bucket is None else model.acceptance[kind, context.bands[bucket]]
        return [float(value) for value in values.cumprod()[: context.limits.max_speculation_length]]

    def learned_rows(self, key: ContextKey, worker: str = "") -> list[LearnedRow]:
        """Every bucket and length with what is believed, what was seen, and on how much evidence; empty while unknown."""
        context = self._contexts[key]
        group = context.group_of(worker)
        times = group.times
        if not times.known:
            return []
        tokens, low, high = context.tokens(group), *times.interval()
        unsure = np.stack([group.acceptance.log_tokens_variance(0, band) for band in range(len(context.mix))])
        rows = []
        for bucket, chosen in zip(context.buckets, group.lengths, strict=True):
            for length in range(times.num_lengths):
                cell = bucket.index * times.num_lengths + length
                expected = float(tokens[bucket.index, length])
                spread = math.exp(1.96 * math.sqrt(float(unsure[context.bands[bucket.index], length])))
                seconds, seen = float(group.choice.seconds[bucket.index, length]), int(times.num_seen[cell])
                estimate = LengthEstimate(
                    *(length, expected, seconds, 1e3 * seconds / expected),
                    *(1e3 * float(low[cell]) / expected / spread, 1e3 * float(high[cell]) / expected * spread),
                )
                source = times.source(cell)
                observed = float(times.seen_s[cell]) if seen else None
                rows.append(LearnedRow(bucket, estimate, seen, source, length == chosen, observed))
        return rows

    def export_state(self, key: ContextKey) -> dict[str, Any]:
        """Everything that a context needs to go on exactly, as JSON-able values; see export_pair_state for the rest."""
        context = self._contexts[key]
        drift = context.last_drift
        return {
            "format": 2,
            "buckets": [bucket.batch_max for bucket in context.buckets],
            "times": [times.export_state() for times in context.times],
            "acceptances": [model.export_state() for model in context.acceptances[1:]],
            "groups": [
                [*models, group.choice.export_state(), group.version, list(group.lengths)]
                for models, group in context.groups.items()
            ],
            "workers": context.workers.export_state(),
            "since_compared": context.workers.since_compared,
            "mix": context.mix.tolist(),
            "last_length": dict(context.last_length),
            "resume": [context.resume_s, context.num_resumes],
            "next_probe_id": context.next_probe_id,
            "recent": context.recent,
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

        ValueError if a state is not one of this format: such a context starts anew, from the reports that are kept.
        """
        shared = self._shared(key.pair, limits)
        context = self._new_context(key, limits)
        self._contexts[key] = context
        try:
            if pair_state is not None:
                shared.restore(pair_state)
                self._shared(key.pair, limits)
            if state is not None and state["buckets"] == [bucket.batch_max for bucket in context.buckets]:
                self._restore(context, state)
            else:
                context.redecide(context.main)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            self._contexts[key] = self._new_context(key, limits)
            self._contexts[key].redecide(self._contexts[key].main)
            raise ValueError(
                f"state of {key.target} with {key.draft} on {key.device} is not usable: {error}"
            ) from error

    def _restore(self, context: Context, state: dict[str, Any]) -> None:
        classes, bands, positions = context.acceptances[0].shape
        context.times = [StepTimes(context.buckets, context.limits.max_speculation_length) for _ in state["times"]]
        context.acceptances[1:] = [Acceptance(positions, bands, classes) for _ in state["acceptances"]]
        for times, values in zip(context.times, state["times"], strict=True):
            times.restore(values)
        for acceptance, values in zip(context.acceptances[1:], state["acceptances"], strict=True):
            acceptance.restore(values)
        context.mix[:] = np.array(state["mix"])
        context.resume_s, context.num_resumes = float(state["resume"][0]), int(state["resume"][1])
        context.groups.clear()
        for at_times, at_acceptance, choice, version, lengths in state["groups"]:
            group = context.group((int(at_times), int(at_acceptance)))
            group.choice.restore(choice)
            if group.choice.decided:
                group.choice.assess(context.tokens(group), group.times)
            group.version, group.lengths = int(version), [int(length) for length in lengths]
            group.seen_acceptance = group.acceptance.version
        context.main = context.group((0, 0))
        context.workers.restore(state["workers"])
        context.workers.since_compared = int(state["since_compared"])
        context.last_length = {worker: int(length) for worker, length in state["last_length"].items()}
        context.next_probe_id, context.recent = int(state["next_probe_id"]), [int(at) for at in state["recent"]]
        context.reports_since_drift = int(state["reports_since_drift"])
        drift = state["last_drift"]
        context.last_drift = None if drift is None else DriftEvent(context.key, *drift)


class _Reports:
    """Reports of one group's workers as arrays.

    Per report [n]: batch, length, seconds, context, teaches_latency, bands. Per part [p], the rows of one class in one
    report: report (its place), kinds, passed and reached [p, positions]. spans: each worker's place among the reports.
    """

    def __init__(self, context: Context, members: Sequence[tuple[str, Sequence[StepObservation]]]) -> None:
        steps = [step for _, mine in members for step in mine]
        ends = np.cumsum([0, *(len(mine) for _, mine in members)]).tolist()
        self.spans = [
            (worker, slice(start, end)) for (worker, _), start, end in zip(members, ends[:-1], ends[1:], strict=True)
        ]
        self.senders = [worker for worker, mine in members for _ in mine]
        batch, length, seconds, histograms, held, times, accepts, classes = zip(*steps, strict=True)
        self.batch, self.length = np.array(batch), np.array(length)
        if self.batch.max() > context.limits.max_batch_size:
            raise ValueError(
                f"batch_size {self.batch.max()} is beyond the context's limit of {context.limits.max_batch_size}"
            )
        if self.length.max() > context.limits.max_speculation_length:
            raise ValueError(
                f"speculation_length {self.length.max()} is beyond the context's limit of "
                f"{context.limits.max_speculation_length}"
            )
        self.seconds, self.context = np.array(seconds), np.array(held)
        self.teaches_latency = np.array(times)
        self.bands = context.band_of_size[self.batch]
        if any(classes):
            parts = [
                (place, kind, histogram)
                for place, (whole, split) in enumerate(zip(histograms, classes, strict=True))
                for kind, histogram in (split or ((0, whole),))
            ]
            where, kinds, histograms = zip(*parts, strict=True)
            self.report, self.kinds = np.array(where), np.array(kinds)
        else:
            self.report, self.kinds = np.arange(len(steps)), np.zeros(len(steps), dtype=np.int64)
        self._count_runs(histograms, np.array(accepts)[self.report], context.main.acceptance.shape[2])

    def _count_runs(self, histograms: Sequence[tuple[int, ...]], teaches: np.ndarray, positions: int) -> None:
        length = self.length[self.report]
        width = length + 1
        last = width.cumsum()
        values = np.fromiter(chain.from_iterable(histograms), float, int(last[-1]))
        # Where each histogram goes in a table of equal rows: its own row, from the first column on.
        place = np.arange(len(values)) + np.repeat(np.arange(len(length)) * (positions + 2) - (last - width), width)
        table = np.zeros((len(length), positions + 2))
        table.reshape(-1)[place] = values
        table[~teaches] = 0.0
        # at_least[:, i]: rows with i or more accepted. Position i is judged in rows with i - 1 or more, up to the length.
        at_least = table[:, ::-1].cumsum(axis=1)[:, ::-1]
        inside = np.arange(positions) < length[:, None]
        self.passed, self.reached = at_least[:, 1:-1] * inside, at_least[:, :-2] * inside
        self.rows_of_part = at_least[:, 0]


def _by_group(
    context: Context, spans: Sequence[tuple[str, Sequence[StepObservation]]]
) -> list[tuple[Group, list[tuple[str, Sequence[StepObservation]]]]]:
    """Spans by the group of their workers."""
    found: dict[int, tuple[Group, list[tuple[str, Sequence[StepObservation]]]]] = {}
    for worker, steps in spans:
        group = context.group_of(worker)
        found.setdefault(id(group), (group, []))[1].append((worker, steps))
    return list(found.values())


def _learn_mix(context: Context, reports: _Reports) -> None:
    """Follow which classes of requests are usual at each load."""
    if not reports.kinds.any() and context.mix[0, 0] == 1.0 and (context.mix[:, 0] == 1.0).all():
        return
    bands = reports.bands[reports.report]
    rows = np.zeros(context.mix.shape)
    np.add.at(rows, (bands, reports.kinds), reports.rows_of_part / reports.batch[reports.report])
    seen = rows.sum(axis=1, keepdims=True)
    share = 1.0 - np.exp(-seen / MIX_REPORTS)
    context.mix += share * (rows / np.maximum(seen, 1e-9) - context.mix)


def _learn_resuming(context: Context, steps: Sequence[StepObservation], worker: str) -> None:
    """Track what the first step with draft tokens after length 0 takes longer: the draft catches up in it.

    Workers flag such a step, so that it teaches no latency. Other flags may fall on it, hence the bounds.
    """
    group = context.group_of(worker)
    previous = context.last_length.pop(worker, -1)
    for step in steps:
        if previous == 0 < step.speculation_length and not step.teaches_latency and group.choice.decided:
            bucket = int(group.times.bucket_of[step.batch_size])
            usual = float(group.choice.seconds[bucket, step.speculation_length])
            extra = min(max(step.latency_s - usual, 0.0), LARGEST_RESUME_STEPS * usual)
            context.num_resumes += 1
            context.resume_s += (extra - context.resume_s) / min(context.num_resumes, RESUMES_REMEMBERED)
        previous = step.speculation_length
    context.last_length[worker] = previous
    if len(context.last_length) > 128:
        del context.last_length[next(iter(context.last_length))]


def _event(context: Context, factor: str, statistic: float, consequence: str) -> DriftEvent:
    direction = "rose" if statistic > 0 else "fell"
    what = "accepted tokens" if factor == "acceptance" else "step times"
    return DriftEvent(context.key, factor, statistic, f"{what} {direction} against expectation; {consequence}")


def _apart(context: Context, worker: str, what: str) -> DriftEvent:
    detail = f"{what} of worker {worker} are unlike the others': in this it is learned from for itself"
    return DriftEvent(context.key, "worker", 1.0, detail)


def _size(place: slice) -> int:
    return int(place.stop - place.start)
