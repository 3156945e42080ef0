"""What a group of reports in which rows copied teaches: matches and acceptance, drafts of the other rows, times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.core import StepObservation
from speclen.controller.estimator.plans.choice import PlanChoice
from speclen.controller.estimator.plans.copying import Copying, Lessons
from speclen.controller.estimator.plans.plan import Plan
from speclen.controller.estimator.plans.prediction import MOST_WALK_REPORTS
from speclen.controller.estimator.plans.times import CopiedSteps
from speclen.controller.estimator.times.steps import Spans, spans_of

MOST_WORKERS = 128  # whose last plan is remembered


def believable(copying: Copying, steps: Sequence[StepObservation], spans: Spans) -> Sequence[StepObservation]:
    """The steps; of workers that say they have read more than they put out, with so much less of it."""
    believed: list[StepObservation] | None = None
    for worker, span in spans:
        asked = sum(tokens for step in steps[span] for _, tokens, _ in step.read)
        # Twice, since steps do not tell of first tokens, which prompts lead to: as many again at most.
        earned = 2 * sum(step.num_tokens for step in steps[span])
        taken = copying.may_read.take(worker, earned, asked)
        if taken < asked:
            believed = believed or list(steps)
            believed[span] = [_read_less(step, taken / asked) for step in steps[span]]
    return steps if believed is None else believed


def _read_less(step: StepObservation, share: float) -> StepObservation:
    read = tuple((match, round(share * tokens), round(share * right)) for match, tokens, right in step.read)
    return step._replace(read=read)


def learn_reading(
    plans: PlanChoice, steps: Sequence[StepObservation], workers: Sequence[str], weight: FloatArray
) -> None:
    """Learn from output that was read. workers: that sent the steps; weight: of each, as in `Steps`."""
    plans.readers.update(workers)
    if plans.copying.read(steps, weight):
        plans.since_walked = MOST_WALK_REPORTS


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
        copied = [steps[at] for at in timed]
        plans.times.learn(_copied_steps(plans, spans, copied, weight[timed], offset[timed]))


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
    plans: PlanChoice, spans: Spans, steps: Sequence[StepObservation], weight: FloatArray, offset: FloatArray
) -> CopiedSteps:
    """Their features: the draft model's passes run over the rows that draft."""
    told = [step.copying for step in steps if step.copying is not None]
    batch = np.array([step.batch_size for step in steps])
    drafting = np.array([each.num_drafting_rows for each in told])
    passes = np.array([step.speculation_length for step in steps]) * (drafting > 0)
    copied = np.array([sum(run.num_proposed * run.num_rows for run in each.runs) for each in told])
    return CopiedSteps(
        spans=spans,
        plan=np.array([plans.place.get(each.plan, -1) for each in told]),
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


def plans_before(plans: PlanChoice, steps: Sequence[StepObservation], spans: Spans) -> list[Plan]:
    """The plan of the step that the same worker took before each; a length is one that does not copy."""
    before: list[Plan] = []
    for worker, span in spans:
        last = plans.last.pop(worker, Plan())
        for step in steps[span]:
            before.append(last)
            last = Plan(step.speculation_length) if step.copying is None else step.copying.plan
        plans.last[worker] = last
        if len(plans.last) > MOST_WORKERS:
            silent = next(iter(plans.last))
            del plans.last[silent]
            plans.readers.discard(silent)
    return before
