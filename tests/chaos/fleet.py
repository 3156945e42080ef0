"""Real processes: one `speclen controller` and some `speclen worker`s with the bundled pair."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chaos.fault import BreachError, Place, require, until
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc
from tests.support.addresses import free_address
from tests.support.store_rows import rows

START_S = 90.0
STOP_S = 40.0
PAIR = ("--target", "bundled:target", "--draft", "bundled:draft", "--device", "cpu", "--dtype", "float32")
WORKER = (*PAIR, "--backend", "torch", "--threads", "1", "--max-batch-size", "8", "--max-length", "4")
SERVING = health_pb2.HealthCheckResponse.SERVING


class Program:
    """One process. address: known once it serves."""

    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.arguments, self.log = list(arguments), log
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("SPECLEN_")}
        self.environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **(environment or {})}
        self.program = ["-m", "speclen.cli.app"]
        self.address = ""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; `wait_until_serving` waits. On the address that it had before, if it had one."""
        arguments = self.arguments
        if self.address:
            arguments = [*arguments, "--listen", self.address]
        self.log_begin = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *self.program, *arguments],
                stdout=output,
                stderr=output,
                env=self.environment,
                cwd=self.log.parent,
            )

    def wait_until_serving(self) -> None:
        until(lambda: "serving on " in self.said() or not self.alive, f"the start of {self.log.stem}", START_S)
        found = re.search(r"serving on ([^\s,]+)", self.said())
        if found is None:
            raise BreachError(f"{self.log.stem} did not start: {self.last_words()}")
        self.address = found[1]

    def said(self) -> str:
        """Output of this process."""
        with self.log.open("rb") as log:
            log.seek(self.log_begin)
            return log.read().decode(errors="replace")

    def last_words(self) -> str:
        return (self.said().strip().splitlines() or ["nothing was said"])[-1][:300]

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL. Raises BreachError where it had ended before, by itself."""
        require(self.alive, f"{self.log.stem} had ended by itself: {self.last_words()}")
        self.send(signal.SIGKILL)
        self.wait()

    def wait(self, timeout_s: float = STOP_S) -> int:
        """Its exit code."""
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise BreachError(f"{self.log.stem} did not end within {timeout_s:g} s") from None

    def stop(self) -> None:
        """SIGTERM, which has to end it with exit code 0 and without a traceback."""
        require(self.alive, f"{self.log.stem} had ended by itself: {self.last_words()}")
        self.send(signal.SIGTERM)
        code = self.wait()
        require(code == 0, f"{self.log.stem} ended with {code} after SIGTERM: {self.last_words()}")
        self.check_log()

    def check_log(self) -> None:
        traces = [line for line in self.log.read_text(errors="replace").splitlines() if "Traceback (most" in line]
        require(not traces, f"{self.log.stem} wrote a traceback: {traces[:1]}")

    def health(self, service: str = "", timeout_s: float = 5.0) -> int:
        """Raises grpc.RpcError."""
        with grpc.insecure_channel(self.address) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            return health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s).status

    def info(self) -> pb.GetServerInfoResponse:
        with grpc.insecure_channel(self.address) as channel:
            return rpc.GenerationServiceStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=10)


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
        arguments = ["controller", "--db", str(self.database), "--commit-interval-s", "0.1"]
        self.controller = Program(arguments, place.folder / "controller.log", environment)
        self.controller.address = free_address()
        self.workers = []
        for number in range(num_workers):
            flags = ["--worker-id", f"real-{number}", "--controller", self.controller.address, *WORKER, *worker]
            program = Program(["worker", *flags], place.folder / f"worker-{number}.log")
            program.address = free_address()
            self.workers.append(program)

    @property
    def programs(self) -> list[Program]:
        return [self.controller, *self.workers]

    def __enter__(self) -> Fleet:
        try:
            for programs in ([self.controller], self.workers):
                for program in programs:
                    program.start()
                for program in programs:
                    program.wait_until_serving()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                for program in reversed([each for each in self.programs if each.process is not None]):
                    program.stop()
        finally:
            self.kill()

    def kill(self) -> None:
        for program in self.programs:
            if program.alive:
                program.send(signal.SIGKILL)
                program.wait()

    def wait_until_told(self, timeout_s: float = 60.0) -> None:
        """Until every worker knows that all of its reports are on the disk."""
        for worker in self.workers:
            until(lambda worker=worker: not worker.info().num_reports_buffered, "the last acknowledgement", timeout_s)

    def check_idle(self) -> None:
        """Every row and every place in the queue is free again. Raises BreachError."""
        for worker in self.workers:
            until(lambda worker=worker: is_idle(worker.info()), f"that {worker.log.stem} has all rows free", 30.0)


def is_idle(info: pb.GetServerInfoResponse) -> bool:
    return not (info.num_requests_running or info.num_requests_waiting or info.num_kv_tokens_used)


def check_database(database: Path) -> int:
    """Every report is there once, without a gap, and the workers' rows agree; their number. Raises BreachError."""
    require(rows(database, "PRAGMA integrity_check") == [("ok",)], "the database is damaged")
    twice = rows(
        database, "SELECT count(*) - count(DISTINCT worker_key || ':' || epoch || ':' || seq) FROM step_reports"
    )
    require(twice == [(0,)], f"{twice[0][0]} reports were counted twice")
    counted = "SELECT count(*) FROM step_reports AS r WHERE r.worker_key = w.worker_key"
    marks = "SELECT max(seq) FROM step_reports AS r WHERE r.worker_key = w.worker_key AND r.epoch = w.epoch"
    query = f"SELECT worker_id, num_reports, ({counted}), applied_seq, ({marks}), missing_ranges FROM workers AS w"
    for worker_id, num_reports, num_rows, applied, highest, missing in rows(database, query):
        require(num_reports == num_rows, f"{worker_id} is said to have {num_reports} reports, {num_rows} are stored")
        require(applied == (highest or 0), f"{worker_id} is acknowledged up to {applied}, {highest} are stored")
        require(missing == "[]", f"{worker_id} lacks the reports {missing}")
    return rows(database, "SELECT count(*) FROM step_reports")[0][0]
