"""Processes that die or stand still at random moments."""

from __future__ import annotations

import signal

import grpc

from chaos.fault import Place, fault, until
from chaos.fleet import SERVING, Fleet, check_database, paused, sleep
from chaos.load import Load
from speclen.store.failpoints import FAILPOINTS
from tests.support import kill_harness
from tests.support.kill_checks import check

KILLS_PER_S = 0.8  # with all that lies between two of them, on a machine with two cores


@fault(
    "What was acknowledged as durable is on the disk once, as it was sent, and the tables are a replay of it.",
    weight=3,
    brief=True,
)
def kill_controller(place: Place) -> str:
    """The controller is killed at random moments, while it starts, and at every step of a commit, while three workers
    report, repeat groups and let them overtake each other."""
    lane = kill_harness.Lane(place.folder / "lane", place.dice.randrange(2**20))
    points = [f"{name}:{lane.dice.randint(1, 6)}" for name in FAILPOINTS if name != "after_vacuum"]
    num_kills = max(4, int(place.seconds * KILLS_PER_S))
    lane.dice.shuffle(points)
    points = points[: num_kills // 2]
    lane.run(points, num_kills - len(points))
    check(lane)
    reports = sum(worker.num_acknowledged for worker in lane.workers)
    return f"{lane.num_kills} kills, {reports:,} reports acknowledged: 0 lost, 0 counted twice"


@fault("Workers go on serving, every token right, and hand in later what they have to report; not one report is lost.")
def kill_controller_under_load(place: Place) -> str:
    """The controller is killed again and again beneath two real workers that serve eight clients."""
    num_kills = 0
    with Fleet(place, num_workers=2) as fleet:
        with Load([worker.address for worker in fleet.workers], 8, place.dice.randrange(2**20)) as load:
            for _ in place.rounds(2):
                num_kills += 1
                sleep(place.dice.uniform(0.2, 3.0))
                fleet.controller.kill()
                sleep(place.dice.uniform(0.0, 1.0))
                fleet.controller.start()
                fleet.controller.wait_until_serving()
        fleet.wait_until_told()
        fleet.check_idle()
    num_reports = check_database(fleet.database)
    return f"{num_kills} kills; {load.summary()}; {num_reports:,} reports on the disk, no gap, none twice"


@fault("Only requests on the killed worker fail, as UNAVAILABLE; the other serves on, and nothing is counted twice.")
def kill_worker_under_load(place: Place) -> str:
    """One of two real workers is killed while both serve, and started again under its name."""
    num_kills = 0
    with Fleet(place, num_workers=2) as fleet:
        addresses = [worker.address for worker in fleet.workers]
        with Load(addresses, 8, place.dice.randrange(2**20), allowed=["UNAVAILABLE"]) as load:
            for _ in place.rounds(1):
                num_kills += 1
                sleep(place.dice.uniform(0.5, 3.0))
                worker = place.dice.choice(fleet.workers)
                worker.kill()
                worker.start()
                worker.wait_until_serving()
        fleet.wait_until_told()
        fleet.check_idle()
    num_reports = check_database(fleet.database)
    return f"{num_kills} kills; {load.summary()}; {num_reports:,} reports on the disk, none twice"


@fault(
    "A worker waits for no controller; one that went on is used again; reports wait for it. A worker that was stopped "
    "answers late, but rightly.",
    brief=True,
)
def stop_and_continue(place: Place) -> str:
    """Controller and worker are in turn stopped (SIGSTOP) for up to eight seconds while clients ask, and go on."""
    with Fleet(place) as fleet:
        with Load([fleet.workers[0].address], 4, place.dice.randrange(2**20)) as load:
            for num_stops in place.rounds(2):
                program = fleet.programs[num_stops % 2]
                before, longest = load.num_answered, min(8.0, max(1.0, place.seconds / 4))
                with paused(program):
                    sleep(place.dice.uniform(longest / 2, longest))
                    if program is fleet.controller:
                        until(
                            lambda before=before: load.num_answered > before,
                            "an answer while the controller stood still",
                        )
                until(lambda: health_of(fleet) == [SERVING] * 2, "health after SIGCONT")
                sleep(0.5)
        fleet.wait_until_told()
        fleet.check_idle()
    num_reports = check_database(fleet.database)
    return f"{num_stops + 1} stops; {load.summary()}; {num_reports:,} reports on the disk, no gap, none twice"


def health_of(fleet: Fleet) -> list[int]:
    try:
        return [program.health() for program in fleet.programs]
    except grpc.RpcError:
        return []


@fault(
    "What runs is finished, and the process ends with 0. What comes is refused as UNAVAILABLE, or as CANCELLED by gRPC "
    "itself in the instant in which the port closes; nothing is answered halfway."
)
def terminate_worker_under_load(place: Place) -> str:
    """A worker gets SIGTERM while its clients ask."""
    num_ends = 0
    with Fleet(place) as fleet:
        worker = fleet.workers[0]
        with Load([worker.address], 6, place.dice.randrange(2**20), ["UNAVAILABLE", "CANCELLED"]) as load:
            for _ in place.rounds(1):
                num_ends += 1
                sleep(place.dice.uniform(0.5, 2.0))
                worker.stop()
                worker.start()
                worker.wait_until_serving()
    num_reports = check_database(fleet.database, complete=False)
    signals = signal.SIGTERM.name
    return f"{num_ends} times {signals}, exit code 0; {load.summary()}; {num_reports:,} reports on the disk, none twice"
