"""Real processes: a `speclen controller`, and `speclen worker`s with the bundled pair."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chaos.fault import Place
from speclen.cli.support.processes import Child, without_settings
from speclen.process.supervision import start_tied
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc
from tests.support.addresses import free_address
from tests.support.store_rows import rows
from tests.support.waiting import until

START_S = 90.0
STOP_S = 40.0
PAIR = ("--target", "bundled:target", "--draft", "bundled:draft", "--device", "cpu", "--dtype", "float32")
WORKER = (*PAIR, "--backend", "torch", "--threads", "1", "--max-batch-size", "8", "--max-length", "4")
SERVING = health_pb2.HealthCheckResponse.SERVING


@dataclass(slots=True)
class Program(Child):
    """One process, without settings of speclen but those in its `environment`. program: what Python runs."""

    environment: dict[str, str] = field(default_factory=dict)
    program: Sequence[str] = ("-m", "speclen.cli.app")

    def start(self) -> None:
        """Start it; `wait_until_serving` waits."""
        few_threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        with self.log_file.open("ab") as log:
            self.log_begin = log.tell()
            self.process = start_tied(
                [sys.executable, *self.program, *self.arguments],
                stdout=log,
                stderr=log,
                env=without_settings(os.environ) | few_threads | self.environment,
                cwd=self.log_file.parent,
            )

    def kill(self) -> None:
        """SIGKILL, unless it has ended before, by itself."""
        assert self.exit_code is None, f"{self.name} had ended by itself: {self.last_words()}"
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """SIGTERM, which has to end it with exit code 0 and without a traceback."""
        assert self.exit_code is None, f"{self.name} had ended by itself: {self.last_words()}"
        self.stop(STOP_S)
        assert self.exit_code == 0, f"{self.name} ended with {self.exit_code} after SIGTERM: {self.last_words()}"
        assert "Traceback (most" not in self.log_file.read_text(errors="replace"), f"{self.name} wrote a traceback"

    def health(self, service: str = "", timeout_s: float = 5.0) -> int:
        """Raises grpc.RpcError."""
        with grpc.insecure_channel(self.address) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            return health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s).status

    def info(self) -> pb.GetServerInfoResponse:
        with grpc.insecure_channel(self.address) as channel:
            return rpc.GenerationServiceStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=10)

    def is_idle(self) -> bool:
        info = self.info()
        return not (info.num_requests_running or info.num_requests_waiting or info.num_kv_tokens_used)


class Fleet:
    """A controller and its workers for the length of a `with` block, at whose end all must stop as asked.

    worker: further arguments. environment: of the controller alone.
    """

    def __init__(
        self,
        place: Place,
        num_workers: int = 1,
        worker: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        database: Path | None = None,
    ) -> None:
        self.database = database or place.folder / "speclen.db"
        log, address = place.folder / "controller.log", free_address()
        arguments = ["controller", "--listen", address, "--db", str(self.database), "--commit-interval-s", "0.1"]
        self.controller = Program("controller", arguments, address, log, environment=environment or {})
        self.workers = []
        for number in range(num_workers):
            log, listen = place.folder / f"worker-{number}.log", free_address()
            flags = ["--listen", listen, "--worker-id", f"real-{number}", "--controller", address, *WORKER, *worker]
            self.workers.append(Program(f"worker {number}", ["worker", *flags], listen, log))

    @property
    def programs(self) -> list[Program]:
        return [self.controller, *self.workers]

    def __enter__(self) -> Fleet:
        try:
            for programs in ([self.controller], self.workers):
                for program in programs:
                    program.start()
                for program in programs:
                    program.wait_until_serving(START_S)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                for program in reversed([each for each in self.programs if each.process is not None]):
                    program.end()
        finally:
            self.kill()

    def kill(self) -> None:
        for program in self.programs:
            program.stop(0.0)

    def wait_until_acknowledged(self, timeout_s: float = 60.0) -> None:
        """Wait until every worker knows that all of its reports are on disk."""
        for worker in self.workers:
            until(lambda worker=worker: not worker.info().num_reports_buffered, timeout_s, "the last acknowledgement")

    def check_idle(self) -> None:
        """Check that every slot and every place in the queue is free again."""
        for worker in self.workers:
            until(lambda worker=worker: worker.is_idle(), 30.0, f"that {worker.name} has all slots free")


def check_database(database: Path) -> int:
    """Check that every report is stored once, without a gap, as the workers' rows say; returns their number."""
    assert rows(database, "PRAGMA integrity_check") == [("ok",)], "the database is damaged"
    twice = rows(
        database, "SELECT count(*) - count(DISTINCT worker_key || ':' || epoch || ':' || seq) FROM step_reports"
    )
    assert twice == [(0,)], f"{twice[0][0]} reports were counted twice"
    counted = "SELECT count(*) FROM step_reports AS r WHERE r.worker_key = w.worker_key"
    marks = "SELECT max(seq) FROM step_reports AS r WHERE r.worker_key = w.worker_key AND r.epoch = w.epoch"
    query = f"SELECT worker_id, num_reports, ({counted}), applied_seq, ({marks}), missing_ranges FROM workers AS w"
    for worker_id, num_reports, num_rows, applied, highest, missing in rows(database, query):
        assert num_reports == num_rows, f"{worker_id} is said to have {num_reports} reports, {num_rows} are stored"
        assert applied == (highest or 0), f"{worker_id} is acknowledged up to {applied}, {highest} are stored"
        assert missing == "[]", f"{worker_id} lacks the reports {missing}"
    return rows(database, "SELECT count(*) FROM step_reports")[0][0]
