"""Calls of one worker to a controller, and of one client to a worker, by the generated stubs."""

import queue
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc

from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc
from speclen.v1 import generation_pb2 as gen
from speclen.v1 import generation_pb2_grpc as gen_rpc
from tests.support.waiting import PATIENCE_S

MAX_BATCH_SIZE, MAX_LENGTH = 32, 8


def choices_of(table: pb.LengthTable) -> dict[int, int]:
    """Length by batch size."""
    return {
        batch_size: choice.speculation_length
        for choice in table.choices
        for batch_size in range(choice.batch_min, choice.batch_max + 1)
    }


class Control:
    """Calls of one worker to a controller. name: of the context, which shares nothing with those of other names."""

    def __init__(self, channel: grpc.Channel, name: str = "test", worker_id: str = "worker", epoch: int = 7) -> None:
        self.stub = rpc.ControlServiceStub(channel)
        self.context = pb.ContextKey(
            target=f"target-{name}", draft=f"draft-{name}", device="cpu:simulated", dtype="float32"
        )
        self.identity = pb.WorkerIdentity(worker_id=worker_id, epoch=epoch)

    def register(self) -> dict[int, int]:
        """Length by batch size, from RegisterWorker."""
        limits = pb.WorkerLimits(max_batch_size=MAX_BATCH_SIZE, max_speculation_length=MAX_LENGTH)
        request = pb.RegisterWorkerRequest(worker=self.identity, context=self.context, limits=limits, policy="adaptive")
        return choices_of(self.stub.RegisterWorker(request, timeout=PATIENCE_S).table)

    def learned(self) -> list[Any]:
        """Rows of GetLearnedTable for this context."""
        response = self.stub.GetLearnedTable(pb.GetLearnedTableRequest(context=self.context), timeout=PATIENCE_S)
        [table] = response.tables
        names = ("batch_min", "batch_max", "source", "is_best")
        return [
            SimpleNamespace(length=row.speculation_length, **{name: getattr(row, name) for name in names})
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
    """One StreamReports call of a worker, a group of reports and its answer at a time."""

    def __init__(self, control: Control) -> None:
        self._requests: queue.SimpleQueue[pb.StreamReportsRequest | None] = queue.SimpleQueue()
        self._requests.put(pb.StreamReportsRequest(worker=control.identity))
        self._responses = control.stub.StreamReports(iter(self._requests.get, None))

    def send(self, reports: Iterable[pb.StepReport], until_seq: int) -> tuple[dict[int, int], list[pb.Probe]]:
        """Send reports and read until until_seq has arrived; returns changed lengths by batch size, and probes."""
        self._requests.put(pb.StreamReportsRequest(reports=reports))
        choices: dict[int, int] = {}
        probes: list[pb.Probe] = []
        for response in self._responses:
            choices.update(choices_of(response.table))
            probes += response.probes
            if response.applied_seq >= until_seq:
                return choices, probes
        raise AssertionError("the controller ended the stream")

    def close(self) -> None:
        """End the call; the controller answers until all is on disk."""
        self._requests.put(None)
        for _ in self._responses:
            pass


def generate(
    channel: grpc.Channel, prompt: str | Sequence[int], max_tokens: int, speculation: int | None = None
) -> gen.GenerateComplete:
    """Generate, greedy. speculation: None for the worker's table, 0 for plain decoding, else a fixed draft length."""
    modes = {None: gen.Speculation.MODE_AUTO, 0: gen.Speculation.MODE_OFF}
    mode = modes.get(speculation, gen.Speculation.MODE_FIXED)
    request = gen.GenerateRequest(
        sampling_params=gen.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        speculation=gen.Speculation(mode=mode, length=speculation or None),
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.tokenized.input_ids.extend(prompt)
    *_, last = gen_rpc.GenerationServiceStub(channel).Generate(request, timeout=PATIENCE_S)
    return last.complete


def server_info(channel: grpc.Channel) -> gen.GetServerInfoResponse:
    return gen_rpc.GenerationServiceStub(channel).GetServerInfo(gen.GetServerInfoRequest(), timeout=PATIENCE_S)


def rows(database: Path, query: str, *values: object) -> list[tuple]:
    """The answer of a database that a controller may be writing."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return connection.execute(query, values).fetchall()
