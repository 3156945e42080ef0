"""Messages that come twice, out of order, from the past, or with numbers that are extreme and still plausible."""

from __future__ import annotations

import contextlib
import math
import random
import threading
from collections.abc import Iterator

import grpc

from chaos.fault import Place, fault, require
from chaos.fleet import SERVING, Fleet, check_database, sleep
from chaos.reporter import CONTEXT, Reporter
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc
from tests.support.kill_harness import EPOCH, step_report

LIMITS = pb.WorkerLimits(max_batch_size=32, max_speculation_length=4)


@fault(
    "Each report is learned from once, whichever stream brings it; an older life of a worker is refused.", brief=True
)
def duplicates_and_reordering(place: Place) -> str:
    """A worker repeats groups and swaps them, while its twin sends the same reports on streams of its own, in any order,
    and its own former life goes on reporting."""
    done = threading.Event()
    refused: list[str] = []
    with Fleet(place, 0) as fleet, Reporter(fleet.controller.address, place.dice) as reporter:
        reporter.wait_for_more()
        twins = [
            threading.Thread(
                target=twin, args=(fleet.controller.address, reporter, done, seed, age, refused), daemon=True
            )
            for seed, age in ((place.dice.randrange(2**20), 0), (place.dice.randrange(2**20), 1))
        ]
        for thread in twins:
            thread.start()
        for _ in place.rounds(1):
            reporter.wait_for_more(500)
        done.set()
        for thread in twins:
            thread.join(30)
        reporter.finish()
        require("FAILED_PRECONDITION" in refused, f"a former life was not refused: {set(refused)}")
        table = rpc.ControlServiceStub(grpc.insecure_channel(fleet.controller.address))
        table.GetLearnedTable(pb.GetLearnedTableRequest(context=CONTEXT), timeout=10)
        fleet.controller.stop()
        reporter.check_stored(fleet.database)
        [(_, repeated)] = counts(fleet)
        fleet.controller.start()
        fleet.controller.wait_until_serving()
    return f"{reporter.worker.last_seq:,} reports stored once, {repeated:,} repetitions left out"


def counts(fleet: Fleet) -> list[tuple[int, int]]:
    from tests.support.store_rows import rows

    return rows(fleet.database, "SELECT num_reports, num_repeated FROM workers")


def twin(address: str, reporter: Reporter, done: threading.Event, seed: int, age: int, refused: list[str]) -> None:
    """Send what the reporter has sent already, in any order. age: lives before its own."""
    dice = random.Random(seed)
    identity = pb.WorkerIdentity(worker_id=f"worker-{reporter.worker.number}", epoch=EPOCH - age)

    def messages() -> Iterator[pb.StreamReportsRequest]:
        yield pb.StreamReportsRequest(worker=identity)
        for _ in range(20):
            highest = max(1, reporter.worker.highest_acknowledged)
            seqs = [dice.randint(1, highest) for _ in range(dice.randint(1, 100))]
            yield pb.StreamReportsRequest(reports=[step_report(reporter.worker.number, seq) for seq in seqs])

    with grpc.insecure_channel(address) as channel:
        while not done.is_set():
            try:
                for _ in rpc.ControlServiceStub(channel).StreamReports(messages(), timeout=20):
                    pass
            except grpc.RpcError as error:
                refused.append(error.code().name)
            sleep(0.05)


def poisonous(dice: random.Random, seq: int) -> pb.StepReport:
    """A report that passes every check of a single one, and is a lie."""
    batch = dice.choice((1, 2, 8, 32))
    length = dice.randrange(5)
    histogram = [0] * (length + 1)
    histogram[dice.choice((0, -1))] = batch
    return pb.StepReport(
        seq=seq,
        batch_size=batch,
        speculation_length=length,
        latency_s=dice.choice((1e-9, 1e-6, 1e-6, 1e-3, 1.0, 3599.0, 3600.0, 3600.0)),
        accepted_histogram=histogram,
        mean_context_length=dice.choice((0.0, 1e-300, 1.0, 1e6, 9e8)),
        decision_version=dice.choice((0, 1, 2**63, 2**64 - 1)),
        probe_id=dice.choice((0, 0, 1, 2**64 - 1)),
        flags=dice.sample(range(6), dice.randrange(3)) if dice.random() < 0.1 else [],
    )


def poison_context(address: str, worker_id: str, dice: random.Random, done: threading.Event) -> None:
    """A worker that lies for as long as it is let; seqs leap."""
    identity, seq = pb.WorkerIdentity(worker_id=worker_id, epoch=EPOCH), 1

    def messages() -> Iterator[pb.StreamReportsRequest]:
        nonlocal seq
        yield pb.StreamReportsRequest(worker=identity)
        while not done.is_set():
            reports = []
            for _ in range(dice.randint(1, 256)):
                seq += dice.choice((1, 1, 1, 1, 2, 2**40)) if seq < 2**62 else 1
                reports.append(poisonous(dice, seq))
            yield pb.StreamReportsRequest(reports=reports)
            sleep(0.02)

    with grpc.insecure_channel(address) as channel:
        stub = rpc.ControlServiceStub(channel)
        while not done.is_set():
            with contextlib.suppress(grpc.RpcError):
                stub.RegisterWorker(
                    pb.RegisterWorkerRequest(worker=identity, context=CONTEXT, limits=LIMITS), timeout=5
                )
                for _ in stub.StreamReports(messages(), timeout=60):
                    pass
            sleep(0.1)


@fault(
    "The controller goes on, starts again from what it stored, and hands out finite tables; honest reports are stored.",
    brief=True,
)
def poison(place: Place) -> str:
    """Two workers lie in the context of an honest one: step times of a microsecond and an hour in turn, all accepted or
    nothing, contexts of 1e-300 and 9e8 tokens, seqs that leap. In between the controller is killed."""
    done = threading.Event()
    with Fleet(place, 0) as fleet, Reporter(fleet.controller.address, place.dice) as reporter:
        liars = [
            threading.Thread(
                target=poison_context,
                args=(fleet.controller.address, name, random.Random(place.dice.random()), done),
                daemon=True,
            )
            for name in ("liar-1", "liar-2")
        ]
        for thread in liars:
            thread.start()
        for number in place.rounds(2):
            reporter.wait_for_more(300)
            sleep(0.5)
            check_table(fleet.controller.address)
            if number % 2:
                fleet.controller.kill()
                fleet.controller.start()
                fleet.controller.wait_until_serving()
        done.set()
        for thread in liars:
            thread.join(30)
        reporter.finish()
        require(fleet.controller.health() == SERVING, "the controller is not SERVING after the lies")
        fleet.controller.stop()
        reporter.check_stored(fleet.database)
        num_reports = check_database(fleet.database, complete=False)
        fleet.controller.start()
        fleet.controller.wait_until_serving()
        check_table(fleet.controller.address)
    return f"{num_reports - reporter.worker.last_seq:,} lies beside {reporter.worker.last_seq:,} honest reports"


def check_table(address: str) -> None:
    """Every number of the learned table can be worked with."""
    with grpc.insecure_channel(address) as channel:
        answer = rpc.ControlServiceStub(channel).GetLearnedTable(pb.GetLearnedTableRequest(context=CONTEXT), timeout=20)
    for _, value in numbers(answer):
        require(math.isfinite(value), f"the table holds {value}")


def numbers(message: object) -> Iterator[tuple[str, float]]:
    """Every number within a message."""
    for descriptor, value in message.ListFields():  # type: ignore[attr-defined]
        values = value if descriptor.is_repeated else [value]
        for each in values:
            if descriptor.message_type is not None:
                yield from numbers(each)
            elif isinstance(each, int | float):
                yield descriptor.name, each
