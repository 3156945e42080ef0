"""The figures of `speclen bench controller` count what became durable."""

import math
import time

import pytest

from speclen.bench.fleet.load import load_of
from tests.support.control_fakes import served


async def test_workers_without_a_pace_send_as_much_as_becomes_durable(tmp_path):
    async with served(tmp_path, commit_interval_s=0.05) as at:
        load = await load_of(at.address, time.perf_counter, 4, 16, math.inf, warm_up_s=0.5, seconds=2.0)
        totals = at.service.totals
        assert not totals.refused
        assert 4 * 40 * 2 < 2.0 * load.reports_per_s <= totals.num_reports
        assert load.cpu_us_per_report == pytest.approx(1e6 * load.busy / load.reports_per_s)
