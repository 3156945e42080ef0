"""Bad input of `speclen bench serve` is one sentence, and the load of `bench fleet` is measured correctly."""

import math
import time

import pytest
from typer.testing import CliRunner

from speclen.bench.fleet import load_of
from speclen.cli.bench import app
from speclen.cli.support.output import UserError
from tests.support.control_fakes import served


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


async def test_simulated_workers_at_full_speed_report_what_becomes_durable(tmp_path):
    async with served(tmp_path, commit_interval_s=0.05) as at:
        load = await load_of(at.address, time.perf_counter, 4, 16, math.inf, warm_up_s=0.5, seconds=2.0)
        totals = at.service.totals
        assert not totals.refused
        assert 4 * 40 * 2 < 2.0 * load.reports_per_s <= totals.num_reports
        assert load.cpu_us_per_report == pytest.approx(1e6 * load.busy / load.reports_per_s)
