"""A step that failed and was run again in parts is reported with the time of the part that decoded."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from speclen.worker.backends.passes import PassPart
from tests.support.engines import Collected, finish, make_engine, request

FAILED_S = 0.5


def test_the_time_of_a_failed_try_is_not_reported() -> None:
    collected = Collected()
    engine = make_engine(chooser=2)
    engine.submit(request("running", [1, 2, 3], max_tokens=30, ignore_eos=True), collected)
    for _ in range(3):
        engine.step()
    honest, failed = engine.target.forward, []

    def failing(parts: Sequence[PassPart]) -> list[torch.Tensor]:
        if len(parts) > 1 and not failed:
            failed.append(len(parts))
            time.sleep(FAILED_S)
            raise MemoryError
        return honest(parts)

    engine.target.forward = failing  # type: ignore[method-assign]
    engine.submit(request("new", [3, 2, 1], max_tokens=3, ignore_eos=True), collected)
    result = engine.step()
    assert failed == [2]
    assert result is not None
    assert 0.0 < result.latency_s < FAILED_S
    finish(engine)
    assert len(collected.ids("running")) == 30
