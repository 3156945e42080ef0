"""A network that is cut, loses one direction, delays, or breaks connections in the middle."""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from types import TracebackType

from chaos.fault import CannotRunError, Place, fault, require
from chaos.fleet import Fleet, check_database, sleep
from chaos.load import Load


class Namespace:
    """A network namespace with two links to this one: "control", on which a worker reports, and "client"."""

    def __init__(self) -> None:
        if shutil.which("ip") is None:
            raise CannotRunError("needs `ip` of iproute2 for a network namespace")
        self.name = f"speclen{os.getpid()}"
        third = os.getpid() % 200 + 20
        self.outer = {"control": f"10.213.{third}.1", "client": f"10.214.{third}.1"}
        self.inner = {link: address[:-1] + "2" for link, address in self.outer.items()}

    def __enter__(self) -> Namespace:
        try:
            self._ip("netns", "add", self.name)
            self._ip("-n", self.name, "link", "set", "lo", "up")
            for link in self.outer:
                outside, inside = self.device(link), f"{link[:4]}in"
                self._ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", self.name)
                self._ip("addr", "add", f"{self.outer[link]}/24", "dev", outside)
                self._ip("-n", self.name, "addr", "add", f"{self.inner[link]}/24", "dev", inside)
                self._ip("link", "set", outside, "up")
                self._ip("-n", self.name, "link", "set", inside, "up")
        except CannotRunError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for link in self.outer:
            with contextlib.suppress(CannotRunError):
                self._ip("link", "del", self.device(link))
        with contextlib.suppress(CannotRunError):
            self._ip("netns", "del", self.name)

    def device(self, link: str) -> str:
        return f"{link[:4]}{os.getpid() % 100000}"

    @contextlib.contextmanager
    def cut(self, link: str) -> Iterator[None]:
        """No packet passes, and nobody is told."""
        self._ip("-n", self.name, "link", "set", f"{link[:4]}in", "down")
        try:
            yield
        finally:
            self._ip("-n", self.name, "link", "set", f"{link[:4]}in", "up")

    @contextlib.contextmanager
    def deafened(self, link: str) -> Iterator[None]:
        """Packets into the namespace are lost; those out of it arrive."""
        neighbour = (self.inner[link], "dev", self.device(link))
        self._ip("neigh", "replace", *neighbour, "lladdr", "02:00:00:00:00:99", "nud", "permanent")
        try:
            yield
        finally:
            self._ip("neigh", "del", *neighbour)

    def _ip(self, *arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotRunError(f"needs the right to make network namespaces: {done.stderr.strip()}")


@fault(
    "Every request is answered rightly meanwhile; the worker finds the controller again, and not one report is lost."
)
def partition(place: Place) -> str:
    """The link between controller and worker (network namespaces) is cut, in both directions or in one alone."""
    longest_s = min(20.0, max(3.0, place.seconds / 5))
    with Namespace() as space:
        fleet = Fleet(
            place, reports_to=f"{space.outer['control']}:7201", controller=["--insecure"], worker=["--insecure"]
        )
        fleet.controller.address = f"{space.outer['control']}:7201"
        fleet.workers[0].command = ["ip", "netns", "exec", space.name]
        fleet.workers[0].address = f"{space.inner['client']}:7202"
        with fleet:
            with Load([fleet.workers[0].address], 4, place.dice.randrange(2**20)) as load:
                for times in place.rounds(2):
                    sleep(0.5)
                    with (space.cut, space.deafened)[times % 2]("control"):
                        sleep(place.dice.uniform(longest_s / 2, longest_s))
            fleet.wait_until_told()
            fleet.check_idle()
        num_reports = check_database(fleet.database)
    return f"{times + 1} partitions; {load.summary()}; {num_reports:,} reports on the disk, no gap, none twice"


class BadNetwork:
    """A TCP proxy that delays, cuts up, stalls and resets what passes."""

    def __init__(self, target: str, dice: random.Random) -> None:
        self._target, self._dice = target, dice
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.num_reset = 0
        self.peaceful = False
        self._closed = False

    def __enter__(self) -> BadNetwork:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
                    readable, _, _ = select.select(list(other), [], [], 0.1)
                    for side in readable:
                        data = side.recv(self._dice.choice((1, 500, 4096, 65536, 65536)))
                        if not data:
                            return
                        other[side].sendall(data)
                    if self.peaceful:
                        continue
                    time.sleep(self._dice.choice((0, 0, 0, 0, 0, 0, 0.002, 0.02)))
                    if time.monotonic() > ends_at:
                        self.num_reset += 1
                        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        return
        except OSError:
            return


@fault(
    "Reports arrive once each; a client whose connection broke gets UNAVAILABLE, all others every token; rows of broken "
    "connections are free again.",
)
def broken_connections(place: Place) -> str:
    """A proxy between all of them delays, passes bytes one by one, and resets connections in the middle."""
    with Fleet(place) as real:
        worker = real.workers[0]
        with BadNetwork(real.controller.address, place.dice) as network, BadNetwork(worker.address, place.dice) as near:
            worker.stop()
            worker.arguments[worker.arguments.index("--controller") + 1] = network.address
            worker.start()
            worker.wait_until_serving()
            allowed = ["UNAVAILABLE", "CANCELLED", "INTERNAL"]  # by where in a frame the connection broke
            with Load([near.address, worker.address], 6, place.dice.randrange(2**20), allowed) as load:
                for _ in place.rounds(1):
                    sleep(1.0)
                while network.num_reset < 2:
                    sleep(0.2)
            network.peaceful = True
            real.wait_until_told()
            real.check_idle()
            require(near.num_reset + network.num_reset >= 2, "no connection was broken")
            worker.stop()
            num_reset = near.num_reset + network.num_reset
            worker.start()
            worker.wait_until_serving()
    num_reports = check_database(real.database)
    return f"{num_reset} connections reset; {load.summary()}; {num_reports:,} reports on the disk, no gap, none twice"
