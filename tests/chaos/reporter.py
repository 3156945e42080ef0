"""A worker that only reports, to a real controller that may die, move or refuse, and what it was promised."""

from __future__ import annotations

import json
import random
import threading
import time
from contextlib import closing
from pathlib import Path
from types import TracebackType

from chaos.fault import BreachError, require, until
from speclen.store.connection import connect_reader
from speclen.store.queries import stored_reports
from speclen.v1 import control_pb2 as pb
from tests.support.reporting_worker import EPOCH, ReportingWorker, step_report
from tests.support.store_rows import rows

CONTEXT = pb.ContextKey(target="t", draft="d", device="cpu:chaos", dtype="float32")


class Reporter:
    """Keeps reporting for the length of a `with` block, and connects again whenever the connection ends."""

    def __init__(
        self,
        address: str,
        dice: random.Random,
        number: int = 1,
        context: pb.ContextKey = CONTEXT,
        max_unacknowledged: int = 3000,
    ) -> None:
        self.worker = ReportingWorker(number, context, dice, max_unacknowledged)
        self.address = address
        self._done = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Reporter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done = True
        self.worker.finishing = True
        self._thread.join(1.0 if kind else 20.0)

    def _run(self) -> None:
        while not self._done:
            try:
                self.worker.report_until_broken(self.address)
            except Exception as error:
                self._failure = error
                return
            if self.worker.finishing and not self.worker.unacknowledged:
                return
            time.sleep(0.02)

    @property
    def num_acknowledged(self) -> int:
        return self.worker.num_acknowledged

    def wait_for_more(self, num_reports: int = 50, timeout_s: float = 30.0) -> None:
        """Until so many more are acknowledged."""
        wanted = self.num_acknowledged + num_reports
        until(lambda: self.num_acknowledged >= wanted or self._failure, "an acknowledgement", timeout_s)
        self.check()

    def finish(self, timeout_s: float = 60.0) -> None:
        """Have everything acknowledged."""
        self.worker.finishing = True
        self._thread.join(timeout_s)
        self.check()
        left = len(self.worker.unacknowledged)
        require(not left and not self._thread.is_alive(), f"{left} reports are never acknowledged")

    def check(self) -> None:
        if self._failure is not None:
            raise BreachError(f"the reporting failed: {self._failure!r}")
        require(not self.worker.broken_promises, f"{self.worker.broken_promises[:1]}")

    def check_stored(self, database: Path) -> None:
        """All that was reported is there once, as it was sent. Raises BreachError."""
        query = f"SELECT worker_key FROM workers WHERE worker_id = 'worker-{self.worker.number}'"
        [(worker_key,)] = rows(database, query)
        with closing(connect_reader(database)) as connection:
            mine = [row for row in stored_reports(connection) if row.worker_key == worker_key]
        seqs = sorted(row.seq for row in mine)
        require(seqs == [*range(1, self.worker.last_seq + 1)], "a report is lost or counted twice")
        for row in mine:
            sent = step_report(self.worker.number, row.seq)
            stored = row.epoch, row.batch_size, row.latency_s, json.loads(row.accepted_histogram)
            expected = EPOCH, sent.batch_size, sent.latency_s, [*sent.accepted_histogram]
            require(stored == expected, f"report {row.seq} was stored as {stored} and sent as {expected}")
