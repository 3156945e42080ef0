"""Watches a worker while a track runs, through the counters that it publishes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from grpc import aio

from speclen.transport.aio import prepare_aio
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc

INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True)
class Sample:
    """The worker's counters at one moment of the track."""

    at_s: float
    num_running: int
    num_waiting: int
    num_steps: int
    num_row_steps: int
    num_generated_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_reports_dropped: int
    table_source: str


def to_sample(info: pb.GetServerInfoResponse, at_s: float) -> Sample:
    return Sample(
        at_s=round(at_s, 3),
        num_running=info.num_requests_running,
        num_waiting=info.num_requests_waiting,
        num_steps=info.num_steps,
        num_row_steps=info.num_row_steps,
        num_generated_tokens=info.num_generated_tokens,
        num_draft_tokens=info.num_draft_tokens,
        num_accepted_tokens=info.num_accepted_tokens,
        num_reports_dropped=info.num_reports_dropped,
        table_source=info.table_source,
    )


async def watch(address: str, samples: list[Sample]) -> None:
    """Add a sample every quarter of a second until cancelled. A worker that does not answer leaves a hole."""
    prepare_aio()
    begin = time.monotonic()
    async with aio.insecure_channel(address) as channel:
        stub = rpc.GenerationServiceStub(channel)
        for tick in itertools.count(1):
            try:
                info = await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=5.0)
                samples.append(to_sample(info, time.monotonic() - begin))
            except grpc.RpcError:
                pass  # what it means for requests is counted where they fail
            await asyncio.sleep(max(0.01, begin + tick * INTERVAL_S - time.monotonic()))


def reached_steps_at(samples: Sequence[Sample], num_steps: int) -> float | None:
    """When the worker had done so many steps since the first sample; None if it never did."""
    for sample in samples:
        if sample.num_steps - samples[0].num_steps >= num_steps:
            return sample.at_s
    return None
