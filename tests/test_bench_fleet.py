"""The fleet's benchmark: costs are of real controllers, staleness follows from them, and the game is the same for all."""

import asyncio
import json
import time

import numpy as np
import pytest
import typer
from control_fakes import run, served
from typer.testing import CliRunner

from speclen.bench.fleet.crowd import crowd
from speclen.bench.fleet.load import load_of, messages_of
from speclen.bench.fleet.quality import Setting, play
from speclen.bench.fleet.run import fleet
from speclen.bench.fleet.staleness import Costs, Workload, staleness
from speclen.bench.fleet.world import MAX_BATCH, Fleet
from speclen.v1 import control_pb2 as pb


def test_a_decision_is_no_younger_than_its_parts():
    """An idle core: half a window, half a pause between rounds of learning, and the time until the worker hears of it."""
    idle = staleness(Workload(500, 500, 0.5), Costs(1e-5, 1e-5, 1e-4, 1e-4))
    assert 0.3 < idle.p50_s < 0.7
    assert idle.p50_s < idle.p99_s < 1.05
    assert idle.busy < 0.05
    slower = staleness(Workload(500, 500, 0.5), Costs(5e-4, 5e-4, 0.05, 0.01))
    assert slower.p99_s > idle.p99_s
    assert slower.busy == pytest.approx(500 / 0.5 * 5e-4 + 0.05 / 0.2, abs=0.15)
    assert staleness(Workload(500, 500, 0.5), Costs(2e-3, 2e-3, 0.05, 0.01)).p99_s > 3.0, (
        "twice what a core can do: the queue grows"
    )


def test_what_is_sent_is_taken_whole_by_a_real_controller(tmp_path):
    async def story():
        async with served(tmp_path, commit_interval_s=0.05) as at:

            class Process:
                address = at.address

                def cpu_s(self) -> float:
                    return 1.0

            for added_up in (True, False):
                load = await load_of(Process(), 5, 4, 20, added_up)
                assert (load.num_messages, load.num_steps) == (20, 400)
            totals = at.service.totals
            assert (totals.num_reports, sum(totals.refused.values()), totals.num_missing) == (800, 0, 0)
            assert totals.num_rows < 800
            await asyncio.sleep(0.1)

    run(story)
    window = pb.StreamReportsRequest.FromString(messages_of(1, 1, 20, True)[0]).windows[0]
    assert (window.first_seq, window.last_seq) == (1, 20)


def test_a_crowd_sends_what_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("speclen.controller.service.thinning.THIN_ABOVE", 100.0)
    monkeypatch.setattr("speclen.controller.service.thinning.THICK_BELOW", 50.0)
    monkeypatch.setattr("speclen.bench.fleet.crowd.FIRST_WINDOW_S", 0.5)

    async def story():
        async with served(tmp_path, commit_interval_s=0.05) as at:

            class Process:
                address = at.address
                cpu_s = staticmethod(time.perf_counter)

            found = await crowd(Process(), 20, warm_s=6.0, measured_s=3.0)
            totals = at.service.totals
            assert (sum(totals.refused.values()), totals.num_missing) == (0, 0)
            assert found.num_workers == 20
            assert 0.2 * 800 < found.steps_per_s < 5 * 800
            assert found.messages_per_s > 1.2 * 20 / 0.5, "windows of a quarter of a second, as they are asked for"
            assert found.busy == pytest.approx(1.0, abs=0.3)
            assert 0.0 < found.call_p50_s <= found.call_p99_s

    run(story)


def test_a_fleet_is_the_same_whoever_decides_and_staleness_costs_a_little():
    world = Fleet(60, 2, 9.0, 0)
    assert world.batch.min() >= 1
    assert world.batch.max() <= MAX_BATCH
    assert np.array_equal(world.batch, Fleet(60, 2, 9.0, 0).batch)
    at_once, late = play(world, Setting(1, 1, 0)), play(world, Setting(2, 5, 8))
    assert 0.9 < late.goodput < at_once.goodput + 0.01 < 1.01


def test_the_command_prints_json_and_takes_the_costs_of_an_earlier_run(tmp_path):
    app = typer.Typer()
    app.command()(fleet)
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"ingest": {"message_s": 1e-4, "rest_s": 1e-4, "tell_s": 5e-5}}))
    options = ["--workers", "100", "--controllers", "1", "--kinds", "1", "--seconds", "6", "--no-compare"]
    options += ["--costs", str(costs)]
    result = CliRunner().invoke(app, [*options, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [point["num_workers"] for point in document["points"]] == [1, 10, 100]
    assert all(point["lost"] is None for point in document["points"])
