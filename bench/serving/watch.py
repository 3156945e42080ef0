"""Watches a worker while a block runs, through the counters that it publishes."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass

import grpc
from grpc import aio

from speclen.transport.aio import prepare_aio
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc

INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True)
class Sample:
    """The worker's counters at one moment."""

    num_steps: int
    num_row_steps: int


async def watch(address: str, samples: list[Sample]) -> None:
    """Add a sample every quarter of a second until cancelled. A worker that does not answer leaves a hole."""
    prepare_aio()
    begin = time.monotonic()
    async with aio.insecure_channel(address) as channel:
        stub = rpc.GenerationServiceStub(channel)
        for tick in itertools.count(1):
            try:
                info = await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=5.0)
                samples.append(Sample(info.num_steps, info.num_row_steps))
            except grpc.RpcError:
                pass  # what it means for requests is counted where they fail
            await asyncio.sleep(max(0.01, begin + tick * INTERVAL_S - time.monotonic()))
