"""How old a decision is: from the end of a step until a worker has a table in which the step was taken into account.

A controller's core is simulated with the costs measured: messages come window after window, each worker at a time of its
own, and are served in order; a few times a second all that has come is learned from, in calls between which messages are
served for as long. A worker hears of a new table by its next answer, or by a message once it has been silent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from speclen.controller.estimator.arrays import FloatArray

# As in the controller's learning service and streams: pause between rounds of learning, silence before news is sent, how
# often it is looked whom to tell. Seconds.
LEARN_INTERVAL_S, BUSY_S, NEWS_INTERVAL_S = 0.2, 0.3, 0.1
NETWORK_S = 0.001  # one way


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a controller's core, in seconds: a message, answer and storage included; a round of learning; one call of it."""

    message_s: float
    round_s: float
    call_s: float


@dataclass(frozen=True, slots=True)
class Staleness:
    """p50_s, p99_s: of a step and a worker drawn at random. after_s: the 99th percentile of what follows a window's end.

    busy: share of the core; above 1 the queue grows for ever, and times are those of the simulated seconds alone.
    """

    p50_s: float
    p99_s: float
    after_s: float
    busy: float


def staleness(
    num_workers: int, window_s: float, costs: Costs, seconds: float = 20.0, seed: int = 0, samples: int = 50_000
) -> Staleness:
    """Simulate one controller of so many workers."""
    rng = np.random.default_rng(seed)
    phases = np.sort(rng.uniform(0.0, window_s, num_workers))
    arrivals = (np.arange(int(seconds / window_s))[:, None] * window_s + phases).ravel() + NETWORK_S
    served, rounds, busy_s = _serve(arrivals, costs)
    counted = (arrivals > 0.2 * seconds) & (served < rounds[-1, 0])
    learned = rounds[np.searchsorted(rounds[:, 0], served[counted]), 1]
    pick = rng.integers(0, int(counted.sum()), samples)
    decided = learned[pick]
    told = _told(decided, phases[rng.integers(0, num_workers, samples)], window_s) + NETWORK_S + costs.message_s
    after = told - (arrivals[counted][pick] - NETWORK_S)
    age = after + rng.uniform(0.0, window_s, samples)
    p50, p99 = np.percentile(age, (50.0, 99.0))
    return Staleness(float(p50), float(p99), float(np.percentile(after, 99.0)), busy_s / seconds)


def _serve(arrivals: FloatArray, costs: Costs) -> tuple[FloatArray, FloatArray, float]:
    """When each message was served, [messages]; when rounds of learning began and ended, [rounds, 2]; time spent."""
    served, rounds, now, busy_s = np.empty_like(arrivals), [], 0.0, 0.0
    next_round, left_s, began, serve_until = LEARN_INTERVAL_S, 0.0, 0.0, 0.0
    at, num = 0, len(arrivals)
    while at < num:
        if left_s > 0.0 and now >= serve_until:  # a call of the estimator is due
            call_s = min(costs.call_s, left_s)
            now, left_s, busy_s = now + call_s, left_s - call_s, busy_s + call_s
            serve_until = now + call_s
            if left_s <= 0.0:
                rounds.append((began, now))
                next_round = now + LEARN_INTERVAL_S
        elif left_s <= 0.0 and now >= next_round:
            began, left_s, serve_until = now, costs.round_s, now
        elif arrivals[at] <= now:
            now, busy_s = now + costs.message_s, busy_s + costs.message_s
            served[at] = now
            at += 1
        else:
            now = min(arrivals[at], serve_until if left_s > 0.0 else next_round)
    rounds.append((max(now, next_round), max(now, next_round) + 2.0 * costs.round_s))
    return served, np.array(rounds), busy_s


def _told(decided: FloatArray, phase: FloatArray, window_s: float) -> FloatArray:
    """When a worker that sends at phase, phase + window, ... hears of what was decided."""
    since = np.mod(decided - phase, window_s)
    by_answer = decided + window_s - since
    looked = np.ceil(np.maximum(decided, decided - since + BUSY_S) / NEWS_INTERVAL_S) * NEWS_INTERVAL_S
    told: FloatArray = np.minimum(by_answer, looked)
    return told
