"""What a group of reports in which rows copied teaches: matches and acceptance, drafts of the other rows, times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from speclen.controller.estimator.acceptance import Parts
from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.core import StepObservation
from speclen.controller.estimator.plans.choice import PlanChoice
from speclen.controller.estimator.plans.copying import Lessons
from speclen.controller.estimator.plans.plan import NOTHING_PLAYED, Plan, Played
from speclen.controller.estimator.plans.prediction import WALK_REPORTS
from speclen.controller.estimator.plans.times import CopiedSteps
from speclen.controller.estimator.times.steps import Spans, spans_of

MOST_WORKERS = 128  # whose last plan is remembered
# Steps of a length after a plan that copies whose text is the harder for it, about.
HARDER_STEPS = 12
# Rows that copy, of a step before, of which there must be as many to tell what drafts do in their stead.
LEAST_SHARE = 0.05


def learn_reading(
    plans: PlanChoice, steps: Sequence[StepObservation], workers: Sequence[str], weight: FloatArray
) -> None:
    """Learn from output that was read. workers: that sent the steps; weight: of each, as in `Steps`."""
    plans.readers.update(workers)
    if plans.copying.read(steps, weight):
        plans.since_walked = WALK_REPORTS


def learn_copies(
    plans: PlanChoice,
    steps: Sequence[StepObservation],
    workers: Sequence[str],
    weight: FloatArray,
    offset: FloatArray,
    accepted: FloatArray,
    before: Sequence[Plan],
) -> None:
    """Learn from steps that copied. workers: that sent them; weight, offset: of each, as in `Steps`.

    accepted: everybody's drafts, by position.

    before: plan of the step that the worker took before each.
    """
    told = [at for at, step in enumerate(steps) if step.copying is not None and step.copying.teaches_acceptance]
    bounds = np.array([before[at].copy_min_match for at in told], dtype=int)
    drafts = np.array([0 if before[at].copy_min_match else before[at].draft_length for at in told], dtype=int)
    alone = np.append(1.0, 1.0 + accepted.cumprod().cumsum())[drafts]
    same = np.array(
        [step.copying is not None and step.copying.plan == plan for step, plan in zip(steps, before, strict=True)]
    )
    plans.since_walked += len(told)
    reads = np.array([workers[at] in plans.readers for at in told], dtype=bool)
    plans.copying.learn(Lessons([steps[at] for at in told], weight[told], bounds, same[told], drafts, alone, reads))
    _learn_drafts(plans, [steps[at] for at in told], weight[told], accepted)
    timed = [at for at, step in enumerate(steps) if step.copying is not None and step.copying.teaches_latency]
    if timed and plans.step_times.known:
        spans = spans_of([workers[at] for at in timed])
        plans.times.learn(_copied_steps(spans, [steps[at] for at in timed], weight[timed], offset[timed]))


def _learn_drafts(
    plans: PlanChoice, steps: Sequence[StepObservation], weight: FloatArray, accepted: FloatArray
) -> None:
    """Rows that drafted beside rows that copied. Where a request's own length is longer, these runs are not told apart."""
    size = plans.step_times.num_lengths
    sums, count = [[0.0] * size for _ in range(size)], 0
    for step, counts in zip(steps, weight.tolist(), strict=True):
        told, length = step.copying, step.speculation_length
        if told is None or told.plan.draft_after_copy or not 0 < length <= told.plan.draft_length:
            continue
        mine = sums[length]
        for run, rows in enumerate(step.accepted_histogram):
            mine[run] += counts * rows
        # Rows that drafted nothing are counted at 0.
        mine[0] -= counts * min(step.batch_size - told.num_drafting_rows, step.accepted_histogram[0])
        count += 1
    runs = np.array(sums)
    if count:
        plans.learn_drafts(runs, accepted, count)


def _copied_steps(
    spans: Spans, steps: Sequence[StepObservation], weight: FloatArray, offset: FloatArray
) -> CopiedSteps:
    """Their features: the draft model's passes run over the rows that draft."""
    told = [step.copying for step in steps if step.copying is not None]
    batch = np.array([step.batch_size for step in steps])
    drafting = np.array([each.num_drafting_rows for each in told])
    passes = np.array([step.speculation_length for step in steps]) * (drafting > 0)
    copied = np.array([sum(run.num_proposed * run.num_rows for run in each.runs) for each in told])
    return CopiedSteps(
        spans=spans,
        batch=batch,
        passes=passes,
        drafted=passes * drafting,
        verified=np.array([each.num_verified_tokens for each in told]),
        asked=batch + copied + passes * drafting,
        context=np.array([step.mean_context_length for step in steps]),
        seconds=np.array([step.latency_s for step in steps]),
        weight=weight,
        offset=offset,
    )


def in_the_long_run(
    plans: PlanChoice, parts: Parts, steps: Sequence[StepObservation], before: Sequence[Plan], acceptance: FloatArray
) -> Parts:
    """Rows as they would be if lengths that were tried for a step were played on and on.

    A step that copies ends where copies were wrong, so the next begins in harder text than steps of a length do: fewer of
    its rows stand behind a match. What drafts of the others do is known from plans, and so, from the sum of both, what
    those do that stand behind one. before: the plan of each step's worker before it; acceptance: by class, band, position.
    """
    after_copies = [
        step.copying is None
        and step.speculation_length > 0
        and plan in plans.place
        and plans.knows_without_match(step.speculation_length)
        for step, plan in zip(steps, before, strict=True)
    ]
    if not any(after_copies):
        return parts
    rows = parts.rows.copy()
    for at in np.flatnonzero(np.array(after_copies)[parts.report] & (rows[:, 0, 0] > 0.0)).tolist():
        report = int(parts.report[at])
        length, plan = steps[report].speculation_length, before[report]
        survival = acceptance[parts.kinds[at], parts.bands[at], :length].cumprod()
        shares = plans.share_of(plan), plans.copying.share_behind(plan.copy_min_match)
        if min(shares) > LEAST_SHARE and max(shares) < 1.0:
            alone = plans.without_match(survival)
            rows[at, :, :length] = _in_the_long_run(rows[at, :, :length], survival, alone, *shares)
    return parts._replace(rows=rows)


def _in_the_long_run(
    rows: FloatArray, survival: FloatArray, alone: FloatArray, share: float, text: float
) -> FloatArray:
    """Rows that reached and passed each position, [2, positions], of as many as they are worth.

    survival, alone: chance that a row, and that one without a match, passes each position. share: of the rows that stand
    behind a match; text: of the text that does.
    """
    # Steps behind a match are longer, so there are fewer of them than of text.
    steps = min(max(1.0 - (1.0 - text) * (1.0 + survival.sum()) / (1.0 + alone.sum()), 0.0), text)
    matched, others = steps / share, (1.0 - steps) / (1.0 - share)
    num_rows = rows[0, 0]
    passed = matched * rows[1] + (others - matched) * (1.0 - share) * num_rows * alone
    passed = np.minimum.accumulate(np.clip(passed, 0.0, num_rows))
    long_run: FloatArray = np.stack([np.append(num_rows, passed[:-1]), passed]) / max(matched, 1.0)
    return long_run


def plans_before(plans: PlanChoice, steps: Sequence[StepObservation], spans: Spans) -> list[Plan]:
    """The plan of the step that the same worker took before each; a length is one that does not copy.

    Of a length that goes on for some steps after a plan that copies: that plan.
    """
    before: list[Plan] = []
    for worker, span in spans:
        last, copied, since = plans.last.pop(worker, NOTHING_PLAYED)
        for step in steps[span]:
            plan = Plan(step.speculation_length) if step.copying is None else step.copying.plan
            if last.copy_min_match:
                copied, since = last, 0
            before.append(last if plan.copy_min_match or since >= HARDER_STEPS else copied)
            last, since = plan, since + 1
        plans.last[worker] = Played(last, copied, since)
        if len(plans.last) > MOST_WORKERS:
            silent = next(iter(plans.last))
            del plans.last[silent]
            plans.readers.discard(silent)
    return before
