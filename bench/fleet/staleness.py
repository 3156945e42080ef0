"""How old a decision is: from the end of a step until a worker has a table in which the step was taken into account.

A controller's core is simulated with the costs measured: messages come window after window, each worker at a time of its
own, and are served in order; a few times a second all that has come is learned from, in calls between which messages are
served for as long. A table that is much better is sent to all workers at once, one after the other, and the core does
nothing else then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.service.learning_service import LEARN_THINNED_S, URGENT_PAUSE_S
from speclen.controller.service.streams import NEWS_INTERVAL_S

NETWORK_S = 0.001  # one way


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a controller's core, in seconds, answers and storage included: a window that is learned from, and one that is not;
    a round of learning; one call of it; telling a worker of a table. urgent_per_s: tables that all are told of at once.
    """

    message_s: float
    rest_s: float
    round_s: float
    call_s: float
    tell_s: float = 0.0
    urgent_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Of one controller: workers, how many of them are learned from, and seconds of the windows of these and of the rest."""

    num_workers: int
    num_fresh: int
    window_s: float
    rest_s: float = 1.0

    @property
    def messages_per_s(self) -> float:
        return self.num_fresh / self.window_s + (self.num_workers - self.num_fresh) / self.rest_s


@dataclass(frozen=True, slots=True)
class Staleness:
    """p50_s, p99_s: of a step that is learned from, and a worker, drawn at random. usual_s: mean of what follows
    a window's end.

    busy: share of the core; above 1 the queue grows for ever, and times are those of the simulated seconds alone.
    """

    p50_s: float
    p99_s: float
    usual_s: float
    busy: float


def staleness(load: Workload, costs: Costs, seconds: float = 20.0, seed: int = 0, samples: int = 50_000) -> Staleness:
    """Simulate one controller."""
    rng = np.random.default_rng(seed)
    fresh = _arrivals(rng, load.num_fresh, load.window_s, seconds)
    others = _arrivals(rng, load.num_workers - load.num_fresh, load.rest_s, seconds)
    order = np.argsort(np.concatenate([fresh, others]), kind="stable")
    arrivals = np.concatenate([fresh, others])[order]
    tell_all_s, window_s = load.num_workers * costs.tell_s, load.window_s
    costs_s = np.where(order < len(fresh), costs.message_s, costs.rest_s)
    served, rounds, busy_s = _serve(arrivals, costs_s, costs, tell_all_s)
    counted = (order < len(fresh)) & (arrivals > 0.2 * seconds) & (served < rounds[-1, 0])
    learned = rounds[np.searchsorted(rounds[:, 0], served[counted]), 1]
    pick = rng.integers(0, int(counted.sum()), samples)
    told = (
        learned[pick] + rng.uniform(0.0, NEWS_INTERVAL_S, samples) + rng.uniform(0.0, tell_all_s, samples) + NETWORK_S
    )
    waits = rng.uniform(size=samples) < min(costs.urgent_per_s * URGENT_PAUSE_S, 1.0)  # all were told a moment before
    told += waits * rng.uniform(0.0, URGENT_PAUSE_S, samples)
    after = told - (arrivals[counted][pick] - NETWORK_S)
    age = after + rng.uniform(0.0, window_s, samples)
    p50, p99 = np.percentile(age, (50.0, 99.0))
    return Staleness(float(p50), float(p99), float(after.mean()), busy_s / seconds)


def _arrivals(rng: np.random.Generator, num_workers: int, window_s: float, seconds: float) -> FloatArray:
    """When windows come, each worker's at a time of its own."""
    if not num_workers:
        return np.empty(0)
    phases = rng.uniform(0.0, window_s, num_workers)
    arrivals: FloatArray = (np.arange(int(seconds / window_s))[:, None] * window_s + phases).ravel() + NETWORK_S
    return arrivals


def _serve(
    arrivals: FloatArray, costs_s: FloatArray, costs: Costs, tell_all_s: float
) -> tuple[FloatArray, FloatArray, float]:
    """When each message was served, [messages]; when rounds of learning began and ended, [rounds, 2]; time spent.

    costs_s: of each message.
    """
    served, rounds, now, busy_s = np.empty_like(arrivals), [], 0.0, 0.0
    next_round, left_s, began, serve_until, num_told = LEARN_THINNED_S, 0.0, 0.0, 0.0, 0
    at, num = 0, len(arrivals)
    while at < num:
        if left_s > 0.0 and now >= serve_until:  # a call of the estimator is due
            call_s = min(costs.call_s, left_s)
            now, left_s, busy_s = now + call_s, left_s - call_s, busy_s + call_s
            serve_until = now + call_s
            if left_s <= 0.0:
                rounds.append((began, now))
                next_round = now + LEARN_THINNED_S
                if num_told < int(now * costs.urgent_per_s):
                    now, busy_s, num_told = now + tell_all_s, busy_s + tell_all_s, num_told + 1
        elif left_s <= 0.0 and now >= next_round:
            began, left_s, serve_until = now, costs.round_s, now
        elif arrivals[at] <= now:
            now, busy_s = now + costs_s[at], busy_s + costs_s[at]
            served[at] = now
            at += 1
        else:
            now = min(arrivals[at], serve_until if left_s > 0.0 else next_round)
    rounds.append((max(now, next_round), max(now, next_round) + 2.0 * costs.round_s))
    return served, np.array(rounds), busy_s
