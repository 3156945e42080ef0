"""A disk that is full, slow or broken, and a clock that jumps, beneath a real controller."""

from __future__ import annotations

import errno
import time

import grpc

from chaos.fault import Place, fault, require, until
from chaos.fleet import SERVING, Fleet, check_database, sleep
from chaos.load import Load
from chaos.reporter import CONTEXT, Reporter
from chaos.shim import Shim
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc

STORE = "speclen.store"
DAY_S = 86_400.0


def store_is(fleet: Fleet, ok: bool) -> float:
    """Wait until the store's health says so; the seconds it took."""
    return until(lambda: (fleet.controller.health(STORE) == SERVING) is ok, f"that {STORE} is SERVING: {ok}", 40.0)


def check_waiting(fleet: Fleet, reporter: Reporter) -> None:
    """Learning goes on, nothing is acknowledged, and the controller itself is well."""
    acknowledged, sent = reporter.num_acknowledged, reporter.worker.last_seq
    until(lambda: reporter.worker.last_seq > sent + 100, "a report while the disk fails")
    require(reporter.num_acknowledged == acknowledged, "a report was acknowledged while the disk took nothing")
    require(fleet.controller.health() == SERVING, "the controller is not SERVING while its disk fails")


@fault(
    "As when the disk is full: nothing is acknowledged that is not on the disk, and it recovers by itself.", brief=True
)
def disk_errors(place: Place) -> str:
    """Writes fail with ENOSPC or EIO, or the flush after them does (fsync), at random moments."""
    shim = Shim(place.folder)
    kinds = [{"write_errno": errno.ENOSPC}, {"write_errno": errno.EIO}, {"sync_errno": errno.EIO}]
    with Fleet(place, 0, environment=shim.environment) as fleet:
        with Reporter(fleet.controller.address, place.dice, max_unacknowledged=10**6) as reporter:
            for times in place.rounds(3):
                reporter.wait_for_more()
                shim.set(**kinds[times % 3])
                store_is(fleet, False)
                check_waiting(fleet, reporter)
                shim.set()
                store_is(fleet, True)
            reporter.finish()
        reporter.check_stored(fleet.database)
        check_database(fleet.database)
    return f"{times + 1} times, {shim.num_faults} calls failed; {reporter.num_acknowledged:,} reports, all stored once"


@fault("Acknowledgements come late; lengths, registration and health do not wait for the disk.")
def disk_slow(place: Place) -> str:
    """Every flush to the disk takes one and a half seconds."""
    shim = Shim(place.folder)
    longest_s = 0.0
    with Fleet(place, 0, environment=shim.environment) as fleet:
        with Reporter(fleet.controller.address, place.dice, max_unacknowledged=10**6) as reporter:
            reporter.wait_for_more()
            shim.set(sync_delay_ms=1500)
            with grpc.insecure_channel(fleet.controller.address) as channel:
                for _ in place.rounds(20):
                    started = time.monotonic()
                    rpc.ControlServiceStub(channel).GetLearnedTable(
                        pb.GetLearnedTableRequest(context=CONTEXT), timeout=20
                    )
                    require(fleet.controller.health() == SERVING, "the controller is not SERVING with a slow disk")
                    longest_s = max(longest_s, time.monotonic() - started)
                    sleep(0.1)
            reporter.wait_for_more(1)
            shim.set()
            reporter.finish()
        reporter.check_stored(fleet.database)
    require(longest_s < 2.0, f"a call waited {longest_s:.1f} s while the disk was slow")
    return f"calls beside it took {longest_s:.2f} s at most; {reporter.num_acknowledged:,} reports, all stored once"


@fault("Nobody is taken for silent or dead, reports go on to the disk, and what was learned survives a restart.")
def clock_jumps(place: Place) -> str:
    """The controller's clock jumps by days, months and years, forwards and back, while a real worker serves."""
    shim = Shim(place.folder)
    with (
        Fleet(place, environment=shim.environment) as fleet,
        Reporter(fleet.controller.address, place.dice) as reporter,
    ):
        with Load([fleet.workers[0].address], 3, place.dice.randrange(2**20)) as load:
            for jumps in place.rounds(5):
                offset = (1, -1, 400, -400, 7300)[jumps % 5] * DAY_S
                shim.set(clock_offset_s=offset)
                reporter.wait_for_more()
                require(fleet.workers[0].info().num_reports_buffered < 3000, "a worker cannot report after a jump")
                if jumps % 5 == 3:
                    fleet.controller.stop()
                    fleet.controller.start()
                    fleet.controller.wait_until_serving()
        shim.set()
        reporter.finish()
        fleet.wait_until_told()
        reporter.check_stored(fleet.database)
    num_reports = check_database(fleet.database)
    return f"{jumps + 1} jumps; {load.summary()}; {num_reports:,} reports on the disk, no gap, none twice"
