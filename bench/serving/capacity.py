"""Capacity of the machine: tokens per second that reach clients with every slot busy, at the best of some fixed lengths.

Unlike a profile, which times steps inside the engine, prompts come and go and gRPC is in between. Loads of tracks are shares
of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from speclen.bench.serving.load import RequestOutcome
from speclen.bench.serving.recipes import recipe_of
from speclen.bench.serving.tracks import Block, draw_requests

LENGTHS = range(5)  # the one that serves a full worker fastest is short
REQUESTS_PER_SLOT = 4
OF_ITS_OWN = 1_000_000  # a number that no round comes to


def busy_block(track: str, slots: int, seed: int) -> Block:
    """Requests of the track for every slot, all there from the start."""
    times = np.zeros(REQUESTS_PER_SLOT * slots)
    arrivals = draw_requests(np.random.default_rng([seed, OF_ITS_OWN]), times, recipe_of(track).mix)
    return Block(track, OF_ITS_OWN, 0.0, tuple(arrivals), slots)


def busy_rate(outcomes: Sequence[RequestOutcome]) -> float:
    """Tokens per second until the last request was sent, when every slot was busy.

    Tokens of an answer that ran on count as if they had come evenly. Raises ValueError naming why a request failed.
    """
    if error := next((one.error for one in outcomes if one.error), None):
        raise ValueError(f"measuring the capacity failed: {error}")
    until = max(one.sent_s for one in outcomes)
    return sum(one.num_tokens * min(1.0, (until - one.sent_s) / one.latency_s) for one in outcomes) / until
