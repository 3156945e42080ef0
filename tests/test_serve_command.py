"""`speclen bench serve` as a person meets it: real processes once, and one sentence for whatever is wrong."""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_models
from typer.testing import CliRunner

from speclen.bench.serving.survey import Survey
from speclen.cli.bench import app
from speclen.console.errors import UserError

SPELLED = "for=3 load=0.5"


def speclen(*arguments, timeout=280):
    command = [sys.executable, "-m", "speclen.cli.app", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return tiny_models.save_pair("llama", tmp_path_factory.mktemp("pair"), max_position_embeddings=512)


@pytest.fixture
def survey(tmp_path):
    """As if it had been measured: a slow machine, so that few requests make a track."""
    found = Survey()
    for key in [(1, 0), (1, 1), (4, 0), (4, 1)]:
        found.tokens[key], found.seconds[key], found.steps_yield[key] = 300 + 10 * sum(key), 1.0, [1.0 + key[1]]
    found.save(tmp_path / "survey.json", {"context": {"device": "cpu", "dtype": "float32"}})
    return tmp_path / "survey.json"


def test_one_command_compares_policies_on_real_processes(pair, survey, tmp_path):
    target, draft = pair
    out = tmp_path / "results" / "comparison.json"
    done = speclen(
        *("serve", "--track", SPELLED, "--compare", "oracle@local,adaptive", "--repeats", "1"),
        *("--target", target, "--draft", draft, "--device", "cpu", "--threads", "1"),
        *("--max-batch-size", "4", "--max-length", "1", "--survey", str(survey)),
        *("--out", str(out), "--save-track", str(tmp_path / "track.json"), "--json"),
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed == json.loads(out.read_text())
    oracle, adaptive = printed["runs"]
    for run in (oracle, adaptive):
        assert run["failures"] == {}
        assert run["num_counted"] == run["latency"]["count"] > 3
        assert 0 < run["ttft"]["mean"] < run["latency"]["mean"]
        assert run["mean_batch_size"] >= 1
    # By the survey, length 1 serves fastest at every batch size: the oracle never uses another.
    assert oracle["mean_length"] == pytest.approx(1.0, abs=0.1)
    assert "controller" in adaptive["cpu_share"]
    assert "controller" not in oracle["cpu_share"]
    assert any("too short for its intervals" in note for note in printed["notes"])
    assert json.loads((tmp_path / "track.json").read_text())["duration_s"] == 3.0


def children_of(pid):
    """Processes that this one has started, by /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text("utf-8", errors="replace").rpartition(")")[2].split()[1]) == pid:
                found.append(stat.parent)
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_sigterm_leaves_no_processes_behind(pair, survey):
    target, draft = pair
    command = [sys.executable, "-m", "speclen.cli.app", "bench", "serve", "--track", SPELLED, "--compare", "adaptive"]
    command += ["--repeats", "1", "--target", target, "--draft", draft, "--device", "cpu", "--survey", str(survey)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as bench:
        deadline = time.monotonic() + 120
        while len(children := children_of(bench.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(children) == 2, "a controller and a worker"
        bench.terminate()
        bench.communicate(timeout=60)
    assert bench.returncode != 0
    assert not [child for child in children if child.exists()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--track", "rush-hour"], "'rush-hour'"),
        (["--compare", "greedy"], "'greedy'"),
        (["--compare", "profile"], "speclen profile run"),
        (["--track", "wrong-profile"], "--profile FILE"),
        (["--track", SPELLED, "--survey", __file__], "is not a survey"),
        (["--track", __file__, "--compare", "none"], "is not a saved track"),
        (["--compare", "none", "--target", "/no/such/model"], "/no/such/model"),
    ],
)
def test_bad_input_is_one_sentence(arguments, words):
    found = CliRunner().invoke(app, ["serve", "--survey", "/no/such/survey.json", *arguments]).exception
    assert isinstance(found, UserError)  # which the root command prints, and exits with code 2
    assert words in str(found)
    assert "\n" not in str(found)


def test_a_wrong_profile_must_be_from_elsewhere(survey, tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"context": {"device": "cpu", "dtype": "float32"}}))
    arguments = ["--track", "wrong-profile", "--survey", str(survey), "--profile", str(profile)]
    found = CliRunner().invoke(app, ["serve", "--compare", "adaptive,profile", *arguments]).exception
    assert isinstance(found, UserError)
    assert f"{profile} was measured on this one" in str(found)


def test_the_overview_of_benchmarks_needs_no_model_library():
    code = (
        "import sys, typer; from speclen.cli.bench import app; group = typer.main.get_command(app)\n"
        "try: group(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert all(verb in done.stdout for verb in ("serve", "step", "policy", "controller"))
