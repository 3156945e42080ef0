"""The requests in the batch at each step: gamma arrivals with bursts, requests of random length, a cap on the batch.

The course of the batch size does not depend on the policy under test (an oracle serves the queue), so that all policies
face the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from speclen.bench.simulation.scenarios import Scenario, hard_share_at
from speclen.bench.simulation.world import NUM_CLASSES, FloatArray, Requests

MEAN_PROMPT = 64.0


@dataclass(frozen=True)
class Traffic:
    """By step: sequences of each class [steps, classes], mean tokens held by each [steps], True if one has just come."""

    rows: np.ndarray
    context: FloatArray
    joined: np.ndarray

    @property
    def batch(self) -> np.ndarray:
        """Batch size by step."""
        sizes: np.ndarray = self.rows.sum(axis=1)
        return sizes


def traffic(scenario: Scenario, requests: Requests, num_steps: int, rng: np.random.Generator) -> Traffic:
    """Serve a queue for num_steps steps; a row gets about 3 tokens a step."""
    if scenario.steady_batch:
        return _steady(scenario, requests, num_steps, rng)
    rows = np.zeros((num_steps, NUM_CLASSES), dtype=np.int64)
    context = np.zeros(num_steps)
    joined = np.zeros(num_steps, dtype=bool)
    mean_new = scenario.mean_new_tokens
    mean_tokens = requests.tokens(requests.hard_share)[min(3, requests.acceptance.shape[1])]
    class_pace = np.array([requests.tokens(0.0)[3], requests.tokens(1.0)[3]])
    left: list[float] = []
    held: list[float] = []
    hard: list[int] = []
    clock, next_arrival, rate, shape = 0.0, 0.0, 1.0, 1.0
    for step in range(num_steps):
        if step % scenario.phase_steps == 0:
            load = rng.choice(scenario.loads) * scenario.max_batch
            rate = max(load, 0.5) * mean_tokens / mean_new  # arrivals per step
            shape = 1.0 / rng.choice([0.5, 1.0, 2.0, 4.0]) ** 2
            next_arrival = min(next_arrival, clock + 5.0 / rate)
        clock += 1.0
        while (next_arrival <= clock and len(left) < scenario.max_batch) or not left:
            next_arrival = max(next_arrival, clock - 50.0) + rng.gamma(shape, 1.0 / (shape * rate))
            share = requests.hard_share
            if scenario.hard_with_load:
                share = hard_share_at(len(left) / scenario.max_batch, requests)
            joined[step] = True
            hard.append(int(rng.random() < share))
            left.append(1.0 + rng.exponential(mean_new))
            held.append(MEAN_PROMPT * rng.uniform(0.3, 1.7))
        rows[step] = (len(hard) - sum(hard), sum(hard))
        context[step] = sum(held) / len(held)
        pace = class_pace[hard]
        left = [value - tokens for value, tokens in zip(left, pace.tolist(), strict=True)]
        held = [value + tokens for value, tokens in zip(held, pace.tolist(), strict=True)]
        if min(left) <= 0.0:
            kept = [index for index, value in enumerate(left) if value > 0.0]
            left, held, hard = [left[i] for i in kept], [held[i] for i in kept], [hard[i] for i in kept]
    return Traffic(rows, context, joined)


def _steady(scenario: Scenario, requests: Requests, num_steps: int, rng: np.random.Generator) -> Traffic:
    """A batch of steady_batch rows, one more or less at times; a row is replaced after about 30 steps."""
    wobble = np.repeat(rng.choice([-1, 0, 0, 0, 1], size=num_steps // 25 + 1), 25)[:num_steps]
    batch = scenario.steady_batch + wobble
    hard = np.zeros(num_steps, dtype=np.int64)
    present = rng.binomial(scenario.steady_batch, requests.hard_share)
    for step in range(num_steps):
        leave = rng.binomial(batch[step], 1.0 / 30.0)
        present = min(present, int(batch[step]))
        present += rng.binomial(leave, requests.hard_share) - rng.hypergeometric(present, batch[step] - present, leave)
        hard[step] = present
    rows, context = np.stack([batch - hard, hard], axis=1), np.full(num_steps, MEAN_PROMPT * 2)
    return Traffic(rows, context, np.zeros(num_steps, dtype=bool))
