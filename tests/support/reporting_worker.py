"""Workers that keep reporting to a controller that keeps being killed, and what they may rely on.

A report is *acknowledged* once the worker may forget it. Within a stream messages are taken in order, so that holds as
soon as durable_seq reaches the report's own seq, if no higher one was sent before it; a report that was overtaken on
purpose has to wait for the next message that is ahead of all others, because durable_seq was past it already.
"""

from __future__ import annotations

import contextlib
import queue
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import grpc

from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc

EPOCH = 1_700_000_000
SURVIVAL = (0.8, 0.6, 0.45, 0.3)


@lru_cache(maxsize=50_000)
def step_report(worker: int, seq: int) -> pb.StepReport:
    """Report number seq of a worker: always the same one, so that a repetition is a true one."""
    dice = random.Random(worker * 1_000_003 + seq)
    batch_size = min(32, 1 << dice.randrange(6))
    length = dice.randrange(5)
    histogram = [0] * (length + 1)
    for _ in range(batch_size):
        accepted = next((i for i in range(length) if dice.random() > SURVIVAL[i] / (1, *SURVIVAL)[i]), length)
        histogram[accepted] += 1
    return pb.StepReport(
        seq=seq,
        batch_size=batch_size,
        speculation_length=length,
        latency_s=0.005 * (1 + 0.1 * length + 0.05 * batch_size) * dice.uniform(0.9, 1.1),
        accepted_histogram=histogram,
        mean_context_length=dice.randrange(50, 60),
        flags=[pb.STEP_FLAG_PREFILL] if dice.random() < 0.05 else [],
    )


@dataclass
class Message:
    """Reports sent together. watermark: durable_seq from which on they are acknowledged; None: not known yet."""

    seqs: list[int]
    watermark: int | None = None


@dataclass
class ReportingWorker:
    """One worker that resends until acknowledged, repeats groups, and lets groups overtake each other."""

    number: int
    context: pb.ContextKey
    dice: random.Random
    max_unacknowledged: int = 3000
    unacknowledged: set[int] = field(default_factory=set)
    num_acknowledged: int = 0
    highest_acknowledged: int = 0
    last_seq: int = 0
    num_repeated: int = 0
    num_overtaken: int = 0
    broken_promises: list[str] = field(default_factory=list)
    finishing: bool = False

    @property
    def identity(self) -> pb.WorkerIdentity:
        return pb.WorkerIdentity(worker_id=f"worker-{self.number}", epoch=EPOCH)

    def report_until_broken(self, address: str) -> None:
        """One connection: register, send everything unacknowledged, then new reports until the controller dies."""
        with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
            stub = rpc.ControlServiceStub(channel)
            limits = pb.WorkerLimits(max_batch_size=32, max_speculation_length=4)
            registration = pb.RegisterWorkerRequest(worker=self.identity, context=self.context, limits=limits)
            durable_seq = stub.RegisterWorker(registration, timeout=5).durable_seq
            if durable_seq < self.highest_acknowledged:
                self.broken_promises.append(
                    f"{self.highest_acknowledged} was acknowledged, but the controller came back with {durable_seq}"
                )
            sent: queue.SimpleQueue[Message] = queue.SimpleQueue()
            waiting: list[Message] = []
            for response in stub.StreamReports(self.requests(sent, durable_seq)):
                while not sent.empty():
                    waiting.append(sent.get())
                waiting = self.acknowledge(waiting, response.durable_seq)
                if self.finishing and not self.unacknowledged:
                    return

    def acknowledge(self, waiting: list[Message], durable_seq: int) -> list[Message]:
        """Forget what is on the disk; returns the messages that are not."""
        still = []
        for message in waiting:
            if message.watermark is None or message.watermark > durable_seq:
                still.append(message)
                continue
            for seq in message.seqs:
                if seq in self.unacknowledged:
                    self.unacknowledged.discard(seq)
                    self.num_acknowledged += 1
            self.highest_acknowledged = max(self.highest_acknowledged, *message.seqs)
        return still

    def requests(self, sent: queue.SimpleQueue[Message], durable_seq: int) -> Iterator[pb.StreamReportsRequest]:
        """Messages of one connection. A message is noted before it is sent, so that no answer comes too early."""
        yield pb.StreamReportsRequest(worker=self.identity)
        highest, overtaken = durable_seq, list[Message]()
        for seqs in self.groups():
            message = Message(seqs)
            if seqs and seqs[-1] > highest:
                highest = message.watermark = seqs[-1]
                for earlier in overtaken:
                    earlier.watermark = highest
                overtaken = []
            elif seqs:
                overtaken.append(message)
            if seqs:
                sent.put(message)
            yield pb.StreamReportsRequest(reports=[step_report(self.number, seq) for seq in seqs])

    def groups(self) -> Iterator[list[int]]:
        """Seqs of one message after the other: the unacknowledged ones, then new ones, some repeated or swapped."""
        yield from self.with_mischief(self.in_groups(sorted(self.unacknowledged)))
        # However many wait: without one that is ahead of all others, what was sent again can never be acknowledged.
        yield self.fresh(1)
        while not self.finishing:
            if len(self.unacknowledged) < self.max_unacknowledged:
                yield from self.with_mischief(self.in_groups(self.fresh(self.dice.randint(1, 120))))
            else:
                yield []
            time.sleep(0.004)
        yield self.fresh(1)
        while self.unacknowledged:
            time.sleep(0.02)
            yield []

    def fresh(self, count: int) -> list[int]:
        """Seqs that were never sent before."""
        seqs = list(range(self.last_seq + 1, self.last_seq + count + 1))
        self.last_seq = seqs[-1]
        self.unacknowledged.update(seqs)
        return seqs

    def in_groups(self, seqs: list[int]) -> Iterator[list[int]]:
        start = 0
        while start < len(seqs):
            size = self.dice.choice((1, 3, 16, 64, 64))
            yield seqs[start : start + size]
            start += size

    def with_mischief(self, groups: Iterator[list[int]]) -> Iterator[list[int]]:
        """Swap one group in ten with the next one, and send one in ten twice."""
        for group in groups:
            if self.dice.random() < 0.1 and (following := next(groups, None)):
                self.num_overtaken += len(group)
                yield following
            yield group
            if self.dice.random() < 0.1:
                self.num_repeated += len(group)
                yield group
