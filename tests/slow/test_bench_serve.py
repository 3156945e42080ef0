"""`speclen bench serve` compares policies on one worker, in real processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from speclen.cli.replay import events
from speclen.cli.support.database import reading
from speclen.controller.analysis.replay import GroupObserved
from tests.support import tiny_models


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
