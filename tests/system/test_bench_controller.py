"""Simulated workers tell a controller plausible things, and the figures of its load are what they say they are."""

import time

import pytest

from speclen.bench.fleet.load import load_of, throughput
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


@pytest.mark.parametrize("sample_every", [1, 4])
def test_workers_report_what_they_are_asked_for(tmp_path, sample_every):
    async def story():
        async with served(tmp_path, commit_interval_s=0.05) as at:
            at.service.sampling.sample_every, at.service.sampling.judge = sample_every, lambda: None
            load = await load_of(Process(at.address), 10, 20, warm_up_s=1.0, seconds=2.0)
            assert sum(at.service.totals.refused.values()) == 0
            assert (load.num_workers, load.sample_every) == (10, sample_every)
            assert load.reports_per_s == pytest.approx(10 * 40 / sample_every, rel=0.6)
            assert load.messages_per_s == pytest.approx(load.reports_per_s / 20, rel=0.3)
            assert load.busy == pytest.approx(1.0, abs=0.3)
            assert 0.0 < load.call_p50_ms <= load.call_p99_ms
            assert 0.0 < load.trip_p50_ms <= load.trip_p99_ms

    run(story)
