"""The law: a mark becomes durable only after the commit that holds every report up to it; nothing waits for the disk."""

import asyncio
import contextlib
import time

import pytest
from control_fakes import report

from speclen.controller.config import ControllerConfig
from speclen.controller.estimator.core import Bucket, ContextKey, Limits
from speclen.controller.service.assembly import create_service
from speclen.controller.service.journal import JournalSettings
from speclen.controller.service.learning_service import (
    FEW_REPORTS,
    MANY_REPORTS,
    MANY_WORKERS,
    LearningService,
    batches,
)
from speclen.controller.service.news import News
from speclen.controller.service.registry import RegisteredContext, Registration, Worker
from speclen.store.records import Commit, StoredState, StoreHealth

CONTEXT = RegisteredContext(1, ContextKey("t", "d", "cpu", "float32"), Limits(32, 4), 0.0)


class FakeStore:
    """Keeps commits and lets the test say when they are on disk."""

    def __init__(self) -> None:
        self.commits: list[tuple[Commit, object]] = []
        self.ok = True

    def submit(self, commit: Commit, on_done) -> None:
        self.commits.append((commit, on_done))

    def health(self) -> StoreHealth:
        return StoreHealth(self.ok, "", 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0)

    async def land(self, number: int = 0, error: Exception | None = None) -> None:
        self.commits[number][1](error)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


class Told(News):
    """Keeps who was told of what became durable."""

    def __init__(self, told: list[str]) -> None:
        super().__init__()
        self.told = told

    def note(self, worker_ids) -> None:
        self.told.extend(worker_ids)


def setting() -> tuple[LearningService, FakeStore, Worker, list[str]]:
    store, told = FakeStore(), []
    service = create_service(ControllerConfig(in_memory=True), None, StoredState(), News())
    service.journal.store = store
    service.journal.news = Told(told)
    worker = service.register(Registration("w", 7, ContextKey("t", "d", "cpu", "float32"), Limits(32, 4)))
    return service, store, worker, told


def send(service: LearningService, worker: Worker, *seqs: int, learn: bool = True) -> None:
    service.take(worker, [report(seq) for seq in seqs])
    if learn:
        service.learn(worker)


def test_durable_follows_the_commit():
    async def story() -> None:
        service, store, worker, told = setting()
        send(service, worker, 1, 2, 3)
        service.journal.commit()
        assert (worker.durable_seq, told) == (0, [])
        send(service, worker, 4)  # after the commit was built: not in it
        await store.land()
        assert (worker.durable_seq, told) == (3, ["w"])
        commit = store.commits[0][0]
        assert [row[4] for row in commit.reports] == [1, 2, 3]
        assert [row.applied_seq for row in commit.workers] == [3]

    asyncio.run(story())


def test_reports_that_wait_to_be_learned_from_are_beyond_the_mark():
    async def story() -> None:
        service, store, worker, _ = setting()
        send(service, worker, 1, 2)
        send(service, worker, 3, learn=False)
        send(service, worker, 3)  # a repetition, which changes a count of the worker
        service.journal.note_worker(worker)
        service.journal.commit()
        commit = store.commits[0][0]
        assert commit.workers[0].applied_seq == max(row[4] for row in commit.reports)

    asyncio.run(story())


def test_a_mark_never_runs_ahead_of_reports_that_wait():
    async def story() -> None:
        service, store, worker, _ = setting()
        send(service, worker, 1, 2, learn=False)
        service.take(worker, [report(2)])
        service.journal.commit()
        for commit, _done in store.commits:
            assert all(row.applied_seq == 0 for row in commit.workers)
        service.learn(worker)
        service.journal.commit()
        assert store.commits[-1][0].workers[0].applied_seq == 2

    asyncio.run(story())


def test_a_commit_that_is_given_up_is_followed_by_one_with_the_same_marks():
    async def story() -> None:
        service, store, worker, told = setting()
        send(service, worker, 1, 2)
        service.journal.commit()
        await store.land(0, RuntimeError("no"))
        assert (worker.durable_seq, told) == (0, [])
        assert service.journal.num_failed_commits == 1
        assert [str(error) for error in service.journal.given_up.values()] == ["no"]
        service.journal.commit()
        assert store.commits[1][0].workers[0].applied_seq == 2
        await store.land(1)
        assert service.journal.given_up == {}
        assert (worker.durable_seq, told) == (2, ["w"])

    asyncio.run(story())


def test_a_late_report_is_durable_only_with_its_own_commit():
    async def story() -> None:
        service, store, worker, _ = setting()
        send(service, worker, 1, 5)
        service.journal.commit()
        send(service, worker, 3)
        await store.land(0)
        assert worker.durable_seq == 1, "2, 3 and 4 were not in the commit"
        service.journal.commit()
        await store.land(1)
        assert worker.durable_seq == 1, "2 and 4 may still come"
        assert store.commits[1][0].workers[0].missing_ranges == "[[2, 2], [4, 4]]"

    asyncio.run(story())


def test_an_answer_for_an_old_life_moves_nothing():
    async def story() -> None:
        service, store, worker, told = setting()
        send(service, worker, 1, 2)
        service.journal.commit()
        service.register(Registration("w", 8, worker.context.key, Limits(32, 4)))
        await store.land(0)
        assert (worker.durable_seq, told) == (0, [])

    asyncio.run(story())


def test_registering_anew_does_not_lose_reports_that_wait():
    async def story() -> None:
        service, store, worker, _ = setting()
        send(service, worker, 1, 2, learn=False)
        service.register(Registration("w", 8, worker.context.key, Limits(32, 4)))
        service.journal.commit()
        commit = store.commits[0][0]
        assert [(row[3], row[4]) for row in commit.reports] == [(7, 1), (7, 2)]
        assert (commit.workers[0].epoch, commit.workers[0].applied_seq) == (8, 0)

    asyncio.run(story())


def test_groups_ascend_in_the_order_of_rows():
    async def story() -> None:
        service, store, worker, _ = setting()
        other = service.register(Registration("v", 1, worker.context.key, Limits(32, 4)))
        send(service, worker, 1, learn=False)
        send(service, other, 1)
        await service.learn_all()
        send(service, worker, 2, 3)
        service.journal.commit()
        rows = store.commits[0][0].reports
        assert [row[0] for row in rows] == sorted(row[0] for row in rows)
        assert rows[-1][0] == service.last_group_id

    asyncio.run(story())


def test_reports_of_several_workers_are_learned_from_in_one_call():
    async def story() -> None:
        service, store, worker, _ = setting()
        other = service.register(Registration("v", 1, worker.context.key, Limits(32, 4)))
        elsewhere = service.register(Registration("u", 1, ContextKey("t", "d", "cuda", "float32"), Limits(32, 4)))
        for each in (worker, other, elsewhere):
            send(service, each, 1, 2, learn=False)
        await service.learn_all()
        service.journal.commit()
        groups: dict[int, list[tuple[int, int]]] = {}
        for commit, _done in store.commits:
            for row in commit.reports:
                groups.setdefault(row[0], []).append((row[2], row[4]))
        together, alone = groups.values()
        assert together == [
            (worker.worker_key, 1),
            (worker.worker_key, 2),
            (other.worker_key, 1),
            (other.worker_key, 2),
        ]
        assert alone == [(elsewhere.worker_key, 1), (elsewhere.worker_key, 2)]
        marks = {row.worker_id: row.applied_seq for commit, _done in store.commits for row in commit.workers}
        assert marks == {"w": 2, "v": 2, "u": 2}

    asyncio.run(story())


def test_a_call_of_the_estimator_is_bounded():
    workers = [
        Worker(*(number, f"w{number}", 1), CONTEXT, Limits(32, 4), "", "", 0.0, 0.0)
        for number in range(25 * MANY_WORKERS + 3)
    ]
    assert [len(batch) for batch in batches(workers)] == [MANY_WORKERS] * 25 + [3]
    for worker in workers:
        worker.group.rows.extend([()] * (MANY_REPORTS // 2))
    assert {len(batch) for batch in batches(workers)} == {2, 1}, "enough reports, or the rest"


def test_few_reports_of_a_new_context_and_of_who_is_faster_than_real_time_do_not_wait():
    async def story() -> None:
        service, _, worker, _ = setting()
        now = worker.last_seen_at
        service.clock = lambda: now
        num = iter(range(1, 2000))

        def waiting(num_reports: int) -> int:
            service._patient_until = 0.0
            service.take(worker, [report(next(num)) for _ in range(num_reports)])
            service.learn_if_many(worker)
            return len(worker.group.rows)

        assert waiting(FEW_REPORTS - 1) == FEW_REPORTS - 1
        assert waiting(1) == 0, "hardly anything is known yet"
        service.learn(worker)
        worker.context.num_learned, worker.ahead_s = MANY_REPORTS, 0.0
        for group in range(1, 31):
            now += 10 * 0.02
            assert waiting(10) == 10 * group, "a real one tells of as much time as has gone"
        service.learn(worker)
        waits = [waiting(10) for _ in range(7)]  # more than a second in no time
        assert (waits[:3], waits[-2:]) == ([10, 20, 30], [0, 0])
        now += 2.0
        assert waiting(10) == 10, "it has waited"

    asyncio.run(story())


@pytest.mark.parametrize(("disk_works", "waits"), [(True, True), (False, False)])
def test_streams_wait_for_a_slow_disk_but_not_for_a_broken_one(disk_works, waits):
    async def story() -> None:
        service, store, worker, _ = setting()
        service.journal.settings = JournalSettings(max_waiting_reports=2)
        store.ok = disk_works
        send(service, worker, 1, 2, 3)
        service.journal.commit()
        waiting = asyncio.create_task(service.journal.wait_for_room())
        await asyncio.sleep(0.01)
        assert waiting.done() != waits
        await store.land()
        await asyncio.wait_for(waiting, 1.0)
        assert service.journal.num_waiting_reports == 0

    asyncio.run(story())


def test_lag_is_the_age_of_the_oldest_change_that_is_not_on_disk():
    async def story() -> None:
        service, store, worker, _ = setting()
        service.journal.commit()
        await store.land(0)
        assert service.journal.lag_s() == 0.0
        now = 1000.0
        service.journal.clock = lambda: now
        send(service, worker, 1)
        service.journal.commit()
        now = 1002.5
        assert service.journal.lag_s() == 2.5
        await store.land(1)
        assert service.journal.lag_s() == 0.0

    asyncio.run(story())


def test_the_end_waits_for_the_disk_but_not_for_ever():
    async def story() -> None:
        service, store, worker, _ = setting()
        send(service, worker, 1)
        assert not await service.journal.finish(0.05)
        finishing = asyncio.create_task(service.journal.finish(5.0))
        await asyncio.sleep(0.01)
        await store.land(0)
        assert await finishing

    asyncio.run(story())


def test_expensive_commits_stretch_the_interval_instead_of_the_loop():
    async def story() -> None:
        service, store, worker, _ = setting()
        service.journal.settings = JournalSettings(interval_s=0.001, max_share=0.1)
        snapshots = service.journal.snapshots.of_pair

        def slow(*arguments):
            time.sleep(0.05)
            return snapshots(*arguments)

        service.journal.snapshots.of_pair = slow

        async def settle() -> None:
            service.journal.note_worker(worker)

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.journal.run(settle), 0.9)
        assert 1 <= len(store.commits) <= 3, "0.05 s of work at a tenth of the time: two a second"

    asyncio.run(story())


def test_marks_do_not_add_up_while_the_disk_is_full():
    async def story() -> None:
        service, store, worker, told = setting()
        others = [
            service.register(Registration(f"w{number}", 7, ContextKey("t", "d", "cpu", "float32"), Limits(32, 4)))
            for number in range(10)
        ]
        store.ok = False
        for seq in range(1, 101):
            for each in [worker, *others] if seq == 1 else others:
                send(service, each, seq)
            service.journal.commit()
        assert sum(len(flight.marks) for flight in service.journal._flights.values()) == 11
        for number in range(100):  # they are one transaction for the store
            await store.land(number)
        assert worker.durable_seq == 1
        assert {each.durable_seq for each in others} == {100}
        assert set(told) == {"w", *(each.worker_id for each in others)}
        assert service.journal.num_waiting_reports == 0

    asyncio.run(story())


def test_a_commit_that_fails_after_another_took_its_marks_over_is_told_again():
    """The next commit had the mark alone: the worker's row was rolled back, and a restart would have known less of it."""

    async def story() -> None:
        service, store, worker, _ = setting()
        other = service.register(Registration("w2", 7, ContextKey("t", "d", "cpu", "float32"), Limits(32, 4)))
        store.ok = False
        send(service, worker, 1, 2)
        service.journal.commit()
        send(service, other, 1)
        service.journal.commit()
        await store.land(0, RuntimeError("no"))
        await store.land(1)
        service.journal.commit()
        rows = {row.worker_id: row.applied_seq for row in store.commits[2][0].workers}
        assert rows["w"] == 2

    asyncio.run(story())


def test_what_is_shown_no_more_is_taken_out_of_the_database():
    """A plan stayed in the views as the one in use where none is: after a reset, or where nobody reached its batch size."""

    async def story() -> None:
        service, store, worker, _ = setting()
        first, second = Bucket(0, 1, 1), Bucket(1, 2, 2)
        for seq, shown in enumerate([(first, second), (first, second), (first,), (first,), (first, second)], start=1):
            service.estimator.plan_estimates = lambda key, shown=shown: {bucket: [] for bucket in shown}
            send(service, worker, seq)
            service.journal.commit()
        at_start, same, fewer, as_few, more = (commit.replaced_contexts for commit, _done in store.commits)
        assert (at_start, same, fewer, as_few, more) == ((1,), (), (1,), (), ())
        send(service, worker, *range(6, 46))
        service.journal.commit()
        assert store.commits[-1][0].latency_cells
        service._start_anew(worker.context)
        service.journal.commit()
        assert (store.commits[-1][0].replaced_contexts, store.commits[-1][0].latency_cells) == ((1,), [])

    asyncio.run(story())


def test_pairs_are_committed_one_by_one():
    async def story() -> None:
        service, store, worker, _ = setting()
        other = service.register(Registration("v", 1, ContextKey("t2", "d", "cpu", "float32"), Limits(32, 4)))
        send(service, worker, 1)
        send(service, other, 1, 2)
        service.journal.commit()
        assert [[state.key for state in commit.states if state.scope == "pair"] for commit, _done in store.commits] == [
            ['["t", "d"]'],
            ['["t2", "d"]'],
        ]
        assert [len(commit.reports) for commit, _done in store.commits] == [1, 2]

    asyncio.run(story())
