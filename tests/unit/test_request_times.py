"""Times of requests with several sequences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from speclen.worker.observing.request_metrics import RequestMetrics
from speclen.worker.requests.request import FinishReason, SequenceOutput


def output(made_at: float, num_tokens: int, index: int, reason: FinishReason | None = None) -> SequenceOutput:
    ids = ("r", index, (7,), "")
    return SequenceOutput(
        *ids, finish_reason=reason, num_completion_tokens=num_tokens, admitted_at=10.5, made_at=made_at
    )


def test_the_time_of_a_token_is_that_of_one_sequence_however_many_there_are():
    """Three sequences at once were told to be three times as fast as one; one that comes in late is no slower."""
    worker: Any = SimpleNamespace(registry=CollectorRegistry())
    timeline = RequestMetrics(worker).timeline(4, arrived_at=10.0)
    for index in range(3):
        timeline.saw(output(11.0, 1, index))
        timeline.saw(output(13.0, 5, index, FinishReason.LENGTH))
    timeline.saw(output(20.0, 1, 3, FinishReason.STOP))
    name = "speclen_request_time_per_output_token_seconds"
    assert worker.registry.get_sample_value(f"{name}_sum") == 0.5
    assert worker.registry.get_sample_value(f"{name}_count") == 1
