"""A place is free as soon as the engine is done, whoever reads how slowly, and one request holds up nobody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from speclen.worker.observing.metrics import WorkerMetrics
from speclen.worker.observing.request_metrics import RequestMetrics
from speclen.worker.requests.request import FinishReason, GenerationRequest
from speclen.worker.requests.sequence import OnOutput, SequenceState, make_sequences
from speclen.worker.service.async_engine import AsyncEngine
from speclen.worker.service.fair_queue import FairQueue
from tests.support import engines


class FakeEngine:
    """Ends sequences when the test says so, in the order in which they came."""

    failure = None

    def __init__(self) -> None:
        self.inside: list[SequenceState] = []
        self.came: list[str] = []

    def check(self, request: GenerationRequest) -> None:
        pass

    def sequences(self, request: GenerationRequest, on_output: OnOutput) -> Iterator[SequenceState]:
        settings: dict[str, Any] = {"eos_token_ids": (), "max_context_length": 99, "draft_context_length": 0}
        return make_sequences(request, on_output, decode=lambda ids: "", **settings)

    def take(self, sequences: Sequence[SequenceState]) -> None:
        self.inside += sequences
        self.came += [one.request.request_id for one in sequences]

    def end(self, number: int = 1) -> None:
        """Let the first ones have their only token."""
        for _ in range(number):
            one = self.inside.pop(0)
            one.on_output(one.show(one.append([1])))

    def abort(self, request_id: str) -> bool:
        aborted = [one for one in self.inside if one.request.request_id == request_id]
        self.inside = [one for one in self.inside if one not in aborted]
        for one in aborted:
            one.on_output(one.abort())
        return bool(aborted)


class Admission:
    """The queue alone: prompts are there and grammars are not."""

    def __init__(self, width: int) -> None:
        self.fair_queue = FairQueue(width, 100)


class Worker:
    """An engine of as many places, and callers of it."""

    def __init__(self, width: int) -> None:
        self.engine, admission, metrics = FakeEngine(), Admission(width), object.__new__(WorkerMetrics)
        metrics.registry = CollectorRegistry()
        self.async_engine = AsyncEngine(self.engine, admission, RequestMetrics(metrics), 0.0, 9.0)  # type: ignore[arg-type]
        self.fair_queue = admission.fair_queue

    @contextlib.asynccontextmanager
    async def running(self, name: str, n: int = 1) -> AsyncIterator[Any]:
        """A request of a caller of its own, of n sequences of one token."""
        request = engines.request(name, (1, 2), max_tokens=1, n=n)
        async with (
            self.async_engine.open(name) as stream,
            self.async_engine.running([request], stream, name, 0.0) as outputs,
        ):
            yield outputs

    async def read(self, name: str, n: int = 1) -> list[FinishReason | None]:
        """Why each sequence of a request has ended."""
        async with self.running(name, n) as outputs:
            return [output.finish_reason async for group in outputs for output in group]


async def settled() -> None:
    for _ in range(9):
        await asyncio.sleep(0)


async def test_a_slow_reader_keeps_no_place_once_the_engine_is_done() -> None:
    worker = Worker(width=2)
    async with worker.running("slow", n=2) as unread:
        other = asyncio.create_task(worker.read("other"))
        await settled()
        assert worker.engine.came == ["slow"] * 2
        worker.engine.end(2)
        await settled()
        assert worker.engine.came[2:] == ["other"], "nobody has read anything"
        worker.engine.end()
        assert await other == [FinishReason.LENGTH]
        assert worker.fair_queue.expected_wait_s("a third") == 0.0
        assert [output.index async for group in unread for output in group] == [0, 1]


async def test_a_request_of_64_sequences_holds_up_nobody() -> None:
    """It took 64 places, so that others waited until nearly all of them had ended."""

    worker = Worker(width=3)
    many = asyncio.create_task(worker.read("many", n=64))
    await settled()
    others = [asyncio.create_task(worker.read(name)) for name in ("b", "c")]
    await settled()
    assert worker.engine.came == ["many"] * 3
    for _ in range(4):
        worker.engine.end()
        await settled()
    assert worker.engine.came == ["many"] * 4 + ["b", "c", "many"]
    while not many.done():
        worker.engine.end(min(1, len(worker.engine.inside)))
        await settled()
    assert await many == [FinishReason.LENGTH] * 64
    assert [await other for other in others] == [[FinishReason.LENGTH]] * 2
