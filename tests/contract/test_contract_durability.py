"""A report acknowledged as durable is on disk exactly once, whenever the controller is killed."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from functools import lru_cache
from pathlib import Path

import grpc
import numpy as np

from tests.contract import protocol, servers
from tests.contract.protocol import Control, ReportStream, Step
from tests.contract.simulated import step
from tests.support.waiting import PATIENCE_S
from tests.support.world import World

NUM_KILLS = 5
MAX_BEHIND = 2000


@lru_cache(maxsize=100_000)
def step_of(worker_id: str, seq: int) -> Step:
    """The step of a seq: always the same one, so that a repetition is a true one."""
    dice = np.random.default_rng([seq, *worker_id.encode()])
    return step(World(), int(dice.integers(1, 33)), int(dice.integers(0, 5)), dice)


class Reporter:
    """A worker that keeps a report until it is durable, sends it again after each death, and repeats some groups."""

    def __init__(self, worker_id: str, seed: int) -> None:
        self.worker_id = worker_id
        self.dice = random.Random(seed)
        self.last_seq = self.durable_seq = self.num_repeated = 0

    def connect(self, channel: grpc.Channel) -> None:
        """Register and send what is not acknowledged. A controller that forgot acknowledged reports fails here."""
        control = Control(channel, self.worker_id, self.worker_id)
        durable_seq = control.register().durable_seq
        assert durable_seq >= self.durable_seq, f"{self.durable_seq} was acknowledged, {durable_seq} is left"
        self.durable_seq = durable_seq
        self.stream = ReportStream(control)
        for first in range(durable_seq + 1, self.last_seq + 1, 64):
            self.send(first, min(first + 63, self.last_seq))

    def send(self, first: int, last: int) -> None:
        """One group, sometimes twice."""
        times = 2 if self.dice.random() < 0.2 else 1
        self.num_repeated += (times - 1) * (last - first + 1)
        for _ in range(times):
            group = [(seq, step_of(self.worker_id, seq)) for seq in range(first, last + 1)]
            self.durable_seq = max(self.durable_seq, self.stream.send(group, last).durable_seq)

    def go_on(self) -> None:
        """Report new steps, unless too many wait for the disk."""
        if self.last_seq - self.durable_seq > MAX_BEHIND:
            self.send(self.last_seq, self.last_seq)
            return
        first, self.last_seq = self.last_seq + 1, self.last_seq + self.dice.choice((1, 3, 16, 64))
        self.send(first, self.last_seq)


def report_until_killed(controller: servers.Server, reporters: list[Reporter], after_s: float) -> None:
    """One life of a controller, which a kill ends while everybody reports."""
    timer = threading.Timer(after_s, controller.process.kill)
    timer.start()
    with grpc.insecure_channel(controller.address) as channel, contextlib.suppress(grpc.RpcError):
        for reporter in reporters:
            reporter.connect(channel)
        while True:
            for reporter in reporters:
                reporter.go_on()
    timer.join()
    controller.process.wait()


def end_in_peace(controller: servers.Server, reporters: list[Reporter]) -> None:
    """A last life, in which everything becomes durable; then the controller is asked to stop."""
    controller.start().serving()
    with grpc.insecure_channel(controller.address) as channel:
        for reporter in reporters:
            reporter.connect(channel)
        for reporter in reporters:
            deadline = time.monotonic() + PATIENCE_S
            while reporter.durable_seq < reporter.last_seq:
                assert time.monotonic() < deadline, "never acknowledged"
                reporter.send(reporter.last_seq, reporter.last_seq)
            reporter.stream.close()
    assert controller.stop() == 0


def test_what_is_acknowledged_survives_every_kill_and_counts_once(tmp_path):
    dice = random.Random(5)
    controller = servers.controller(tmp_path, "--commit-interval-s", "0.02")
    reporters = [Reporter("first", 1), Reporter("second", 2)]
    for number in range(NUM_KILLS):
        controller.start()
        if number % 5 == 3:  # while it starts: imports, recovery, restoring
            time.sleep(dice.uniform(0.1, 0.7))
            controller.kill()
            continue
        controller.serving()
        report_until_killed(controller, reporters, dice.uniform(0.05, 0.7))
    end_in_peace(controller, reporters)
    for reporter in reporters:
        check_disk(tmp_path / "speclen.db", reporter)
    check_replay(tmp_path / "speclen.db", sum(reporter.last_seq for reporter in reporters))


def check_disk(database: Path, reporter: Reporter) -> None:
    """All that was reported is stored once and as it was."""
    stored = protocol.stored_steps(database, reporter.worker_id)
    assert [seq for seq, *_ in stored] == list(range(1, reporter.last_seq + 1)), "lost or counted twice"
    for seq, batch_size, latency_s, histogram in stored:
        sent = step_of(reporter.worker_id, seq)
        assert (batch_size, latency_s, tuple(json.loads(histogram))) == (
            sent.batch_size,
            sent.latency_s,
            sent.histogram,
        )
    health = protocol.health_of(database, reporter.worker_id)
    assert (health["durable_seq"], health["num_reports"]) == (reporter.last_seq, reporter.last_seq)
    assert (health["num_missing"], health["num_refused"]) == (0, 0)
    assert reporter.num_repeated > 0


def check_replay(database: Path, num_reports: int) -> None:
    """A replay of the stored reports repeats the decisions of the killed controllers."""
    replayed = servers.as_json("replay", "--db", str(database), "--json")
    assert replayed["exact"], replayed
    assert (replayed["num_reports"], replayed["num_stored"] > 2) == (num_reports, True)
    assert protocol.rows(database, "PRAGMA integrity_check") == [("ok",)]
    assert protocol.rows(database, "PRAGMA foreign_key_check") == []
