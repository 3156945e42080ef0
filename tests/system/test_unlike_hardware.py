"""Two kinds of machine behind one name, or a wrong name: found, told, and nobody else's table is touched."""

import random

from prometheus_client import CollectorRegistry, generate_latest

from speclen.cli.doctor import examine
from speclen.controller.service.metrics import ControllerCollector
from speclen.records import Table
from speclen.store.connection import connect_reader
from speclen.v1 import control_pb2 as pb
from tests.support.control_fakes import CONTEXT, registration, run, served

MACHINES = {"small": (0.020, 0.0002), "large": (0.008, 0.0040)}  # seconds of a pass, and of each token it verifies
BATCH, LONGEST, ACCEPTANCE = 8, 4, 0.8


def seconds(machine: str, length: int) -> float:
    fixed, token = MACHINES[machine]
    return fixed + 0.001 * length + token * BATCH * (length + 1)


def best(machine: str) -> int:
    """By true means."""
    tokens = [sum(ACCEPTANCE**i for i in range(length + 1)) for length in range(LONGEST + 1)]
    return max(range(LONGEST + 1), key=lambda length: tokens[length] / seconds(machine, length))


def length_of(table: tuple[Table, str]) -> int:
    """Of the arm in use."""
    return table[0].arm_for(BATCH).speculation_length


def step(dice: random.Random, seq: int, machine: str, length: int) -> pb.StepReport:
    runs = []
    for _ in range(BATCH):
        run = 0
        while run < length and dice.random() < ACCEPTANCE:
            run += 1
        runs.append(run)
    return pb.StepReport(
        seq=seq,
        batch_size=BATCH,
        speculation_length=length,
        latency_s=seconds(machine, length) * dice.lognormvariate(0.0, 0.03),
        accepted_histogram=[runs.count(run) for run in range(length + 1)],
        mean_context_length=100.0,
    )


def test_a_worker_that_says_the_wrong_device_is_found_and_spoils_nothing(tmp_path):
    """Five workers say one device, and one of them is another machine, for which other lengths are best."""
    assert best("small") != best("large")
    machines = {f"worker-{at}": "large" if at == 4 else "small" for at in range(5)}
    tables: dict[str, int] = {}

    async def story():
        dice = random.Random(1)
        async with served(tmp_path, commit_interval_s=0.05) as at:
            service = at.service
            for name in machines:
                await at.stub.RegisterWorker(registration(name))
            workers = {name: service.registry.workers[name] for name in machines}
            for first in range(1, 1200, 8):
                for name, machine in machines.items():
                    length = dice.randrange(LONGEST + 1) if first % 3 == 0 else length_of(service.table(workers[name]))
                    at.controller.servicer.intake.take(
                        workers[name], [step(dice, seq, machine, length) for seq in range(first, first + 8)]
                    )
                await service.learn_all()
            for name in machines:
                tables[name] = length_of(service.table(workers[name]))
            registry = CollectorRegistry()
            registry.register(ControllerCollector(at.controller.servicer, at.controller.journal))
            page = generate_latest(registry).decode()
            isolated = next(
                line for line in page.splitlines() if line.startswith("speclen_controller_workers_isolated")
            )
            assert isolated.endswith(" 1.0")

    run(story)
    for name, machine in machines.items():
        length = tables[name]
        lost = 1.0 - rate(machine, length) / rate(machine, best(machine))
        assert lost < 0.03, (name, machine, length, best(machine))
    connection = connect_reader(tmp_path / "test.db")
    told = [row[0] for row in connection.execute("SELECT detail FROM drift_events WHERE factor = 'worker'")]
    decided = connection.execute(
        "SELECT decision_version, speculation_length FROM decisions WHERE batch_min <= ? AND batch_max >= ?",
        (BATCH, BATCH),
    ).fetchall()
    connection.close()
    assert len({version for version, _ in decided}) == len(decided), (
        "one line of decisions: that of those who are alike"
    )
    assert decided[-1][1] == tables["worker-0"]
    assert told
    assert all("worker-4" in detail for detail in told)
    (finding, *_) = [each for each in examine(tmp_path / "test.db") if each.check == "isolated workers"]
    assert "worker-4" in finding.found
    assert finding.status == "warning"


def rate(machine: str, length: int) -> float:
    return sum(ACCEPTANCE**i for i in range(length + 1)) / seconds(machine, length)


def test_two_machines_with_one_name_are_told(tmp_path):
    other = pb.ContextKey(target="t", draft="d", device="cuda:other", dtype="float32")

    async def story():
        async with served(tmp_path, commit_interval_s=0.05) as at:
            await at.stub.RegisterWorker(registration(epoch=7, address="one:7080"))
            await at.stub.RegisterWorker(registration(epoch=8, address="one:7080"))  # started again
            assert not at.service.totals.drift
            await at.stub.RegisterWorker(registration(epoch=9, address="two:7080", context=other))
            assert at.service.totals.drift == {"worker": 1}
            at.service.registry.workers["w"].last_seen_at -= 60.0
            await at.stub.RegisterWorker(registration(epoch=10, address="three:7080"))  # moved
            assert at.service.totals.drift == {"worker": 1}

    run(story)
    (finding,) = [each for each in examine(tmp_path / "test.db") if each.check == "isolated workers"]
    assert f"two workers call themselves w: {CONTEXT.device} at one:7080 and cuda:other at two:7080" in finding.found
    assert "--worker-id" in finding.advice


def test_unlike_devices_learn_apart_and_share_acceptance(tmp_path):
    """Step times belong to a device; acceptance belongs to the pair."""
    other = pb.ContextKey(target="t", draft="d", device="cuda:other", dtype="float32")

    async def story():
        dice = random.Random(2)
        async with served(None) as at:
            await at.stub.RegisterWorker(registration("here"))
            await at.stub.RegisterWorker(registration("there", context=other))
            here, there = (at.service.registry.workers[name] for name in ("here", "there"))
            for first in range(1, 400, 8):
                for worker, machine in ((here, "small"), (there, "large")):
                    at.controller.servicer.intake.take(
                        worker, [step(dice, seq, machine, seq % (LONGEST + 1)) for seq in range(first, first + 8)]
                    )
                await at.service.learn_all()
            assert length_of(at.service.table(here)) != length_of(at.service.table(there))
            assert rate("small", length_of(at.service.table(here))) > 0.97 * rate("small", best("small"))
            assert rate("large", length_of(at.service.table(there))) > 0.97 * rate("large", best("large"))
            assert not at.service.totals.drift["worker"]

    run(story)
