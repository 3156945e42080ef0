"""Simulated workers tell a controller plausible things, and the figures of its load are what they say they are."""

import asyncio
import math
import random
import time

import pytest

from speclen.bench.fleet.load import load_of
from speclen.bench.fleet.swarm import SimulatedWorker, connect, simulated_steps
from speclen.controller.wire.ingest import read_step
from speclen.records import Limits
from tests.support.control_fakes import run, served


def test_simulated_steps_are_plausible():
    for seq, step in enumerate(simulated_steps(random.Random(3), 200), start=1):
        step.seq = seq
        assert read_step(step, Limits(32, 8)).seq == seq


def test_a_worker_that_is_cut_off_is_an_error_and_no_good_figure():
    async def story():
        async with served(None) as at:
            (channel,) = await connect(at.address, 1)
            worker = SimulatedWorker(0, simulated_steps(random.Random(0), 512), channel)
            with pytest.raises(RuntimeError, match="RegisterWorker"):
                await worker.report(4, 40.0)
            await channel.close()

    asyncio.run(story())


def test_workers_without_a_pace_send_as_much_as_becomes_durable(tmp_path):
    async def story():
        async with served(tmp_path, commit_interval_s=0.05) as at:
            load = await load_of(at.address, time.perf_counter, 4, 16, math.inf, warm_up_s=0.5, seconds=2.0)
            totals = at.service.totals
            assert not totals.refused
            assert 4 * 40 * 2 < 2.0 * load.reports_per_s <= totals.num_reports
            assert load.cpu_us_per_report == pytest.approx(1e6 * load.busy / load.reports_per_s)

    run(story)


@pytest.mark.parametrize("sample_every", [1, 4])
def test_workers_report_what_they_are_asked_for(tmp_path, sample_every):
    async def story():
        async with served(tmp_path, commit_interval_s=0.05) as at:
            at.service.sampling.sample_every, at.service.sampling.judge = sample_every, lambda: None
            load = await load_of(at.address, time.perf_counter, 10, 20, 40.0, warm_up_s=1.0, seconds=2.0)
            assert sum(at.service.totals.refused.values()) == 0
            assert load.sample_every == sample_every
            assert load.reports_per_s == pytest.approx(10 * 40 / sample_every, rel=0.6)
            assert load.messages_per_s == pytest.approx(load.reports_per_s / 20, rel=0.5)
            assert load.busy == pytest.approx(1.0, abs=0.3)
            assert 0.0 < load.call_p50_ms <= load.call_p99_ms
            assert 0.0 < load.trip_p50_ms <= load.trip_p99_ms

    run(story)
