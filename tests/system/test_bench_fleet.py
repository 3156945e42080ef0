"""Simulated fleets report to a real controller as they are asked to."""

import time

import pytest

from speclen.bench.fleet.run import load_of
from tests.support.control_fakes import run, served


@pytest.mark.parametrize("sample_every", [1, 4])
def test_workers_report_what_they_are_asked_for(tmp_path, sample_every):
    async def story():
        async with served(tmp_path, commit_interval_s=0.05) as at:
            at.service.sampling.sample_every, at.service.sampling.judge = sample_every, lambda: None

            class Process:
                address = at.address
                cpu_s = staticmethod(time.perf_counter)

            load = await load_of(Process(), 10, warm_up_s=1.0, seconds=2.0)
            totals = at.service.totals
            assert sum(totals.refused.values()) == 0
            assert (load.num_workers, load.sample_every) == (10, sample_every)
            assert load.reports_per_s == pytest.approx(10 * 40 / sample_every, rel=0.6)
            assert load.messages_per_s == pytest.approx(load.reports_per_s / 20, rel=0.3)
            assert load.busy == pytest.approx(1.0, abs=0.3)
            assert 0.0 < load.call_p50_ms <= load.call_p99_ms

    run(story)
