"""Learned state moved to another database gives a controller that decides as the first one would."""

from __future__ import annotations

import base64
import json

import pytest

from speclen.cli.support.errors import UserError
from speclen.cli.transfer.export import export_state
from speclen.cli.transfer.import_state import import_state
from speclen.controller.estimator import Estimator
from speclen.records import Arm, ContextKey, Limits, StepRecord
from speclen.store.database import Store, StoreConfig
from speclen.store.records import Commit, StateRow, StoredState
from speclen.store.retention import KEEP_REPORTS
from tests.support.database_rows import write_database
from tests.support.store_rows import NOW, context, report, rows, store_now, worker

KEY = ContextKey("t", "d", "cpu:test", "float32")


def estimator(num_steps: int = 200) -> Estimator:
    """One that has learned from steps of 4 sequences with `draft 2`."""
    found = Estimator()
    found.add_context(KEY, Limits(32, 4, True))
    found.observe(KEY, steps(num_steps), "worker-1")
    return found


def steps(count: int, length: int = 2) -> list[StepRecord]:
    histogram = (1, 3 - length, length, *[0] * (length - 2))[: length + 1]
    histogram = (4 - sum(histogram[1:]), *histogram[1:])
    return [
        StepRecord(
            *(seq, 4, Arm(length), 0.02 + 0.0001 * (seq % 7), histogram, 100.0),
            num_drafted_sequences=4,
            num_verified_tokens=4 * (length + 1),
        )
        for seq in range(1, count + 1)
    ]


def load(path) -> StoredState:
    store = Store.open(path)
    stored = store.load()
    store.close()
    return stored


@pytest.fixture
def exported(tmp_path):
    database = write_database(tmp_path / "old.db", estimator().save(KEY.pair))
    export_state(tmp_path / "learned.json", database, context="")
    return tmp_path / "learned.json"


def test_an_import_goes_on_exactly_where_the_export_stopped(tmp_path, exported):
    import_state(exported, tmp_path / "new.db", replace_known=False)
    original, moved = estimator(), Estimator()
    moved.add_context(KEY, Limits(32, 4, True))
    moved.restore(KEY.pair, load(tmp_path / "new.db").states[KEY.pair])
    assert original.observe(KEY, steps(50, 1), "w").decisions == moved.observe(KEY, steps(50, 1), "w").decisions
    assert original.rows(KEY) == moved.rows(KEY)


@pytest.mark.parametrize(
    "query", ["SELECT * FROM acceptance", "SELECT context, arm, ms_per_token, is_best FROM learned_table"]
)
def test_the_tables_move_along_and_raw_reports_stay(tmp_path, exported, query):
    import_state(exported, tmp_path / "new.db", replace_known=False)
    assert rows(tmp_path / "new.db", query) == rows(tmp_path / "old.db", query)
    assert rows(tmp_path / "new.db", "SELECT count(*) FROM step_reports") == [(0,)]
    limits = rows(tmp_path / "new.db", "SELECT max_batch_size, max_speculation_length, ngram FROM context_limits")
    assert limits == [(32, 4, 1)]


def test_a_known_pair_is_only_replaced_when_told(tmp_path, exported):
    store = Store.open(tmp_path / "new.db")
    own = StateRow("t", "d", b"own", 1.0)
    assert store_now(store, Commit(contexts=[context(5, "gpu"), context(7)], states=[own])) is None
    store.close()
    with pytest.raises(UserError, match=r"t \+ d is known here already: give --replace"):
        import_state(exported, store.path, replace_known=False)
    assert load(store.path).states == {("t", "d"): b"own"}
    import_state(exported, store.path, replace_known=True)
    stored = load(store.path)
    assert stored.states == {("t", "d"): estimator().save(KEY.pair)}
    assert [(row.context_id, row.device) for row in stored.contexts] == [(5, "gpu"), (7, "cpu:test")]
    assert rows(store.path, "SELECT DISTINCT context_id FROM arm_estimates") == [(7,)]


def test_contexts_of_other_pairs_keep_their_ids(tmp_path, exported):
    store = Store.open(tmp_path / "new.db")
    assert store_now(store, Commit(contexts=[context(5, target="other")])) is None
    store.close()
    import_state(exported, store.path, replace_known=False)
    assert [(row.context_id, row.target) for row in load(store.path).contexts] == [(5, "other"), (6, "t")]


def test_an_import_lets_no_report_go(tmp_path, exported):
    """The controller's own retention decides how many are kept, and it may keep them for years."""
    store = Store.open(tmp_path / "new.db", StoreConfig(retention=KEEP_REPORTS))
    reports = [report(seq, context_id=5, received_at=NOW - 400 * 86_400.0) for seq in (1, 2, 3)]
    known = Commit(contexts=[context(5, "gpu")], workers=[worker(3, context_id=5)], reports=reports)
    assert store_now(store, known) is None
    store.close()
    import_state(exported, store.path, replace_known=False)
    assert rows(store.path, "SELECT seq FROM step_reports") == [(1,), (2,), (3,)]


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
        change(document["pairs"][0])
        return json.dumps(document)

    return apply


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda document: "{", "is not JSON"),
        (lambda document: "[]", "is not a file that `speclen export` wrote"),
        (lambda document: json.dumps(document | {"version": 1}), "has version 1, this speclen reads 2"),
        (broken(lambda pair: pair["contexts"][0].pop("device")), "is damaged"),
        (broken(lambda pair: pair["contexts"][0].update(device="elsewhere")), "is damaged"),
        (broken(lambda pair: pair.update(state="?")), "is damaged"),
        (broken(lambda pair: pair.update(state=base64.b64encode(b"PK").decode())), "is damaged"),
        (broken(lambda pair: pair["contexts"][0]["arm_estimates"][0].pop("step_s")), "is damaged"),
        (broken(lambda pair: pair.clear()), "is damaged"),
    ],
)
def test_a_file_that_no_controller_could_use_is_refused_and_changes_nothing(tmp_path, exported, spoil, words):
    exported.write_text(spoil(json.loads(exported.read_text())))
    with pytest.raises(UserError, match=words):
        import_state(exported, tmp_path / "new.db", replace_known=False)
    assert not (tmp_path / "new.db").exists() or load(tmp_path / "new.db").contexts == ()


def test_a_database_is_never_replaced_by_an_export(tmp_path, exported):
    """FILE is the result, not the database to read."""
    before = (tmp_path / "old.db").read_bytes()
    with pytest.raises(UserError, match="is a database and stays"):
        export_state(tmp_path / "old.db", tmp_path / "old.db", context="")
    assert (tmp_path / "old.db").read_bytes() == before
