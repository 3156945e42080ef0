"""A network that is cut, delays, or breaks connections in the middle."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import threading
import time

from chaos.fault import Place, fault
from chaos.fleet import Fleet, check_database
from chaos.load import Load
from tests.support.waiting import until


class BadNetwork:
    """A TCP proxy. is_bad: delay, cut up and reset what passes. cut_until: nothing passes before this moment."""

    def __init__(self, target: str, dice: random.Random) -> None:
        self._target, self._dice = target, dice
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.num_reset = 0
        self.is_bad, self.cut_until = False, 0.0
        self._closed = False

    def __enter__(self) -> BadNetwork:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._closed = True
        self._server.close()

    def _accept(self) -> None:
        while not self._closed:
            with contextlib.suppress(OSError):
                near, _ = self._server.accept()
                threading.Thread(target=self._pass_on, args=(near,), daemon=True).start()

    def _pass_on(self, near: socket.socket) -> None:
        host, _, port = self._target.rpartition(":")
        ends_at = time.monotonic() + self._dice.expovariate(1 / 4.0)
        try:
            with near, socket.create_connection((host, int(port)), timeout=5) as far:
                other = {near: far, far: near}
                while not self._closed:
                    if time.monotonic() < self.cut_until:
                        time.sleep(0.05)
                        continue
                    readable, _, _ = select.select(list(other), [], [], 0.1)
                    for side in readable:
                        data = side.recv(self._dice.choice((1, 500, 4096, 65536, 65536)))
                        if not data:
                            return
                        other[side].sendall(data)
                    if not self.is_bad:
                        continue
                    time.sleep(self._dice.choice((0, 0, 0, 0, 0, 0, 0.002, 0.02)))
                    if time.monotonic() > ends_at:
                        self.num_reset += 1
                        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        return
        except OSError:
            return


def behind_a_proxy(fleet: Fleet, place: Place) -> BadNetwork:
    """Let the fleet's worker reach its controller through this proxy alone."""
    network = BadNetwork(fleet.controller.address, place.dice)
    arguments = fleet.workers[0].arguments
    arguments[arguments.index("--controller") + 1] = network.address
    return network


@fault("Every request is answered correctly meanwhile; the worker reconnects, and no report is lost.")
def partition(place: Place) -> str:
    """For a while nothing passes between controller and worker, and no connection is closed."""
    longest_s = min(20.0, max(3.0, place.seconds / 5))
    fleet = Fleet(place)
    with behind_a_proxy(fleet, place) as network, fleet:
        with Load([fleet.workers[0].address], 4, place.dice.randrange(2**20)) as load:
            for number in place.rounds(1):
                time.sleep(0.5)
                num_cuts = number + 1
                cut_s = place.dice.uniform(longest_s / 2, longest_s)
                network.cut_until = time.monotonic() + cut_s
                time.sleep(cut_s)
        fleet.wait_until_acknowledged()
        fleet.check_idle()
    num_reports = check_database(fleet.database)
    return f"{num_cuts} partitions; {load.summary()}; {num_reports:,} reports on the disk, no gap, none twice"


@fault(
    "Each report arrives once; a client whose connection broke gets UNAVAILABLE, all others get every token; slots of "
    "broken connections are freed."
)
def broken_connections(place: Place) -> str:
    """A proxy between all of them delays data, forwards single bytes, and resets connections midway."""
    fleet = Fleet(place)
    worker = fleet.workers[0]
    with behind_a_proxy(fleet, place) as network, fleet, BadNetwork(worker.address, place.dice) as near:
        network.is_bad = near.is_bad = True
        allowed = ["UNAVAILABLE", "CANCELLED", "INTERNAL"]  # by where in a frame the connection broke
        with Load([near.address, worker.address], 6, place.dice.randrange(2**20), allowed) as load:
            for _ in place.rounds(1):
                time.sleep(1.0)
            until(lambda: network.num_reset >= 2, 120.0, "that connections are broken")
        network.is_bad = False
        fleet.wait_until_acknowledged()
        fleet.check_idle()
        num_reset = near.num_reset + network.num_reset
    num_reports = check_database(fleet.database)
    return f"{num_reset} connections reset; {load.summary()}; {num_reports:,} reports on the disk, no gap, none twice"
