"""`speclen bench serve` as a person meets it: real processes once, and one sentence for whatever is wrong."""

import json
import math
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from speclen.bench.fleet.load import load_of
from speclen.cli.bench import app
from speclen.cli.replay import events
from speclen.cli.support.database import reading
from speclen.cli.support.output import UserError
from speclen.controller.analysis.replay import GroupObserved
from tests.support import tiny_models
from tests.support.control_fakes import served


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return tiny_models.save_pair("llama", tmp_path_factory.mktemp("pair"), max_position_embeddings=1024)


def test_one_command_compares_policies_on_one_worker(pair, tmp_path):
    out = tmp_path / "results" / "comparison.json"
    models = ["--target", pair[0], "--draft", pair[1], "--device", "cpu", "--threads", "1", "--max-batch-size", "4"]
    how = ["--track", "mixed", "--block-s", "2", "--minutes", "5", "--learn-s", "2", "--max-length", "2"]
    kept = ["--out", str(out), "--reports", str(tmp_path / "reports.db")]
    how += ["--compare", "adaptive,none,fixed:2,n-gram", "--repeats", "1"]
    command = [sys.executable, "-m", "speclen.cli.app", "bench", "serve", *models, *how, *kept]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(out.read_text())
    assert "equal the first policy's in every token" in done.stdout
    assert (len(printed["rounds"]), printed["errors"]) == (1, {})
    for row in printed["rounds"]:
        blocks = row["blocks"]
        assert set(blocks) == {"adaptive", "none", "fixed:2", "n-gram"}
        assert len({block["num_tokens"] for block in blocks.values()}) == 1
        assert blocks["none"]["num_proposed"] == 0
        assert blocks["fixed:2"]["num_proposed"] > 0
        assert all(block["num_steps"] > 0 and block["latency_sum_s"] > 0 for block in blocks.values())
    assert printed["outputs"]["num_compared"] > 0
    with reading(tmp_path / "reports.db") as connection:
        reported = [event for event in events(connection) if isinstance(event, GroupObserved)]
    assert sum(len(event.steps) for event in reported) > 10


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--track", "rush-hour"], "'rush-hour'"),
        (["--compare", "greedy"], "'greedy'"),
        (["--minutes", "0"], "--minutes is 0"),
        (["--capacity", "0"], "--capacity is 0"),
        (["--compare", "none", "--reports", "here.db"], "name it with --compare"),
        (["--compare", "adaptive", "--reports", f"{__file__}/here.db"], "here.db cannot be written"),
        (["--compare", "none", "--target", "/no/such/model"], "/no/such/model"),
    ],
)
def test_bad_input_is_one_sentence(arguments, words):
    found = CliRunner().invoke(app, ["serve", *arguments]).exception
    assert isinstance(found, UserError)  # which the root command prints, and exits with code 2
    assert words in str(found)
    assert "\n" not in str(found)


async def test_workers_without_a_pace_send_as_much_as_becomes_durable(tmp_path):
    async with served(tmp_path, commit_interval_s=0.05) as at:
        load = await load_of(at.address, time.perf_counter, 4, 16, math.inf, warm_up_s=0.5, seconds=2.0)
        totals = at.service.totals
        assert not totals.refused
        assert 4 * 40 * 2 < 2.0 * load.reports_per_s <= totals.num_reports
        assert load.cpu_us_per_report == pytest.approx(1e6 * load.busy / load.reports_per_s)
