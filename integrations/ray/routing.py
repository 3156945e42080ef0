"""Routing of requests to the worker with the fewest."""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

MOST_ASKED = 16  # workers whose load is looked at for one request; among more, a random choice of so many


class LeastLoaded(RequestRouter):
    """Serve's own router compares two workers at random; with a handful of slow, batched ones that is too few."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All at one rank: Serve then takes the one with the shortest queue that has room."""
        if len(candidate_replicas) > MOST_ASKED:
            candidate_replicas = random.sample(candidate_replicas, MOST_ASKED)
        return [candidate_replicas] if candidate_replicas else []
