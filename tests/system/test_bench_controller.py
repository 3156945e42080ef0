"""The benchmark's workers tell a controller plausible things, and its figures are what they say they are."""

import asyncio
import json
import random

import pytest
from typer.testing import CliRunner

from speclen.bench.service import swarm
from speclen.bench.service.controller import controller
from speclen.bench.service.swarm import SimulatedWorker, round_trips, simulated_steps, throughput
from speclen.controller.wire.ingest import read_step
from speclen.records import Limits
from tests.support.control_fakes import run, served


def test_simulated_steps_are_plausible_and_repeatable():
    steps = simulated_steps(random.Random(3), 200)
    for seq, step in enumerate(steps, start=1):
        step.seq = seq
        assert read_step(step, Limits(32, 8)).seq == seq
    again = simulated_steps(random.Random(3), 200)
    assert [step.latency_s for step in steps] == [step.latency_s for step in again]


def test_every_report_sent_is_taken_and_durable(tmp_path):
    async def story():
        async with served(tmp_path) as at:
            started = []
            num, seconds = await throughput(at.address, 4, 16, 1000, 0, lambda: started.append(True))
            assert started == [True]
            assert num == 4 * 16 * (1000 // 64)
            assert seconds > 0
            assert at.service.totals.num_reports == num
            assert not at.service.totals.refused

    run(story)


def test_every_paced_report_has_a_round_trip():
    async def story():
        async with served(None) as at:
            trips = await round_trips(at.address, 3, 50.0, 1.0, 0, 0.2, lambda: None)
            assert trips.num == 3 * 50
            assert 0 < trips.p50_ms <= trips.p99_ms <= trips.p999_ms <= trips.max_ms

    run(story)


def test_a_worker_that_is_cut_off_is_an_error_and_no_good_figure():
    async def story():
        async with served(None) as at:
            worker = SimulatedWorker(0, simulated_steps(random.Random(0), 8))
            (channel,) = await swarm.connect(at.address, 1)
            with pytest.raises(Exception, match="RegisterWorker"):
                await worker.flood(channel, [worker.message(4)])
            await channel.close()

    asyncio.run(story())


def test_the_command_prints_json():
    import typer

    app = typer.Typer()
    app.command()(controller)
    options = ["--reports", "640", "--workers", "2", "--paced-workers", "2", "--seconds", "1", "--warm-up-s", "0"]
    result = CliRunner().invoke(app, [*options, "--repeats", "1", "--no-pin", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    for storage in ("sqlite", "off"):
        figures = document["storage"][storage]
        assert figures["reports_per_s"]["median"] > 0
        assert figures["round_trips"] == 80
    assert document["machine"]["cores"] >= 1
