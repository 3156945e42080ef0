"""Learned state moved to another database gives a controller that decides as the first one would."""

from __future__ import annotations

import json

import pytest
from database_rows import KEY, estimator, write_database
from store_rows import NOW, context, report, rows, store_now, worker

from speclen.cli.export import export_state
from speclen.cli.import_state import import_state
from speclen.console.errors import UserError
from speclen.controller.estimator.core import Limits, StepObservation
from speclen.controller.estimator.estimator import Estimator
from speclen.store.database import Store, StoreConfig
from speclen.store.records import Commit, StateRow, StoredState
from speclen.store.retention import KEEP_REPORTS


def load(path) -> StoredState:
    store = Store.open(path)
    stored = store.load()
    store.close()
    return stored


@pytest.fixture
def exported(tmp_path):
    database = write_database(tmp_path / "old.db")
    export_state(tmp_path / "learned.json", database, context="")
    return tmp_path / "learned.json"


def restored(path) -> Estimator:
    states = load(path).states
    controller = Estimator()
    pair = json.loads(states["pair", json.dumps(KEY.pair)])
    controller.restore(KEY, Limits(32, 4), json.loads(states["context", "1"]), pair)
    return controller


def test_an_import_goes_on_exactly_where_the_export_stopped(tmp_path, exported):
    import_state(exported, tmp_path / "new.db", replace_known=False)
    more = [StepObservation(4, 1, 0.015, (2, 2)) for _ in range(50)]
    original, moved = estimator(), restored(tmp_path / "new.db")
    assert original.observe(KEY, more, "w").decisions == moved.observe(KEY, more, "w").decisions
    assert original.learned_rows(KEY) == moved.learned_rows(KEY)


def test_the_tables_move_along_and_raw_reports_stay(tmp_path, exported):
    import_state(exported, tmp_path / "new.db", replace_known=False)
    query = "SELECT context, batch_bucket, speculation_length, ms_per_token, is_best FROM learned_table"
    assert rows(tmp_path / "new.db", query) == rows(tmp_path / "old.db", query)
    assert rows(tmp_path / "new.db", "SELECT * FROM acceptance") == rows(
        tmp_path / "old.db", "SELECT * FROM acceptance"
    )
    assert rows(tmp_path / "new.db", "SELECT count(*) FROM step_reports") == [(0,)]


def test_a_known_context_is_only_replaced_when_told(tmp_path, exported):
    import_state(exported, tmp_path / "new.db", replace_known=False)
    store = Store.open(tmp_path / "new.db")
    store_now(store, Commit(contexts=[context(decision_version=9)]))
    store.close()
    with pytest.raises(UserError, match=r"t \| d \| cpu:test \| float32 \|  is known here already: give --replace"):
        import_state(exported, tmp_path / "new.db", replace_known=False)
    assert load(tmp_path / "new.db").contexts[0].decision_version == 9
    import_state(exported, tmp_path / "new.db", replace_known=True)
    assert load(tmp_path / "new.db").contexts[0].decision_version == 1
    assert rows(tmp_path / "new.db", "SELECT count(*) FROM learned_table") == [(4,)]


def test_an_import_lets_no_report_go(tmp_path, exported):
    """How many are kept is for the controller to say, and it may have been told to keep them for years."""
    store = Store.open(tmp_path / "new.db", StoreConfig(retention=KEEP_REPORTS))
    reports = [report(seq, context_id=5, received_at=NOW - 400 * 86_400.0) for seq in (1, 2, 3)]
    known = Commit(contexts=[context(5, "gpu")], workers=[worker(3, context_id=5)], reports=reports)
    assert store_now(store, known) is None
    store.close()
    import_state(exported, store.path, replace_known=False)
    assert rows(store.path, "SELECT seq FROM step_reports") == [(1,), (2,), (3,)]


def test_a_known_pair_keeps_its_own_acceptance(tmp_path, exported, capsys):
    store = Store.open(tmp_path / "new.db")
    own = json.dumps(estimator(num_steps=7).export_pair_state(KEY.pair))
    states = [StateRow("pair", json.dumps(KEY.pair), own, 1.0)]
    store_now(store, Commit(contexts=[context(5, "gpu")], states=states))
    store.close()
    import_state(exported, tmp_path / "new.db", replace_known=False)
    stored = load(tmp_path / "new.db")
    assert [(row.context_id, row.device) for row in stored.contexts] == [(5, "gpu"), (6, "cpu:test")]
    assert stored.states["pair", json.dumps(KEY.pair)] == own
    assert "its own acceptance was kept" in capsys.readouterr().err


def test_a_database_in_use_is_refused(tmp_path, exported):
    store = Store.open(tmp_path / "new.db")
    with pytest.raises(UserError, match="in use by another controller"):
        import_state(exported, tmp_path / "new.db", replace_known=False)
    store.close()


def test_export_works_beside_a_controller_and_prints_without_a_file(tmp_path, exported, capsys):
    store = Store.open(tmp_path / "old.db")
    capsys.readouterr()
    export_state(None, tmp_path / "old.db", context="cpu")
    document = json.loads(capsys.readouterr().out)
    assert {**document, "exported_at": 0} == {**json.loads(exported.read_text()), "exported_at": 0}
    with pytest.raises(UserError, match="no context contains 'tpu'"):
        export_state(None, tmp_path / "old.db", context="tpu")
    store.close()


def broken(change) -> str:
    def apply(document: dict) -> str:
        change(document)
        return json.dumps(document)

    return apply


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda document: "{", "is not JSON"),
        (lambda document: "[]", "is not a file that `speclen export` wrote"),
        (broken(lambda document: document.update(version=99)), "has version 99, this speclen reads 1"),
        (broken(lambda document: document["contexts"][0].pop("device")), "is damaged"),
        (broken(lambda document: document["contexts"][0].update(max_batch_size="many")), "is damaged"),
        (broken(lambda document: document["contexts"][0]["state"].pop("times")), "is damaged"),
        (broken(lambda document: document["contexts"][0]["latency_cells"][0].pop("step_s")), "is damaged"),
        (broken(lambda document: document["pairs"].clear()), "is damaged"),
    ],
)
def test_a_file_that_no_controller_could_use_is_refused_and_changes_nothing(tmp_path, exported, spoil, words):
    exported.write_text(spoil(json.loads(exported.read_text())))
    with pytest.raises(UserError, match=words):
        import_state(exported, tmp_path / "new.db", replace_known=False)
    assert not (tmp_path / "new.db").exists() or load(tmp_path / "new.db").contexts == ()


def test_a_database_is_never_replaced_by_an_export(tmp_path, exported):
    """FILE is what is written; who took it for the database to read lost all that was learned."""
    before = (tmp_path / "old.db").read_bytes()
    with pytest.raises(UserError, match="is a database and stays"):
        export_state(tmp_path / "old.db", tmp_path / "old.db", context="")
    assert (tmp_path / "old.db").read_bytes() == before


def test_an_export_that_cannot_be_written_leaves_the_last_one(tmp_path, exported, monkeypatch):
    before = exported.read_text()

    def full(file, text, encoding):
        file.write_bytes(text[:100].encode())
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("pathlib.Path.write_text", full)
        with pytest.raises(UserError, match=r"learned.json cannot be written \(No space left on device\)"):
            export_state(exported, tmp_path / "old.db", context="")
    assert exported.read_text() == before
    assert not list(tmp_path.glob("*.tmp"))
