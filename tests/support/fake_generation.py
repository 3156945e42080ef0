"""A GenerationService that answers at a known speed, for tests of what measures it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from grpc import aio

from speclen.v1 import control_pb2
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc


@dataclass
class FakeService(rpc.GenerationServiceServicer):
    """Gives every request length + 1 tokens per step of step_s seconds, so that a longer fixed length is faster.

    fail_after: requests that are answered before the service refuses all others. short_by: tokens withheld.
    """

    step_s: float = 0.01
    fail_after: int | None = None
    short_by: int = 0
    num_requests: int = 0
    num_steps: int = 0
    num_generated: int = 0
    num_accepted: int = 0
    num_drafted: int = 0

    async def Generate(self, request: pb.GenerateRequest, context: aio.ServicerContext) -> AsyncIterator:  # noqa: N802
        self.num_requests += 1
        if self.fail_after is not None and self.num_requests > self.fail_after:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        length = request.speculation.length
        wanted = request.sampling_params.max_tokens - self.short_by
        tokens, steps = 0, 0
        while tokens < wanted:
            await asyncio.sleep(self.step_s)
            new = min(length + 1, wanted - tokens)
            tokens, steps = tokens + new, steps + 1
            self.num_steps += 1
            self.num_generated += new
            self.num_accepted += new - 1
            self.num_drafted += length
            yield pb.GenerateResponse(chunk=pb.GenerateChunk(token_ids=[1] * new, completion_tokens=tokens))
        stats = pb.SpeculationStats(
            num_steps=steps, num_draft_tokens=steps * length, num_accepted_tokens=tokens - steps
        )
        yield pb.GenerateResponse(complete=pb.GenerateComplete(output_ids=[1] * tokens, speculation=stats))

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: object) -> pb.GetServerInfoResponse:  # noqa: N802
        return pb.GetServerInfoResponse(
            num_steps=self.num_steps,
            num_row_steps=self.num_steps,
            num_generated_tokens=self.num_generated,
            num_accepted_tokens=self.num_accepted,
            num_draft_tokens=self.num_drafted,
            table=control_pb2.Table(choices=[control_pb2.Choice(batch_min=1, speculation_length=2)]),
        )


@asynccontextmanager
async def serving(service: FakeService) -> AsyncIterator[str]:
    """Address of a server with this service, on a free port."""
    server = aio.server()
    rpc.add_GenerationServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
