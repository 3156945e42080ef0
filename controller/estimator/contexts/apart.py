"""Setting workers apart that are unlike the others of their context: each is learned from for itself."""

from __future__ import annotations

from speclen.controller.estimator.contexts.context import Context
from speclen.controller.estimator.contexts.workers import ACCEPTANCE, TIMES
from speclen.controller.estimator.core import DriftEvent
from speclen.controller.estimator.times.priors import begin_like, rebuild
from speclen.controller.estimator.times.step_time import MOST_EVIDENCE


def compare(context: Context, num_reports: int) -> list[DriftEvent]:
    """Compare workers when it is time; returns who was found unlike the others."""
    workers, events = context.workers, []
    if not workers.due(num_reports):
        return []
    for model in range(len(context.times)):
        while (worker := workers.unlike_in_time(model, context.times[model].noise)) is not None:
            events.append(_set_times_apart(context, worker))
    for model in range(len(context.acceptances)):
        if (worker := workers.unlike_in_acceptance(model)) is not None:
            events.append(_set_acceptance_apart(context, worker))
    return events


def _set_times_apart(context: Context, worker: str) -> DriftEvent:
    """A worker whose times are unlike gets its own."""
    workers, like = context.workers, context.group_of(worker)
    peer = workers.peers[worker]
    old, new = peer.models[TIMES], workers.unused(TIMES, len(context.times))
    context.times[new : new + 1] = [context.new_times()]
    context.drop_groups(TIMES, new)
    begin_like(context.times[new], like.times)
    peer.models[TIMES] = new
    for model in (old, new):
        sharing = [each for _, each in workers.sharing(TIMES, model)]
        for each in sharing:
            each.offset = 0.0
        rebuild(context.times[model], *workers.evidence(model, MOST_EVIDENCE))
        for each in sharing:
            each.level = each.over(context.times[model].log_seconds)
    context.group((new, peer.models[ACCEPTANCE]), like)
    return _apart(context, worker, "step times")


def _set_acceptance_apart(context: Context, worker: str) -> DriftEvent:
    """A worker whose accepted tokens are unlike gets its own; the others' forget what was learned from it."""
    peer, like = context.workers.peers[worker], context.group_of(worker)
    new = peer.models[ACCEPTANCE] = context.workers.unused(ACCEPTANCE, len(context.acceptances))
    context.acceptances[new : new + 1] = [context.new_acceptance()]
    context.drop_groups(ACCEPTANCE, new)
    like.acceptance.forget_all()
    for each in (*context.workers.peers.values(), *context.workers.elsewhere()):
        each.tokens[:] = each.reviewed[:] = 0.0
    context.group((peer.models[TIMES], peer.models[ACCEPTANCE]), like)
    return _apart(context, worker, "accepted tokens")


def _apart(context: Context, worker: str, what: str) -> DriftEvent:
    detail = f"{what} of worker {worker} are unlike the others': in this it is learned from for itself"
    return DriftEvent(context.key, "worker", 1.0, detail)
