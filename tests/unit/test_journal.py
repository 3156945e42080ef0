"""durable_seq advances only after the commit that holds every report up to it; nothing waits for the disk."""

import asyncio

import pytest

from speclen.store.schema import ReportRow
from speclen.store.transaction import Refusal, ReportsRefusedError
from tests.support.service_parts import KEY, Parts, seqs_of
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def parts():
    return Parts()


@pytest.fixture
def worker(parts):
    return parts.worker()


async def test_durable_follows_the_commit(parts, worker):
    parts.send(worker, 1, 2, 3)
    parts.journal.commit()
    assert worker.durable_seq == 0
    parts.send(worker, 4)  # after the commit was built: not in it
    await parts.store.land()
    assert worker.durable_seq == 3
    commit = parts.store.last
    assert seqs_of(commit) == [1, 2, 3]
    assert [row.applied_seq for row in commit.workers] == [3]
    assert [row.context_id for row in commit.states] == [worker.context.context_id]


async def test_a_mark_never_runs_ahead_of_reports_that_wait(parts, worker):
    parts.send(worker, 1, 2, learn=False)
    parts.send(worker, 2, learn=False)  # a repetition, which changes a count of the worker
    parts.journal.note_worker(worker)
    parts.journal.commit()
    assert all(row.applied_seq == 0 for row in parts.store.last.workers)
    await parts.store.land()
    parts.learner.learn(worker)
    parts.journal.commit()
    assert (parts.store.last.workers[0].applied_seq, seqs_of(parts.store.last)) == (2, [1, 2])


async def test_a_failed_commit_is_followed_by_one_with_the_same_marks(parts, worker):
    parts.send(worker, 1, 2)
    parts.journal.commit()
    parts.send(worker, 3)
    await parts.store.land(0, RuntimeError("no"))
    assert worker.durable_seq == 0
    assert parts.journal.num_failed_commits == 1
    assert [str(error) for error in parts.journal.given_up.values()] == ["no"]
    parts.journal.commit()
    assert parts.store.last.workers[0].applied_seq == 3
    assert seqs_of(parts.store.last) == [1, 2, 3], "nothing of the first one is lost"
    await parts.store.land(1)
    assert parts.journal.given_up == {}
    assert worker.durable_seq == 3
    assert parts.journal.num_waiting_reports == 0


async def test_a_report_that_the_database_refuses_is_counted_as_refused(parts, worker):
    """It can never be stored. Holding back the mark for it would keep later reports in the worker's memory."""
    other = parts.worker("v")
    parts.send(worker, 1, 2)
    parts.send(other, 1)
    parts.journal.commit()
    refused = next(row for row in parts.store.last.reports if ReportRow(*row).worker_key == worker.worker_key)
    await parts.store.land(0, ReportsRefusedError([Refusal("step_reports: broken", refused)]))
    assert (worker.num_refused, worker.durable_seq) == (1, 2)
    assert "step_reports: broken" in worker.last_refusal
    assert (other.num_refused, other.durable_seq) == (0, 1)
    parts.journal.commit()
    assert [row.num_refused for row in parts.store.last.workers] == [1], "the count is stored"


async def test_a_late_report_is_durable_only_with_its_own_commit(parts, worker):
    parts.send(worker, 1, 5)
    parts.journal.commit()
    parts.send(worker, 3)
    await parts.store.land(0)
    assert worker.durable_seq == 1, "2, 3 and 4 were not in the commit"
    parts.journal.commit()
    await parts.store.land(1)
    assert worker.durable_seq == 1, "2 and 4 may still come"
    assert parts.store.last.workers[0].missing_ranges == "[[2, 2], [4, 4]]"


async def test_an_answer_for_an_old_incarnation_has_no_effect(parts, worker):
    parts.send(worker, 1, 2)
    parts.journal.commit()
    parts.worker(epoch=8)
    await parts.store.land(0)
    assert worker.durable_seq == 0


async def test_registering_again_does_not_lose_waiting_reports(parts, worker):
    parts.send(worker, 1, 2, learn=False)
    parts.worker(epoch=8)
    parts.journal.commit()
    commit = parts.store.last
    assert [(row.epoch, row.seq) for row in map(ReportRow._make, commit.reports)] == [(7, 1), (7, 2)]
    assert (commit.workers[0].epoch, commit.workers[0].applied_seq) == (8, 0)


@pytest.mark.parametrize(("disk_works", "waits"), [(True, True), (False, False)])
async def test_streams_wait_for_a_slow_disk_but_not_for_a_broken_one(parts, disk_works, waits):
    parts.journal.max_waiting_reports = 2
    parts.store.ok = disk_works
    parts.send(parts.worker(), 1, 2, 3)
    parts.journal.commit()
    waiting = asyncio.create_task(parts.journal.wait_for_room())
    await asyncio.sleep(0.01)
    assert waiting.done() != waits
    await parts.store.land()
    await asyncio.wait_for(waiting, PATIENCE_S)
    assert parts.journal.num_waiting_reports == 0


async def test_reports_gathered_while_the_disk_is_full_are_bounded(parts):
    """The oldest raw rows are dropped and counted; estimates and marks include them."""
    parts.journal.max_waiting_reports = 50
    workers = [parts.worker(f"w{number}") for number in range(2)]
    parts.store.ok = False
    for seq in range(1, 101):
        for each in workers:
            parts.send(each, seq)
        parts.journal.commit()
    [(first, _)] = parts.store.commits
    assert seqs_of(first) == [1, 1]
    assert not await parts.journal.finish(0.01), "the disk has not answered"
    await parts.store.land(0)
    parts.journal.commit()
    assert (parts.journal.num_reports_dropped, parts.store.last.num_reports_dropped) == (150, 150)
    assert seqs_of(parts.store.last) == [seq for seq in range(77, 101) for _ in workers]
    await parts.store.land(1)
    assert [each.durable_seq for each in workers] == [100, 100]
    assert parts.journal.num_waiting_reports == 0


async def test_a_context_that_cannot_be_saved_does_not_block_others(parts):
    worker, other = parts.worker(), parts.worker("v", key=KEY._replace(target="t2"))
    save = parts.estimators[KEY].save
    parts.estimators[KEY].save = lambda: 1 / 0
    parts.send(worker, 1)
    parts.send(other, 1, 2)
    parts.journal.commit()
    assert [commit.states[0].context_id for commit, _ in parts.store.commits] == [other.context.context_id]
    assert list(parts.journal.given_up) == [KEY]
    await parts.store.land(0)
    parts.journal.max_waiting_reports = 1
    parts.send(worker, 2, 3)
    await parts.journal.wait_for_room()  # which does not wait for a context that makes none
    parts.estimators[KEY].save = save
    parts.journal.commit()
    assert (parts.journal.num_reports_dropped, seqs_of(parts.store.last)) == (2, [3])
    assert parts.store.last.workers[0].applied_seq == 3
