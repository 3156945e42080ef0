"""The load of `speclen bench controller` is taken whole."""

import time

import pytest

from speclen.bench.fleet.load import throughput
from tests.support.control_fakes import run, served


class Process:
    """The controller of this process: its processor time is all of it."""

    def __init__(self, address):
        self.address = address

    def cpu_s(self):
        return time.perf_counter()


def test_every_report_sent_is_taken_and_durable(tmp_path):
    async def story():
        async with served(tmp_path) as at:
            found = await throughput(Process(at.address), 4, 16, 1000)
            assert at.service.totals.num_reports == 4 * 16 * (1000 // 64)
            assert not at.service.totals.refused
            assert found.reports_per_s == pytest.approx(1e6 / found.cpu_us_per_report, rel=0.01)

    run(story)
