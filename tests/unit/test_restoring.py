"""A controller continues from its database as if it had never stopped; state that it cannot use is set aside."""

import asyncio
import json
import time

import pytest

from speclen.cli.replay import compare, events
from speclen.controller.analysis.replay import replay
from speclen.controller.estimator import Estimators
from speclen.controller.service.learner import Learner
from speclen.controller.service.registry import Registry
from speclen.controller.service.restoring import restore
from speclen.records import Arm, Profile, ProfileCell
from speclen.store.connection import connect_reader
from speclen.store.database import Store
from speclen.store.queries import contexts, decisions
from speclen.store.schema import StoredState
from tests.support.control_fakes import report
from tests.support.fake_estimator import FakeEstimators
from tests.support.service_parts import ELSEWHERE, KEY, Parts


def saved(path, *more_reports) -> StoredState:
    """State of two contexts and two workers, with a gap, a repetition and a refusal."""

    async def story() -> None:
        parts = Parts()
        parts.clock.now = time.time()  # retention deletes what is old
        store = parts.journal.store = Store.open(path)
        for name, key in (("w", KEY), ("v", ELSEWHERE)):
            worker = parts.worker(name, key=key)
            parts.learner.take(worker, [*map(report, (1, 2, 3, 7, 7, 8)), report(9, batch_size=0)])
            parts.learner.learn(worker)
        parts.learner.import_profile(KEY, Profile((ProfileCell(4, 3, 0.01),), (0.8,), (100,), source="test"))
        assert await parts.journal.finish(10.0)
        assert parts.journal.given_up == {}
        store.close()

    asyncio.run(story())
    store = Store.open(path)
    stored = store.load()
    store.close()
    return stored


def restored(stored: StoredState, path) -> tuple[FakeEstimators, Registry, list, list]:
    estimators, registry = FakeEstimators(), Registry(lambda: 0.0, 10, 10)
    return estimators, registry, *restore(estimators, registry, stored, path)


def test_a_restored_fleet_is_the_one_that_was_saved(tmp_path):
    stored = saved(tmp_path / "s.db")
    estimators, registry, forgotten, aside = restored(stored, tmp_path / "s.db")
    assert (forgotten, aside, stored.last_group_id, stored.last_profile_id) == ([], [], 2, 1)
    assert {key: context.context_id for key, context in registry.contexts.items()} == {KEY: 1, ELSEWHERE: 2}
    assert [row.num_steps for row in estimators[KEY].rows()] == [5]
    for name in ("w", "v"):
        worker = registry.workers[name]
        assert (worker.epoch, worker.address, worker.policy) == (7, "host:1", "adaptive")
        assert (worker.seqs.applied_seq, worker.seqs.missing) == (9, [[4, 6]])
        assert (worker.durable_seq, worker.num_reports, worker.num_refused, worker.seqs.num_repeated) == (3, 5, 1, 1)


@pytest.mark.parametrize("state", [b"", b"\x00\xff", b"[]]", b'[["a", 1]]'])
def test_an_invalid_state_is_set_aside_and_its_context_starts_from_scratch(tmp_path, state):
    stored = saved(tmp_path / "s.db")
    stored.states[1] = state
    estimators, registry, forgotten, [event] = restored(stored, tmp_path / "s.db")
    assert (event.kind, event.content) == ("state_set_aside", state)
    assert "t + d" in event.detail
    assert [context.key for context in forgotten] == [KEY]
    assert estimators[KEY].table().arm_for(1) == Arm(3), "its profile seeds it again"
    assert registry.workers["w"].seqs.applied_seq == 9, "what was counted is not counted again"


def test_invalid_ranges_of_a_worker_are_set_aside(tmp_path):
    stored = saved(tmp_path / "s.db")
    worker = stored.workers[0]._replace(missing_ranges=json.dumps({"1": 2}))
    changed = StoredState(stored.contexts, (worker,), stored.states, stored.last_group_id, stored.last_profile_id)
    _, registry, forgotten, [event] = restored(changed, tmp_path / "s.db")
    assert (forgotten, event.content) == ([], b'{"1": 2}')
    assert registry.workers["w"].seqs.missing == []


def test_a_replay_is_exact_although_a_crash_lost_what_another_context_had_learned(tmp_path):
    """The second context started from the acceptance that the first had learned, and the first was not committed."""
    path = tmp_path / "s.db"

    async def run(story) -> None:
        parts, store = Parts(estimators=Estimators()), Store.open(path)
        parts.clock.now = time.time()
        parts.journal.store, stored = store, store.load()
        restore(parts.estimators, parts.registry, stored, path)
        parts.learner = Learner(parts.estimators, parts.registry, parts.journal, parts.totals, stored.last_group_id)
        await story(parts)
        store.close()

    async def crash(parts: Parts) -> None:
        first = parts.worker("w")
        parts.journal.commit()  # it stays in flight, since the loop does not run until the crash
        for begin in range(1, 61, 20):
            parts.send(first, *range(begin, begin + 20))
        parts.send(parts.worker("v", key=ELSEWHERE), *range(1, 21))
        parts.journal.commit()

    async def go_on(parts: Parts) -> None:
        parts.send(parts.worker("w"), *range(1, 61))
        parts.send(parts.worker("v", key=ELSEWHERE), *range(21, 61))
        assert await parts.journal.finish(10.0)

    asyncio.run(run(crash))
    asyncio.run(run(go_on))
    with connect_reader(path) as connection:
        agreement = compare(replay(events(connection)), decisions(connection), contexts(connection))
    assert agreement["exact"], agreement
    assert agreement["num_stored"] > 40
