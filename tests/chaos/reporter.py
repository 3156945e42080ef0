"""A worker that only reports, to a real controller that may die or refuse; it checks what was acknowledged.

It keeps a report until durable_seq has reached it, sends it again after each death, and repeats and swaps some groups.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import lru_cache
from pathlib import Path

import grpc
import numpy as np

from speclen.store.connection import connect_reader
from speclen.store.queries import stored_reports
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc
from tests.support.store_rows import rows
from tests.support.waiting import until
from tests.support.world import World

EPOCH = 1_700_000_000
CONTEXT = pb.ContextKey(target="t", draft="d", device="cpu:chaos", dtype="float32")


@lru_cache(maxsize=50_000)
def step_report(worker: int, seq: int) -> pb.StepReport:
    """Report number seq of a worker: always the same one, so that repetitions are equal."""
    dice = np.random.default_rng((worker, seq))
    batch_size, length = 1 << int(dice.integers(6)), int(dice.integers(5))
    latency_s, histogram = World().draw(batch_size, length, dice)
    return pb.StepReport(
        seq=seq,
        batch_size=batch_size,
        speculation_length=length,
        latency_s=latency_s,
        accepted_histogram=histogram,
        mean_context_length=int(dice.integers(50, 60)),
        flags=[pb.STEP_FLAG_PREFILL] if dice.random() < 0.05 else [],
    )


class Reporter:
    """Keeps reporting for the length of a `with` block, and connects again whenever the connection ends."""

    def __init__(
        self,
        address: str,
        dice: random.Random,
        number: int = 1,
        context: pb.ContextKey = CONTEXT,
        max_waiting: int = 3000,
    ) -> None:
        self.address, self.number, self._context, self._max_waiting = address, number, context, max_waiting
        self._identity = pb.WorkerIdentity(worker_id=f"worker-{number}", epoch=EPOCH)
        self._dice = dice
        self.last_seq = self.durable_seq = self.num_repeated = self.num_swapped = 0
        self._ending = self._all_made = self._gone = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Reporter:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._gone = self._ending = True
        self._thread.join(1.0 if kind else 20.0)

    def _run(self) -> None:
        while not self._gone and not self._is_done:
            try:
                with grpc.insecure_channel(self.address) as channel, contextlib.suppress(grpc.RpcError):
                    self._report(rpc.ControlServiceStub(channel))
            except Exception as error:
                self._failure = error
                return
            time.sleep(0.02)

    @property
    def _is_done(self) -> bool:
        return self._all_made and self.durable_seq == self.last_seq

    def _report(self, stub: rpc.ControlServiceStub) -> None:
        """One connection: what is not durable, then new reports, until the controller dies."""
        limits = pb.WorkerLimits(max_batch_size=32, max_speculation_length=4)
        registration = pb.RegisterWorkerRequest(worker=self._identity, context=self._context, limits=limits)
        durable_seq = stub.RegisterWorker(registration, timeout=5).durable_seq
        assert durable_seq >= self.durable_seq, f"{self.durable_seq} was durable, and {durable_seq} is left of it"
        self.durable_seq = durable_seq
        for response in stub.StreamReports(self._requests(durable_seq)):
            self.durable_seq = max(self.durable_seq, response.durable_seq)
            if self._is_done:
                return

    def _requests(self, durable_seq: int) -> Iterator[pb.StreamReportsRequest]:
        yield pb.StreamReportsRequest(worker=self._identity)
        for seqs in self._groups(durable_seq):
            yield pb.StreamReportsRequest(reports=[step_report(self.number, seq) for seq in seqs])

    def _groups(self, durable_seq: int) -> Iterator[range]:
        """Seqs of one message after the other, empty ones as heartbeats."""
        yield from self._with_mischief(self._cut(range(durable_seq + 1, self.last_seq + 1)))
        while not self._ending:
            new = range(0)
            if self.last_seq - self.durable_seq < self._max_waiting:
                new = range(self.last_seq + 1, self.last_seq + 1 + self._dice.randint(1, 120))
                self.last_seq = new[-1]
            yield from self._with_mischief(self._cut(new)) if new else [new]
            time.sleep(0.004)
        self._all_made = True
        while not self._is_done:
            time.sleep(0.02)
            yield range(0)

    def _cut(self, seqs: range) -> Iterator[range]:
        while seqs:
            size = self._dice.choice((1, 3, 16, 64, 64))
            yield seqs[:size]
            seqs = seqs[size:]

    def _with_mischief(self, groups: Iterator[range]) -> Iterator[range]:
        """Swap one group in ten with the next one, and send one in ten twice."""
        for group in groups:
            if self._dice.random() < 0.1 and (following := next(groups, None)):
                self.num_swapped += 1
                yield following
            yield group
            if self._dice.random() < 0.1:
                self.num_repeated += 1
                yield group

    def wait_for_more(self, num_reports: int = 50, timeout_s: float = 30.0) -> None:
        """Wait until this many more reports are durable."""
        wanted = self.durable_seq + num_reports
        until(lambda: self.durable_seq >= wanted or self._failure, timeout_s, "an acknowledgement")
        assert self._failure is None, f"the reporting failed: {self._failure!r}"

    def finish(self, timeout_s: float = 60.0) -> None:
        """Have everything acknowledged."""
        self._ending = True
        self._thread.join(timeout_s)
        assert self._failure is None, f"the reporting failed: {self._failure!r}"
        assert self._is_done, f"of {self.last_seq} reports {self.durable_seq} became durable"

    def check_stored(self, database: Path) -> None:
        """All that was reported is there once, as it was sent."""
        query = f"SELECT worker_key FROM workers WHERE worker_id = 'worker-{self.number}'"
        [(worker_key,)] = rows(database, query)
        with closing(connect_reader(database)) as connection:
            mine = [row for row in stored_reports(connection) if row.worker_key == worker_key]
        seqs = sorted(row.seq for row in mine)
        assert seqs == [*range(1, self.last_seq + 1)], "a report is lost or counted twice"
        for row in mine:
            sent = step_report(self.number, row.seq)
            stored = row.epoch, row.batch_size, row.latency_s, json.loads(row.accepted_histogram)
            expected = EPOCH, sent.batch_size, sent.latency_s, [*sent.accepted_histogram]
            assert stored == expected, f"report {row.seq} was stored as {stored} and sent as {expected}"
