"""What a group of reports teaches: acceptance, step times, plans, and who is unlike the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np

from speclen.controller.estimator.acceptance import Parts
from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.choice import LengthChoice
from speclen.controller.estimator.contexts.apart import compare
from speclen.controller.estimator.contexts.context import Context
from speclen.controller.estimator.contexts.group import Group
from speclen.controller.estimator.core import DriftEvent, StepObservation
from speclen.controller.estimator.plans.copying import Copying
from speclen.controller.estimator.plans.learning import believable, learn_copies, learn_reading, plans_before
from speclen.controller.estimator.plans.plan import Plan
from speclen.controller.estimator.plans.reviews import MOST_TOKENS, STEPS
from speclen.controller.estimator.reports import OTHERS, Reports, merged
from speclen.controller.estimator.state import forget
from speclen.controller.estimator.times.steps import Spans, Steps, spans_of


def learn(context: Context, observations: Sequence[StepObservation], senders: Sequence[str]) -> list[DriftEvent]:
    """Update the models of every worker that sent one of these steps; returns what drifted, and who is unlike others."""
    sent_by = spans_of(senders)
    if context.limits.max_copied_tokens:
        observations = believable(context.copying, observations, sent_by)
    steps, workers = _told_apart(context, observations, senders, sent_by)
    spans = sent_by if steps is observations else spans_of(workers)
    events: list[DriftEvent] = []
    context.workers.note(spans)
    context.prompts.keep(context.workers.heard.last)
    context.tell_surfaces()
    touched = list(dict.fromkeys(map(context.group_of, dict.fromkeys(workers))))
    for group in touched:
        mine = steps, workers, spans
        if len(touched) > 1:
            belongs = [context.group_of(sender) is group for sender in workers]
            of_group = list(compress(workers, belongs))
            mine = list(compress(steps, belongs)), of_group, spans_of(of_group)
        events += _learn_soundly(context, group, Reports(*mine, context.limits))
    for worker, span in sent_by:
        context.learn_resuming(observations[span], worker)
        context.prompts.learn(observations[span], worker, context.group_of(worker).usual_s)
    return events + compare(context, len(steps))


def _told_apart(
    context: Context, steps: Sequence[StepObservation], senders: Sequence[str], spans: Spans
) -> tuple[Sequence[StepObservation], Sequence[str]]:
    """Steps and who sent them; those of workers beyond the ones told apart are merged, and come last.

    Each is admitted before it is asked who is told apart: the last place is one worker's.
    """
    for worker, _ in spans:
        context.workers.peer(worker)
    if all(context.workers.tells_apart(worker) for worker, _ in spans):
        return steps, senders
    known = [context.workers.tells_apart(sender) for sender in senders]
    others = merged(step for step, told in zip(steps, known, strict=True) if not told)
    return [*compress(steps, known), *others], [*compress(senders, known), *[OTHERS] * len(others)]


def _learn_soundly(context: Context, group: Group, reports: Reports) -> list[DriftEvent]:
    """Learn; where that takes numbers out of what can be represented, the group starts anew, alone."""
    try:
        with np.errstate(all="ignore"):  # what comes of it is looked at
            events = _learn(context, group, reports)
            sound = group.plans is None or (group.plans.sound and context.copying.sound)
            if sound and group.times.sound and group.acceptance.sound:
                return events
            return [*events, _reset(context, group)]
    except (ArithmeticError, ValueError, IndexError):
        return [_reset(context, group)]


def _learn(context: Context, group: Group, reports: Reports) -> list[DriftEvent]:
    """Update a group's models with reports of its workers; returns what drifted."""
    parts = reports.parts(group.acceptance.shape[2], context.band_of_batch)
    before: list[Plan] = []
    if group.plans is not None:
        before = plans_before(group.plans, reports.steps, reports.spans)
    judged = group.acceptance.judge(parts)
    weight, offset = context.workers.say(reports.spans, parts, judged, reports.count)
    _learn_reviews(context, group, reports, weight)
    events = []
    if found := group.acceptance.learn(parts, judged, weight[parts.report]):
        events.append(_event(context, "acceptance", found, "95% of the acceptance counts were forgotten"))
    context.learn_mix(parts, _tokens_of(group, reports, parts))
    of_times = weight if len(context.workers.peers) > 1 else np.ones_like(weight)  # no other context shares those
    if found := _learn_times(context, group, reports, of_times, offset):
        events.append(_times_changed(context, group, found))
    if group.plans is not None:
        if readers := reports.readers:
            told_by = [reports.workers[at] for at in readers]
            learn_reading(group.plans, [reports.steps[at] for at in readers], told_by, weight[readers])
        if places := reports.copied:
            copied = [reports.steps[at] for at in places]
            senders = [reports.workers[at] for at in places]
            values = weight[places], offset[places], group.acceptance.shared, [before[at] for at in places]
            learn_copies(group.plans, copied, senders, *values)
            if found := group.times.settle_if_away():
                events.append(_times_changed(context, group, found))
    buckets = group.times.bucket_of[reports.batch]
    group.choice.earn(buckets, reports.count)
    context.recent = list(dict.fromkeys(buckets.tolist()))
    return events


def _tokens_of(group: Group, reports: Reports, parts: Parts) -> FloatArray:
    """What a row of each part's class puts out in a step of what was played there; 1 before an output was reviewed."""
    reviews, rates = group.acceptance.reviews, group.acceptance.reviewed
    if rates is None:
        return np.ones(len(parts.kinds))
    played = (Plan(step.speculation_length) if step.copying is None else step.copying.plan for step in reports.steps)
    places = np.fromiter(map(reviews.place_of, played), np.int64, len(reports.steps))
    tokens: FloatArray = 1.0 / rates[parts.kinds, places[parts.report], STEPS]
    return tokens


def _learn_reviews(context: Context, group: Group, reports: Reports, weight: FloatArray) -> None:
    """Count outputs that were reviewed: the first of each worker, and not more than there is time for.

    Only while most workers that share them send some: with nobody to be compared with, one could make them up.
    """
    reviews, counted, num_tokens = group.acceptance.reviews, [], 0
    for worker, span in reports.spans:
        told = ((at, review) for at in range(span.start, span.stop) for review in reports.steps[at].reviews)
        first = next(((at, review) for at, review in told if reviews.tells(review)), None)
        if first is not None and num_tokens <= MOST_TOKENS:
            at, output = first[0], reviews.count(first[1])
            num_tokens += len(first[1].matches)
            context.workers.note_review(worker, output.request_class, output.share_right)
            counted.append((output, float(weight[at])))
    if counted and context.workers.most_review([worker for worker, _ in reports.spans]):
        reviews.learn(counted)


def _learn_times(context: Context, group: Group, reports: Reports, weight: FloatArray, offset: FloatArray) -> float:
    """Learn from those steps that say something about time; returns the statistic of a change, or 0."""
    use = reports.teaches_latency
    if not use.any():
        return 0.0
    values = reports.batch, reports.length, reports.context, reports.seconds, weight, offset, reports.count
    steps = Steps(reports.spans, *values)
    if not use.all():
        spans = spans_of(list(compress(reports.workers, use.tolist())))
        steps = Steps(spans, *(each[use] for each in values))
    known = group.times.known and group.choice.decided
    found = group.times.update(steps)
    if known:
        cell, _, surprise = group.times.newest
        speeds, _ = group.times.watch.now(steps.spans)
        group.choice.refund(cell, surprise - speeds)
    if len(context.workers.peers) > 1:
        context.record(group, steps)
    return found


def _times_changed(context: Context, group: Group, found: float) -> DriftEvent:
    """The event of a change of step times, after which those of plans have to be seen anew, of all groups that have them."""
    for each in context.groups.values():
        if each.plans is not None and each.times is group.times:
            each.plans.times.forget()
    return _event(context, "latency", found, "the surface of step times may move again")


def _reset(context: Context, group: Group) -> DriftEvent:
    """Numbers have left the representable: this group starts anew, alone, and its acceptance if that is what it was."""
    forget(group.times, context.new_times())
    if not group.acceptance.sound:
        forget(group.acceptance, context.new_acceptance())
        context.by_class = np.zeros_like(context.by_class)
    if group.plans is not None:
        forget(context.copying, Copying())
        group.plans = context.new_plans(group.times, group.acceptance)
        context.tell_surfaces()
    forget(group.choice, LengthChoice(len(context.buckets), context.limits.max_speculation_length))
    return DriftEvent(context.key, "reset", 0.0, "numbers left the representable: what was learned starts anew")


def _event(context: Context, factor: str, statistic: float, consequence: str) -> DriftEvent:
    direction = "rose" if statistic > 0 else "fell"
    what = "accepted tokens" if factor == "acceptance" else "step times"
    return DriftEvent(context.key, factor, statistic, f"{what} {direction} against expectation; {consequence}")
