"""GenerationService on top of the engine: messages in and out, status codes, cancellation."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TypeAlias

import grpc
import structlog
from grpc import aio

from speclen.v1 import control_pb2, generation_pb2_grpc
from speclen.v1 import generation_pb2 as pb
from speclen.worker.engine.engine import Engine
from speclen.worker.engine.request import DrainingError, GenerationRequest, QueueFullError, SequenceOutput
from speclen.worker.models.loading import ModelPair
from speclen.worker.reporting.control_client import ControlClient
from speclen.worker.service.messages import SequenceMessages, to_request
from speclen.worker.service.relay import OutputRelay, OutputStream
from speclen.worker.service.request_metrics import RequestMetrics, RequestTimeline

log = structlog.get_logger()
Context: TypeAlias = aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What GetModelInfo says; fixed for the life of the worker."""

    context: control_pb2.ContextKey
    target_path: str
    draft_path: str
    num_target_parameters: int
    num_draft_parameters: int


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Turns RPCs into engine calls. A request whose client is gone is aborted."""

    def __init__(
        self,
        engine: Engine,
        pair: ModelPair,
        control: ControlClient,
        facts: ModelFacts,
        metrics: RequestMetrics,
        stream_interval_s: float,
    ) -> None:
        self._engine = engine
        self._pair = pair
        self._control = control
        self._facts = facts
        self._metrics = metrics
        self._relay = OutputRelay(asyncio.get_running_loop(), stream_interval_s)
        self._running: set[str] = set()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        stream = OutputStream()
        generation = await self._submit(request, stream, context)
        timeline = self._metrics.timeline(generation.sampling.n)
        try:
            async for response in self._responses(generation, stream, request.stream, timeline):
                yield response
        finally:
            timeline.abandon()
            # Reached early when the client went away or its deadline passed.
            self._running.discard(generation.request_id)
            self._engine.abort(generation.request_id)

    async def _submit(self, message: pb.GenerateRequest, stream: OutputStream, context: Context) -> GenerationRequest:
        try:
            generation = to_request(message, self._encode)
            if generation.request_id in self._running:
                raise ValueError(f"request_id {generation.request_id!r} is already running: choose another")
            self._engine.submit(generation, functools.partial(self._relay.put, stream))
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except QueueFullError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except DrainingError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        self._running.add(generation.request_id)
        return generation

    async def _responses(
        self, generation: GenerationRequest, stream: OutputStream, stream_chunks: bool, timeline: RequestTimeline
    ) -> AsyncIterator[pb.GenerateResponse]:
        sequences = [SequenceMessages(generation.request_id, index) for index in range(generation.sampling.n)]
        unfinished = len(sequences)
        while unfinished:
            outputs = await stream.next()
            timeline.saw(outputs, time.monotonic())
            for index, group in group_by_index(outputs).items():
                chunk = sequences[index].chunk(group)
                if stream_chunks and (chunk.chunk.token_ids or chunk.chunk.text):
                    yield chunk
                if group[-1].finish_reason is not None:
                    unfinished -= 1
                    yield sequences[index].complete(group[-1])

    def _encode(self, text: str) -> list[int]:
        return list(self._pair.tokenizer(text)["input_ids"])

    async def Abort(self, request: pb.AbortRequest, context: object) -> pb.AbortResponse:  # noqa: N802
        aborted = [self._engine.abort(request_id) for request_id in request.request_ids]
        return pb.AbortResponse(num_aborted=sum(aborted))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: object) -> pb.GetModelInfoResponse:  # noqa: N802
        return pb.GetModelInfoResponse(
            context=self._facts.context,
            target_path=self._facts.target_path,
            draft_path=self._facts.draft_path,
            vocab_size=self._pair.vocab_size,
            max_context_length=self._engine.max_context_length,
            eos_token_ids=self._pair.eos_token_ids,
            num_target_parameters=self._facts.num_target_parameters,
            num_draft_parameters=self._facts.num_draft_parameters,
        )

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: object
    ) -> pb.GetServerInfoResponse:
        load, card, table = self._engine.load(), self._control.card, self._control.table
        return pb.GetServerInfoResponse(
            worker=card.identity(),
            policy=card.policy,
            table_source=table.source,
            table=control_pb2.LengthTable(
                decision_version=table.decision_version,
                choices=[
                    control_pb2.BucketChoice(
                        batch_min=bucket.batch_min,
                        batch_max=bucket.batch_max,
                        speculation_length=bucket.speculation_length,
                    )
                    for bucket in table.buckets
                ],
            ),
            limits=control_pb2.WorkerLimits(
                max_batch_size=card.max_batch_size, max_speculation_length=card.max_speculation_length
            ),
            num_requests_running=load.num_running,
            num_requests_waiting=load.num_waiting,
            num_kv_tokens_used=load.num_kv_tokens_used,
            num_kv_tokens_total=load.num_kv_tokens_total,
            num_reports_buffered=len(self._control.buffer.records),
            num_reports_dropped=self._control.buffer.num_dropped,
            num_steps=load.num_steps,
            num_row_steps=load.num_row_steps,
            num_generated_tokens=load.num_generated_tokens,
            num_draft_tokens=load.num_draft_tokens,
            num_accepted_tokens=load.num_accepted_tokens,
        )


def group_by_index(outputs: list[SequenceOutput]) -> dict[int, list[SequenceOutput]]:
    """Outputs by sequence, each group in order of arrival."""
    groups: dict[int, list[SequenceOutput]] = {}
    for output in outputs:
        groups.setdefault(output.index, []).append(output)
    return groups
