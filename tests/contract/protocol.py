"""The only module of this folder that builds or reads messages and rows whose fields may change.

Every test speaks in the neutral types below. A change of the protocol's fields changes this file alone.
"""

from __future__ import annotations

import queue
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import grpc

from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc
from speclen.v1 import generation_pb2 as gen
from speclen.v1 import generation_pb2_grpc as gen_rpc
from tests.support.waiting import PATIENCE_S

MAX_BATCH_SIZE, MAX_LENGTH = 32, 8


@dataclass(frozen=True)
class Step:
    """One decoding step: what was drafted, how long it took, sequences by accepted run (entry j: exactly j)."""

    batch_size: int
    length: int
    latency_s: float
    histogram: tuple[int, ...]
    probe_id: int = 0


@dataclass(frozen=True)
class Probe:
    """An exploratory length for a run of steps of one worker, at batch sizes batch_min to batch_max."""

    probe_id: int
    batch_min: int
    batch_max: int
    length: int
    num_steps: int


@dataclass(frozen=True)
class Answer:
    """An answer to a group of reports. choices: length by batch size; empty where the table has not changed."""

    choices: dict[int, int]
    probes: list[Probe]
    applied_seq: int
    durable_seq: int
    num_refused: int


@dataclass(frozen=True)
class Registered:
    """An answer to a registration."""

    choices: dict[int, int]
    durable_seq: int


@dataclass(frozen=True)
class LearnedCell:
    """One row of the learned table. source: "profile", "online", "both" or "prior"."""

    batch_min: int
    batch_max: int
    length: int
    num_steps: int
    source: str
    is_best: bool


def report_of(seq: int, step: Step) -> pb.StepReport:
    """A step as a report."""
    return pb.StepReport(
        seq=seq,
        batch_size=step.batch_size,
        speculation_length=step.length,
        latency_s=step.latency_s,
        accepted_histogram=step.histogram,
        mean_context_length=100.0,
        probe_id=step.probe_id,
    )


def choices_of(table: pb.LengthTable) -> dict[int, int]:
    """Length by batch size."""
    return {
        batch_size: choice.speculation_length
        for choice in table.choices
        for batch_size in range(choice.batch_min, choice.batch_max + 1)
    }


def probe_of(probe: pb.Probe) -> Probe:
    """A probe."""
    return Probe(probe.probe_id, probe.batch_min, probe.batch_max, probe.speculation_length, probe.num_steps)


def answer_of(response: pb.StreamReportsResponse) -> Answer:
    """A message of StreamReports."""
    return Answer(
        choices_of(response.table),
        [probe_of(probe) for probe in response.probes],
        response.applied_seq,
        response.durable_seq,
        response.num_refused,
    )


def context(name: str) -> pb.ContextKey:
    """A context that shares nothing with those of other names."""
    return pb.ContextKey(target=f"target-{name}", draft=f"draft-{name}", device="cpu:simulated", dtype="float32")


class Control:
    """Calls of one worker to a controller. name: of the context."""

    def __init__(self, channel: grpc.Channel, name: str = "test", worker_id: str = "worker", epoch: int = 7) -> None:
        self.stub = rpc.ControlServiceStub(channel)
        self.context = context(name)
        self.worker_id = worker_id
        self.identity = pb.WorkerIdentity(worker_id=worker_id, epoch=epoch)

    def register(self) -> Registered:
        """RegisterWorker."""
        limits = pb.WorkerLimits(max_batch_size=MAX_BATCH_SIZE, max_speculation_length=MAX_LENGTH)
        request = pb.RegisterWorkerRequest(worker=self.identity, context=self.context, limits=limits, policy="adaptive")
        response = self.stub.RegisterWorker(request, timeout=PATIENCE_S)
        return Registered(choices_of(response.table), response.durable_seq)

    def report_step(self, seq: int, step: Step) -> tuple[int, int]:
        """ReportStep: the length to use next, and the highest seq that arrived."""
        request = pb.ReportStepRequest(worker=self.identity, report=report_of(seq, step))
        response = self.stub.ReportStep(request, timeout=PATIENCE_S)
        return response.speculation_length, response.applied_seq

    def learned(self) -> list[LearnedCell]:
        """GetLearnedTable of this context."""
        response = self.stub.GetLearnedTable(pb.GetLearnedTableRequest(context=self.context), timeout=PATIENCE_S)
        [table] = response.tables
        return [
            LearnedCell(row.batch_min, row.batch_max, row.speculation_length, row.num_steps, row.source, row.is_best)
            for row in table.rows
        ]

    def import_profile(
        self, step_s: Callable[[int, int], float], survival: Sequence[float], num_steps: int = 30
    ) -> int:
        """ImportProfile, measured at batch sizes 1, 2, 4, ...; returns the number of cells that were taken."""
        cells = [
            pb.ProfileCell(
                batch_size=batch, speculation_length=length, step_s=step_s(batch, length), num_steps=num_steps
            )
            for batch in (1, 2, 4, 8, 16, 32)
            for length in range(MAX_LENGTH + 1)
        ]
        request = pb.ImportProfileRequest(
            context=self.context, cells=cells, survival=survival, num_survival_rows=[4000] * len(survival)
        )
        return self.stub.ImportProfile(request, timeout=PATIENCE_S).num_cells


class ReportStream:
    """One StreamReports call of a worker, a group and its answer at a time."""

    def __init__(self, control: Control) -> None:
        self._requests: queue.SimpleQueue[pb.StreamReportsRequest | None] = queue.SimpleQueue()
        self._requests.put(pb.StreamReportsRequest(worker=control.identity))
        self._responses = control.stub.StreamReports(iter(self._requests.get, None))

    def send(self, reports: Iterable[tuple[int, Step]], until_seq: int = 0) -> Answer:
        """Send steps by seq and read until until_seq has arrived; the answer is the sum of the messages read."""
        self._requests.put(pb.StreamReportsRequest(reports=[report_of(seq, step) for seq, step in reports]))
        choices: dict[int, int] = {}
        probes: list[Probe] = []
        for response in self._responses:
            answer = answer_of(response)
            choices.update(answer.choices)
            probes += answer.probes
            if answer.applied_seq >= until_seq:
                return Answer(choices, probes, answer.applied_seq, answer.durable_seq, answer.num_refused)
        raise AssertionError("the controller ended the stream")

    def close(self) -> None:
        """End the call; the controller answers until all is on disk."""
        self._requests.put(None)
        for _ in self._responses:
            pass


@dataclass(frozen=True)
class Completion:
    """One finished output."""

    ids: list[int]
    text: str
    num_draft_tokens: int
    num_accepted_tokens: int


def generate(
    channel: grpc.Channel, prompt: str | Sequence[int], max_tokens: int, speculation: int | None = None
) -> Completion:
    """Generate, greedy. speculation: None for the worker's table, 0 for plain decoding, else a fixed draft length."""
    modes = {None: gen.Speculation.MODE_AUTO, 0: gen.Speculation.MODE_OFF}
    mode = modes.get(speculation, gen.Speculation.MODE_FIXED)
    request = gen.GenerateRequest(
        sampling_params=gen.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        speculation=gen.Speculation(
            mode=mode, length=(speculation or None) if mode == gen.Speculation.MODE_FIXED else 0
        ),
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.tokenized.input_ids.extend(prompt)
    *_, last = gen_rpc.GenerationServiceStub(channel).Generate(request, timeout=PATIENCE_S)
    done = last.complete
    counts = done.speculation
    return Completion(list(done.output_ids), done.text, counts.num_draft_tokens, counts.num_accepted_tokens)


def model_name(channel: grpc.Channel) -> str:
    """GetModelInfo: the worker's target model."""
    return gen_rpc.GenerationServiceStub(channel).GetModelInfo(gen.GetModelInfoRequest()).target_path


@dataclass(frozen=True)
class ServerInfo:
    """A worker's answer to GetServerInfo."""

    worker_id: str
    choices: dict[int, int]
    num_running: int
    num_steps: int
    num_reports_buffered: int
    num_reports_dropped: int


def server_info(channel: grpc.Channel) -> ServerInfo:
    """GetServerInfo."""
    info = gen_rpc.GenerationServiceStub(channel).GetServerInfo(gen.GetServerInfoRequest(), timeout=PATIENCE_S)
    return ServerInfo(
        info.worker.worker_id,
        choices_of(info.table),
        info.num_requests_running,
        info.num_steps,
        info.num_reports_buffered,
        info.num_reports_dropped,
    )


def rows(database: Path, query: str, *values: object) -> list[tuple]:
    """The answer of a database that a controller may be writing."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return connection.execute(query, values).fetchall()


def stored_steps(database: Path, worker_id: str) -> list[tuple[int, int, float, str]]:
    """(seq, batch size, seconds, accepted histogram as JSON) of every raw report of a worker, by seq."""
    query = """SELECT seq, batch_size, latency_s, accepted_histogram FROM step_reports JOIN workers USING (worker_key)
        WHERE worker_id = ? ORDER BY seq"""
    return rows(database, query, worker_id)


def health_of(database: Path, worker_id: str) -> dict[str, int]:
    """Counts of a worker's reports in the view worker_health."""
    names = ("durable_seq", "num_reports", "num_repeated", "num_missing", "num_refused")
    query = f"SELECT {', '.join(names)} FROM worker_health WHERE worker_id = ?"
    [row] = rows(database, query, worker_id)
    return dict(zip(names, row, strict=True))
