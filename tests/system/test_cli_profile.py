"""`speclen profile` from measuring to importing: unfinished or foreign profiles are refused for this context."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import speclen.cli.profile
import speclen.cli.profile_measure
from speclen.cli.profile import analyse
from speclen.cli.profile_import import Destination, import_request
from speclen.cli.support.client import Client
from speclen.cli.support.database import reading
from speclen.cli.support.output import UserError
from speclen.records import ContextKey, Limits, Profile, ProfileCell
from speclen.store import transaction
from speclen.store.database import StoreConfig
from speclen.store.queries import contexts, stored_profiles, view_rows
from speclen.store.retention import KEEP_REPORTS
from speclen.store.schema import Commit
from speclen.store.transaction import RefusedError
from speclen.v1 import control_pb2 as pb
from speclen.worker.arms import ArmTable
from speclen.worker.profiling.file import ProfileDocument, foreign_parts, read_document, table_from_file
from speclen.worker.profiling.profiler import ProfileSamples
from tests.support.store_rows import NOW, context, report, rows, worker, written

KEY = ContextKey("t#1", "d#1", "cpu:test", "float32", "threads=1")


def call(*arguments: object) -> Any:
    """Runs the verb; errors of the user are raised."""
    return CliRunner().invoke(speclen.cli.profile.app, [str(a) for a in arguments], catch_exceptions=False)


def fail(*arguments: object) -> str:
    with pytest.raises(UserError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def models(folders: tuple[str, str]) -> list[object]:
    return ["--target", folders[0], "--draft", folders[1], "--device", "cpu", "--dtype", "float32", "--threads", 1]


@pytest.fixture(scope="module")
def measured(folders, tmp_path_factory):
    """A folder with a database, into which one profile was run."""
    data = tmp_path_factory.mktemp("data")
    grid = ["--batch-sizes", "1,2-3", "--lengths", "0-2", "--budget-s", 4]
    result = call("run", *models(folders), *grid, "--db", data / "s.db", "--out", data / "p.json")
    assert result.exit_code == 0
    assert "gain over 0" in result.stdout
    assert "our estimator" in result.stdout
    return data


def test_a_run_is_stored_seeds_the_estimator_and_is_readable_as_file(measured):
    with reading(measured / "s.db") as connection:
        (stored,) = stored_profiles(connection)
        rows = view_rows(connection, "learned_table")
    document = read_document(measured / "p.json")
    assert tuple((c.batch_size, c.speculation_length) for c in document.profile.cells) == tuple(
        (b, s) for b in (1, 2, 3) for s in (0, 1, 2)
    )
    assert [c.step_s for c in stored.profile.cells] == [c.step_s for c in document.profile.cells]
    assert stored.profile.survival == document.profile.survival
    assert {"machine", "settings", "command", "commit", "uncommitted_changes"} <= document.details.keys()
    assert {row["source"] for row in rows} == {"profile"}
    assert sum(row["is_best"] for row in rows) == len({row["batch_bucket"] for row in rows})


def test_a_worker_without_controller_starts_from_the_same_file(measured):
    table = table_from_file(measured / "p.json", Limits(3, 2))
    assert isinstance(table, ArmTable)
    best = {batch.batch_size: batch.best_length for batch in analyse(read_document(measured / "p.json"))}
    assert {size: table.arms[size].speculation_length for size in best} == best


def test_a_worker_says_when_its_profile_was_measured_elsewhere(measured):
    context = pb.ContextKey(**json.loads((measured / "p.json").read_text())["context"])
    assert foreign_parts(measured / "p.json", context) == []
    context.dtype = "bfloat16"
    assert foreign_parts(measured / "p.json", context) == ["dtype 'float32' instead of 'bfloat16'"]


def test_show_export_and_plot_agree_with_the_file(measured, tmp_path):
    shown = json.loads(call("show", "--db", measured / "s.db", "--json").stdout)
    assert [best["batch_size"] for best in shown["best"]] == [1, 2, 3]
    assert json.loads(call("export", "1", "--db", measured / "s.db").stdout)["cells"] == shown["cells"]
    assert "* is least" in call("show", measured / "p.json").stdout
    for suffix in ("png", "svg"):
        path = tmp_path / f"plot.{suffix}"
        call("plot", measured / "p.json", "--out", path)
        assert path.stat().st_size > 5000


def test_an_unreadable_file_or_name_is_reported(measured, tmp_path):
    db = measured / "s.db"
    assert "holds no profile 9; there are 1" in fail("show", "9", "--db", db)
    assert "cannot read the profile" in fail("show", tmp_path / "missing.json")
    assert "use .png, .svg" in fail("plot", "1", "--db", db, "--out", tmp_path / "plot.xyz")


def test_import_seeds_the_same_context_elsewhere(measured, folders, tmp_path):
    db = tmp_path / "other.db"
    said = call("import", measured / "p.json", *models(folders), "--db", db, "--json")
    assert json.loads(said.stdout)["num_cells"] == 9
    with reading(db) as connection:
        (stored,) = contexts(connection)
    assert stored.key == read_document(measured / "p.json").context


def test_a_profile_of_another_context_is_only_taken_as_a_prior(measured, folders, tmp_path, monkeypatch):
    db = tmp_path / "other.db"
    other = [*models(folders)[:-1], 2]
    message = fail("import", measured / "p.json", *other, "--db", db)
    assert "engine_fingerprint" in message
    assert "--as-prior" in message
    message = fail("import", measured / "p.json", *models((folders[1], folders[0])), "--db", db)
    assert "target" in message
    assert not db.exists()
    call("import", measured / "p.json", *other, "--db", db, "--as-prior")
    assert "threads=2" in rows(db, "SELECT engine_fingerprint FROM contexts")[0][0]
    # Known by now: no model is loaded, and no torch imported.
    monkeypatch.delattr(speclen.cli.profile, "load")
    assert "threads=2" in call("import", measured / "p.json", *other, "--db", db, "--as-prior").stdout
    assert rows(db, "SELECT count(*) FROM contexts") == [(1,)]


def change(content: dict[str, Any], path: Sequence[object], value: object) -> dict[str, Any]:
    changed = json.loads(json.dumps(content))
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["format"], "something"),
        (["version"], 2),
        (["cells"], []),
        (["cells", 0, "step_s"], -1.0),
        (["cells", 0, "step_s"], float("nan")),
        (["cells", 0, "batch_size"], 0),
        (["cells", 1, "speculation_length"], 0),
        (["cells", 0, "colour"], "red"),
        (["survival"], [0.5, 0.9]),
        (["survival"], "high"),
        (["num_survival_rows"], [1]),
        (["context"], {"target": "t"}),
    ],
)
def test_files_that_are_not_a_profile_are_refused(measured, tmp_path, path, value):
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(change(json.loads((measured / "p.json").read_text()), path, value)))
    assert "bad.json" in fail("show", file)
    file.write_text("[1, 2]")
    assert "bad.json" in fail("show", file)
    file.write_text("{")
    assert "not JSON" in fail("show", file)


def test_an_interrupted_run_makes_no_profile(folders, tmp_path, monkeypatch):
    def interrupted(self: ProfileSamples, step: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ProfileSamples, "add", interrupted)
    run = ["run", *models(folders), "--batch-sizes", "1", "--lengths", "0", "--budget-s", 3]
    assert call(*run, "--db", tmp_path / "s.db").exit_code == 130
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--batch-sizes", "0"], "--batch-sizes '0'"),
        (["--batch-sizes", "4-x"], "--batch-sizes '4-x'"),
        (["--batch-sizes", "1-99999999999999"], "--batch-sizes '1-99999999999999' must lie between"),
        (["--batch-sizes", "4-2"], "--batch-sizes '4-2' must lie between"),
        (["--lengths", "0-65"], "--lengths '0-65'"),
        (["--lengths", "5-2"], "--lengths '5-2'"),
        (["--lengths", "0,64"], "context of 256"),
        (["--target", "/nowhere"], "no such directory"),
        (["--prompts", "/no/prompts.txt"], "/no/prompts.txt"),
    ],
)
def test_bad_settings_are_named(folders, tmp_path, arguments, reason):
    assert reason in fail("run", *models(folders), "--no-store", "--db", tmp_path / "s.db", *arguments)


CELLS = tuple(
    ProfileCell(b, s, 0.010 + 0.001 * s + 0.0005 * s * b, 1e-5, 20, 100.0) for b in (1, 2, 8) for s in range(4)
)
PROFILE = Profile(CELLS, (0.7, 0.5, 0.4), (100, 70, 50), source="made up")
DOCUMENT = ProfileDocument(KEY, PROFILE, "2026-01-01T00:00:00")


def test_analysis_marks_the_least_time_per_token_and_what_the_estimator_loses():
    analysis = analyse(DOCUMENT)
    one, _, eight = analysis
    # Batch 1: 10, 11.5 / 1.7, 13 / 2.2, 14.5 / 2.6 ms per token.
    assert one.ms_per_token == pytest.approx({0: 10.0, 1: 11.5 / 1.7, 2: 13 / 2.2, 3: 14.5 / 2.6})
    assert (one.best_length, one.gain) == (3, pytest.approx(10 / (14.5 / 2.6)))
    # Batch 8: 10, 15 / 1.7, 20 / 2.2, 25 / 2.6.
    assert eight.best_length == 1
    for batch in analysis:
        assert batch.estimator_excess < 0.1


def own_import(db: Path) -> int:
    """Import a made-up profile while no controller runs."""
    return Destination(db, "", Client()).take(import_request(PROFILE, KEY))


def test_a_profile_that_the_database_refuses_is_an_error(tmp_path, monkeypatch):
    """Story: `profile import` printed the number of a profile that was not stored."""

    def refuse(*_: object) -> None:
        raise RefusedError("the database refuses a row of profiles")

    monkeypatch.setattr(transaction, "_insert_profiles", refuse)
    with pytest.raises(UserError, match=r"s\.db lacks what was learned last: the database refuses a row of profiles"):
        own_import(tmp_path / "s.db")
    monkeypatch.undo()
    assert own_import(tmp_path / "s.db") == 1


def test_an_import_without_a_controller_deletes_no_report(tmp_path):
    """Retention is the controller's decision; it may be configured to keep reports for years."""
    reports = [report(seq, received_at=NOW - 400 * 86_400.0) for seq in (1, 2, 3)]
    commit = Commit(contexts=[context()], workers=[worker(3)], reports=reports)
    own_import(written(tmp_path / "s.db", commit, config=StoreConfig(retention=KEEP_REPORTS)))
    assert rows(tmp_path / "s.db", "SELECT seq FROM step_reports") == [(1,), (2,), (3,)]
