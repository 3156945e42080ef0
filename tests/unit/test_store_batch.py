"""Joining commits does not change their meaning: the newest row per key counts, reports and events add up in order."""

from __future__ import annotations

from speclen.store.batch import Batch
from speclen.store.records import Commit, StateRow
from tests.support.store_rows import context, decision, estimate, moment, report, worker


def absorb_all(*commits: Commit, max_reports: int = 1000) -> Batch:
    batch = Batch(max_reports)
    for commit in commits:
        batch.absorb(commit, lambda error: None)
    return batch


def test_the_newest_row_per_key_counts():
    batch = absorb_all(
        Commit(contexts=[context()], workers=[worker(1)], states=[StateRow("t", "d", b"1", 1.0)]),
        Commit(workers=[worker(9), worker(3, worker_key=2)], states=[StateRow("t", "d", b"9", 2.0)]),
    )
    assert [(row.worker_key, row.applied_seq) for row in batch.as_commit().workers] == [(1, 9), (2, 3)]
    assert [row.state for row in batch.as_commit().states] == [b"9"]
    assert len(batch.as_commit().contexts) == 1


def test_reports_and_decisions_add_up_in_order():
    batch = absorb_all(
        moment([1, 2], decisions=[decision(1, 2)]), moment([3], decisions=[decision(2, 0), decision(3, 2)])
    )
    assert [row.seq for row in batch.reports] == [1, 2, 3]
    assert [row.decision_version for row in batch.as_commit().decisions] == [1, 2, 3]
    assert batch.num_commits == 2


def test_replaced_contexts_forget_estimates_that_still_wait_but_not_newer_ones():
    batch = absorb_all(
        Commit(arm_estimates=[estimate(1), estimate(2), estimate(1, context_id=2)]),
        Commit(replaced_contexts=[1], arm_estimates=[estimate(1, batch_min=2)]),
    )
    assert sorted((row.context_id, row.batch_min) for row in batch.as_commit().arm_estimates) == [(1, 2), (2, 3)]
    assert batch.as_commit().replaced_contexts == (1,)


def test_reports_beyond_the_bound_are_given_up_oldest_first_and_counted():
    batch = absorb_all(moment([1, 2, 3]), moment([4, 5, 6]), max_reports=4)
    newer = absorb_all(moment([7, 8, 9, 10, 11]), max_reports=4)
    assert (batch.num_reports_dropped, newer.num_reports_dropped) == (2, 1)
    batch.absorb_batch(newer)
    assert [row.seq for row in batch.reports] == [8, 9, 10, 11]
    assert batch.num_reports_dropped == 2 + 1 + 4
    assert batch.as_commit().reports[0] == report(8)
