"""Controllers that are killed at random moments and at every step of a commit."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from chaos.fault import Place, fault
from chaos.fleet import START_S, Fleet, Program, check_database
from chaos.load import Load
from chaos.reporter import Reporter
from speclen.cli.explain import estimates_of
from speclen.cli.replay import events
from speclen.controller.analysis.replay import replay
from speclen.store.connection import connect_reader
from speclen.store.queries import contexts
from speclen.v1 import control_pb2 as pb
from tests.support import doomed
from tests.support.store_rows import rows

KILLS_PER_S = 0.8  # with all that lies between two of them, on a machine with two cores
CONTEXTS = [
    pb.ContextKey(target=target, draft=draft, device=device, dtype="float32")
    for target, draft, device in (("t", "d", "cpu:one"), ("t", "d", "cpu:two"), ("t", "other", "cpu:one"))
]


@fault("What was acknowledged as durable is on disk once, as it was sent, and the tables equal a replay of it.")
def kill_controller(place: Place) -> str:
    """The controller is killed at random moments, while it starts, and at every step of a commit, while three workers
    send reports twice and out of order."""
    points = [f"{step}:{place.dice.randint(1, 6)}" for step in doomed.STEPS]
    num_kills = max(len(points) + 4, int(place.seconds * KILLS_PER_S))
    plan = points + [""] * (num_kills - len(points))
    place.dice.shuffle(plan)
    num_reports = kill_along(place, plan)
    return f"{num_kills + 1} kills, {num_reports:,} reports acknowledged: 0 lost, 0 counted twice"


def kill_along(place: Place, plan: Sequence[str]) -> int:
    """Kill a controller once for each point of the plan, and check the database; returns the reports acknowledged."""
    with Fleet(place, 0) as fleet, ExitStack() as reporting:
        address = fleet.controller.address
        reporters = [Reporter(address, random.Random(place.dice.random()), *each) for each in enumerate(CONTEXTS, 1)]
        for reporter in reporters:
            reporting.enter_context(reporter)
            reporter.wait_for_more()
        fleet.controller.kill()
        fleet.controller.program = [doomed.__file__]
        for point in plan:
            live_and_die(fleet.controller, point, place.dice)
        fleet.controller.environment.pop("KILL_AT")
        fleet.controller.start()
        fleet.controller.wait_until_serving(START_S)
        for reporter in reporters:
            reporter.finish()
    for reporter in reporters:
        assert min(reporter.num_repeated, reporter.num_swapped) > 0, "no group was repeated or swapped"
        reporter.check_stored(fleet.database)
    check_database(fleet.database)
    check_replay(fleet.database)
    complaints = re.findall(r'.*"level": "(?:error|critical)".*', fleet.controller.log_file.read_text())
    assert not complaints, f"a controller complained: {complaints[:1]}"
    return sum(reporter.durable_seq for reporter in reporters)


def live_and_die(controller: Program, point: str, dice: random.Random) -> None:
    """Run the controller until a step of a commit, or until a random moment, which in 3 of 10 cases is before it serves."""
    controller.environment["KILL_AT"] = point
    controller.start()
    if point:
        controller.wait_for_end(60.0)
        assert controller.exit_code == -signal.SIGKILL, f"it was not killed at {point}: {controller.last_words()}"
    elif dice.random() < 0.3:  # imports, recovery, restoring
        time.sleep(dice.uniform(0.1, 1.0))
        controller.kill()
    else:
        controller.wait_until_serving(START_S)
        time.sleep(dice.expovariate(1 / 0.12))
        controller.kill()


def check_replay(database: Path) -> None:
    """A fresh estimator that makes the same calls as the killed controllers ends up with the same tables."""
    assert not rows(database, "PRAGMA foreign_key_check"), "a row refers to none"
    with closing(connect_reader(database)) as connection:
        again = replay(events(connection)).estimators
        for row in contexts(connection):
            found = [each._replace(ms_per_token=0.0) for each in estimates_of(connection, row.context_id)]
            expected = sorted(again[row.key].rows(), key=lambda each: (each.batch_min, each.arm[::-1]))
            assert found == [each._replace(ms_per_token=0.0) for each in expected], "a replay gives another table"


@fault("Workers keep serving, every token is correct, and they send their reports later; no report is lost.")
def kill_controller_under_load(place: Place) -> str:
    """The controller is killed repeatedly while two real workers serve eight clients."""
    num_kills = 0
    with Fleet(place, num_workers=2) as fleet:
        with Load([worker.address for worker in fleet.workers], 8, place.dice.randrange(2**20)) as load:
            for _ in place.rounds(2):
                num_kills += 1
                time.sleep(place.dice.uniform(0.2, 3.0))
                fleet.controller.kill()
                time.sleep(place.dice.uniform(0.0, 1.0))
                fleet.controller.start()
                fleet.controller.wait_until_serving(START_S)
        fleet.wait_until_acknowledged()
        fleet.check_idle()
    num_reports = check_database(fleet.database)
    return f"{num_kills} kills; {load.summary()}; {num_reports:,} reports on the disk, no gap, none twice"
