"""What a commit holds is what the estimator believed, and a controller that reads it goes on as if nothing had happened."""

import json

import pytest
from control_fakes import report

from speclen.controller.config import ControllerConfig
from speclen.controller.estimator.core import ContextKey, Limits, Profile, ProfileCell
from speclen.controller.service.assembly import create_service, open_store
from speclen.controller.service.learning_service import LearningService
from speclen.controller.service.news import News
from speclen.controller.service.registry import Registration
from speclen.store.connection import connect_reader
from speclen.store.queries import view_rows
from speclen.store.records import Commit, StateRow, StoredState
from speclen.v1 import control_pb2 as pb

KEY = ContextKey("t", "d", "cpu", "float32")
ELSEWHERE = ContextKey("t", "d", "cuda", "float32")


def learned(service: LearningService) -> None:
    """Two contexts of one pair and two workers, with a gap, a repetition and a refusal."""
    for name, key in (("w", KEY), ("v", ELSEWHERE)):
        worker = service.register(Registration(name, 7, key, Limits(32, 4), "host:1", "adaptive"))
        reports = [report(seq, latency_s=0.02 + 0.0001 * seq) for seq in (1, 2, 3, 7, 7, 8)]
        service.take(worker, [*reports, report(9, batch_size=0)])
        service.learn(worker)


def saved(tmp_path, service: LearningService) -> StoredState:
    """The state as another process would read it."""
    store = open_store(ControllerConfig(db=tmp_path / "s.db"))
    done: list[Exception | None] = []
    service.journal.store = store
    changes, service.journal._unsaved = service.journal._unsaved, {}
    for pair, unsaved in changes.items():
        estimates = service.journal.snapshots.of_pair(pair, unsaved.contexts.values(), 50.0)
        store.submit(
            Commit(
                contexts=estimates.contexts,
                workers=list(unsaved.workers.values()),
                reports=unsaved.reports,
                acceptance=estimates.acceptance,
                latency_cells=estimates.latency_cells,
                states=estimates.states,
                profiles=unsaved.profiles,
            ),
            done.append,
        )
    store.close()
    assert done == [None] * len(changes)
    store = open_store(ControllerConfig(db=tmp_path / "s.db"))
    stored = store.load()
    store.close()
    return stored


def service_of(stored: StoredState) -> LearningService:
    service = create_service(ControllerConfig(in_memory=True), None, stored, News())
    service.journal.store = object()  # so that rows are collected; nothing is submitted here
    return service


def test_a_restored_fleet_is_the_one_that_was_saved(tmp_path):
    service = service_of(StoredState())
    learned(service)
    again = service_of(saved(tmp_path, service))
    assert again.last_group_id == service.last_group_id == 2
    for key in (KEY, ELSEWHERE):
        assert again.estimator.export_state(key) == service.estimator.export_state(key)
        lengths = [
            [choice.speculation_length for choice in each.estimator.table(key).choices] for each in (again, service)
        ]
        assert lengths[0] == lengths[1]
        assert again.estimator.table(key).version == service.estimator.table(key).version
    # The context that learned last; the other one sees what it taught about acceptance when it learns next.
    assert again.estimator.table(ELSEWHERE) == service.estimator.table(ELSEWHERE)
    assert again.estimator.export_pair_state(KEY.pair) == service.estimator.export_pair_state(KEY.pair)
    for name in ("w", "v"):
        old, new = service.registry.workers[name], again.registry.workers[name]
        assert (new.worker_key, new.epoch, new.address, new.policy) == (old.worker_key, 7, "host:1", "adaptive")
        assert (new.window.applied_seq, new.window.missing) == (9, [[4, 6]])
        assert (new.durable_seq, new.num_reports, new.num_refused, new.window.num_repeated) == (3, 5, 1, 1), (
            "4 to 6 may still come"
        )
    assert again.register(Registration("u", 1, KEY, Limits(32, 4))).worker_key == 3


def test_both_go_on_alike(tmp_path):
    service = service_of(StoredState())
    learned(service)
    again = service_of(saved(tmp_path, service))
    for each in (service, again):
        worker = each.registry.workers["w"]
        each.take(worker, [report(seq, latency_s=0.03) for seq in (4, 5, 9, 10, 11)])
        each.learn(worker)
        assert worker.num_reports == 9, "4 and 5 fill the gap, 9 is a repetition"
    assert again.estimator.learned_rows(KEY) == service.estimator.learned_rows(KEY)


@pytest.mark.parametrize("newer", ["d", "e"])
def test_what_is_known_of_copying_is_that_of_the_pair_that_was_saved_last(tmp_path, newer):
    """It belongs to the target and stands with each of its pairs, one of which may have been idle for weeks."""
    service = service_of(StoredState())
    texts = {}
    for draft in ("d", "e"):
        worker = service.register(Registration(draft, 7, ContextKey("t", draft, "cpu", "float32"), Limits(32, 4, 16)))
        service.take(
            worker,
            [report(seq, read=[pb.ReadTokens(match_length=3, num_tokens=10, num_right=7)]) for seq in range(1, 9)],
        )
        service.learn(worker)
        texts[draft] = json.dumps(service.estimator.export_pair_state(("t", draft)))
    taught = [json.loads(text)["copying"]["matches"] for text in texts.values()]
    assert taught[0] != taught[1], "it was taught in between"
    names = sorted(texts, key=lambda draft: draft == newer)
    rows = [StateRow("pair", json.dumps(["t", draft]), texts[draft], 50.0 + at) for at, draft in enumerate(names)]
    store = open_store(ControllerConfig(db=tmp_path / "c.db"))
    done: list[Exception | None] = []
    contexts = service.journal.snapshots.of_pair(("t", "d"), service.registry.contexts.values(), 50.0).contexts
    store.submit(Commit(contexts=contexts, states=rows), done.append)
    store.close()
    store = open_store(ControllerConfig(db=tmp_path / "c.db"))
    restored = service_of(store.load())
    store.close()
    assert done == [None]
    known = restored.estimator.export_pair_state(("t", "d"))["copying"]
    assert known["matches"] == json.loads(texts[newer])["copying"]["matches"]


def test_the_readable_tables_say_what_the_estimator_believes(tmp_path):
    service = service_of(StoredState())
    learned(service)
    saved(tmp_path, service)
    with connect_reader(tmp_path / "s.db") as database:
        rows = [row for row in view_rows(database, "learned_table") if "cpu" in row["context"]]
        survival = database.execute(
            "SELECT position, survival FROM acceptance WHERE batch_min = 3 AND batch_max = 4 ORDER BY position"
        ).fetchall()
    believed = service.estimator.learned_rows(KEY)
    assert [(row["batch_min"], row["speculation_length"], bool(row["is_best"])) for row in rows] == [
        (row.bucket.batch_min, row.estimate.speculation_length, row.is_best) for row in believed
    ]
    assert [row["ms_per_token"] for row in rows] == pytest.approx([row.estimate.ms_per_token for row in believed])
    bucket = next(row.bucket.index for row in believed if row.bucket.batch_min == 3)
    assert [tuple(row) for row in survival] == [
        (position, pytest.approx(value))
        for position, value in enumerate(service.estimator.survival(KEY, bucket), start=1)
    ]


def test_a_profile_is_kept_with_its_cells(tmp_path):
    service = service_of(StoredState())
    cells = tuple(ProfileCell(4, length, 0.01 + 0.002 * length, 0.0001, 50, 100.0) for length in range(4))
    profile_id = service.import_profile(KEY, Profile(cells, (0.8, 0.6, 0.4), (100, 100, 100), source="test"))
    stored = saved(tmp_path, service)
    assert (profile_id, stored.last_profile_id) == (1, 1)
    assert service_of(stored).estimator.table(KEY) == service.estimator.table(KEY)


@pytest.mark.parametrize("before", ["adaptive", "profile"])
def test_the_papers_table_is_that_of_the_stored_profile(tmp_path, before):
    """Story: the policy had forgotten it, or had never seen it: 2 at every batch size, and nothing said so."""
    cells = tuple(ProfileCell(4, length, 0.01 + 0.002 * abs(length - 4), 0.0, 50) for length in range(5))
    service = create_service(ControllerConfig(in_memory=True, policy=before), None, StoredState(), News())
    service.journal.store = object()
    service.import_profile(KEY, Profile(cells, (0.8, 0.6, 0.4, 0.3), (100,) * 4, source="test"))
    saved(tmp_path, service)
    config = ControllerConfig(db=tmp_path / "s.db", policy="profile")
    store = open_store(config)
    again = create_service(config, store, store.load(), News())
    store.close()
    assert {choice.speculation_length for choice in again.estimator.table(KEY).choices} == {4}
    again.estimator.add_context(KEY, Limits(32, 8))
    assert {choice.speculation_length for choice in again.estimator.table(KEY).choices} == {4}


def test_a_state_of_another_version_is_learned_anew_and_not_fatal(tmp_path):
    service = service_of(StoredState())
    learned(service)
    stored = saved(tmp_path, service)
    broken = json.dumps({"of": "another version"})
    states = {key: broken if key[0] == "context" else state for key, state in stored.states.items()}
    changed = StoredState(stored.contexts, stored.workers, states, stored.last_group_id, stored.last_profile_id)
    again = service_of(changed)
    assert again.registry.workers["w"].window.applied_seq == 9, "what was counted is not counted again"
    assert again.estimator.learned_rows(KEY) == []
    assert again.estimator.table(KEY).choices
