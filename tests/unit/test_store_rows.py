"""Constraints of the tables: invalid rows are refused, and valid ones next to them are stored."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speclen.controller.wire.stored import record_of, row_of
from speclen.records import Arm, Limits, OutputEvaluation, StepFlag, StepRecord
from speclen.store.schema import Commit, ReportRow, StateRow
from speclen.store.transaction import BLOCKS
from tests.support.store_rows import context, estimate, moment, report, rows, store_now, worker


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("latency_s", [math.nan, math.inf, 0.0, 3600.1, "fast"]),
        ("batch_size", [0, 4097, 1.5]),
        ("speculation_length", [-1, 65]),
        ("ngram", [2]),
        ("num_drafted_sequences", [5]),  # of 4
        ("num_verified_tokens", [-1]),
        ("num_unobserved_sequences", [-1, 4]),
        ("draft_prefill_s", [math.nan]),
        ("evaluations", ["[["]),
        ("class_histograms", ["{"]),
        ("accepted_histogram", ["[1,2", None]),
        ("num_accepted_tokens", [9, -1]),  # 4 rows of length 2 accept at most 8
        ("mean_context_length", [math.nan]),
        ("seq", [0]),
        ("epoch", [2**63]),
        ("worker_key", [99]),
        ("context_id", [99]),
    ],
)
def test_invalid_reports_are_left_out_and_the_others_stored(store, field, values):
    bad = [report(seq)._replace(**{field: value}) for seq, value in enumerate(values, 2)]
    error = store_now(store, moment([1, 9], reports=[report(1), *bad, report(9)]))
    assert sorted(seq for seqs in error.seqs.values() for seq in seqs) == sorted(row.seq for row in bad)
    assert not store.health().ok
    assert str(error) in store.health().detail
    assert rows(store.path, "SELECT seq FROM step_reports") == [(1,), (9,)]
    assert store.health().num_rows_refused == len(values)
    [(kind, count, detail)] = rows(store.path, "SELECT kind, num_rows, detail FROM store_events")
    assert (kind, count) == ("rows_refused", len(values))
    assert detail.startswith("step_reports: ")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("step_s", [math.nan, 0.0, math.inf]),
        ("expected_tokens", [0.8, 66.0, math.nan]),
        ("ms_per_token_low", [math.nan]),
        ("ms_per_token_high", [8.9, math.inf]),  # below low
        ("source", ["hearsay"]),
    ],
)
def test_invalid_estimates_are_left_out(store, field, values):
    bad = [estimate(length, **{field: value}) for length, value in enumerate(values, 2)]
    store_now(store, Commit(contexts=[context()], arm_estimates=[estimate(1), *bad]))
    assert rows(store.path, "SELECT speculation_length FROM arm_estimates") == [(1,)]
    assert store.health().num_rows_refused == len(values)


def test_an_empty_state_does_not_replace_the_one_before(store):
    store_now(store, Commit(contexts=[context()], states=[StateRow(1, b"PK", 1.0)]))
    store_now(store, Commit(states=[StateRow(1, b"", 2.0)]))
    assert rows(store.path, "SELECT state, updated_at FROM learned_states") == [(b"PK", 1.0)]


@pytest.mark.parametrize("count", [1, 3, 4, 63, 255, 256, 257, 1000, sum(BLOCKS)])
def test_any_number_of_rows_is_inserted_once_and_in_order(store, count):
    store_now(store, moment(range(1, count + 1)))
    assert rows(store.path, "SELECT seq FROM step_reports ORDER BY report_id") == [(n,) for n in range(1, count + 1)]


@pytest.mark.parametrize("arm", Limits(4, 10, True).arms())
def test_arm_names_in_sql_equal_those_of_python(store, arm):
    reports = [report(1, speculation_length=arm.speculation_length, ngram=arm.ngram, num_accepted_tokens=0)]
    assert store_now(store, moment([1], reports=reports)) is None
    assert rows(store.path, "SELECT arm FROM step_reports") == [(str(arm),)]


def test_a_row_of_an_older_incarnation_does_not_replace_one_of_the_present(store):
    """Pairs of models commit apart, and a worker that comes back with another draft is in two of them."""
    assert store_now(store, Commit(contexts=[context()], workers=[worker(5, epoch=8)])) is None
    assert store_now(store, Commit(contexts=[context()], workers=[worker(90, epoch=7)])) is None
    assert rows(store.path, "SELECT epoch, applied_seq FROM workers") == [(8, 5)]
    assert store_now(store, Commit(contexts=[context()], workers=[worker(6, epoch=8)])) is None
    assert rows(store.path, "SELECT epoch, applied_seq FROM workers") == [(8, 6)]


def test_estimates_of_old_ranges_are_deleted(store):
    store_now(
        store, Commit(contexts=[context(), context(2, "gpu")], arm_estimates=[estimate(2), estimate(2, context_id=2)])
    )
    store_now(store, Commit(replaced_contexts=[1], arm_estimates=[estimate(2, batch_min=2, batch_max=4)]))
    assert rows(store.path, "SELECT context_id, batch_min FROM arm_estimates") == [(1, 2), (2, 3)]


counts = st.integers(0, 4096)
lists = st.lists(counts, min_size=1, max_size=9).map(tuple)
steps = st.builds(
    StepRecord,
    seq=st.integers(1, 2**63 - 1),
    batch_size=st.integers(1, 4096),
    arm=st.builds(Arm, st.integers(0, 64), st.booleans()),
    latency_s=st.floats(1e-6, 3600.0),
    accepted_histogram=lists,
    mean_context_length=st.floats(0, 1e6),
    decision_version=counts,
    flags=st.frozensets(st.sampled_from(StepFlag)),
    probe_id=counts,
    class_histograms=st.lists(st.tuples(st.integers(0, 2), lists), unique_by=lambda each: each[0]).map(tuple),
    num_drafted_sequences=counts,
    num_verified_tokens=counts,
    draft_prefill_s=st.floats(0, 3600.0),
    num_new_sequences=counts,
    evaluations=st.lists(
        st.builds(OutputEvaluation, st.integers(0, 2), counts, counts, lists, lists, lists), max_size=2
    ).map(tuple),
)


@given(steps)
def test_a_stored_row_gives_the_step_back(step):
    row = ReportRow(*row_of(step, 5, 3, 2, 7, 11.0))
    assert record_of(row) == step._replace(elapsed_s=0.0)  # trials have ended by then, nothing else reads it
    assert (row.group_id, row.context_id, row.worker_key, row.epoch, row.received_at) == (5, 3, 2, 7, 11.0)
    assert row.num_accepted_tokens == sum(run * count for run, count in enumerate(step.accepted_histogram))


REFUSED = [
    {"workers": [worker(2, num_missing=2**64)]},
    {"workers": [worker(-1)]},
    {"workers": [(1, 2, 3)]},
    {"states": [StateRow(1, b"", 1.0)]},
    {"contexts": [context(max_batch_size=0)]},
]


@pytest.mark.parametrize("changes", REFUSED)
def test_a_commit_whose_mark_or_state_is_refused_is_not_acknowledged(store, changes):
    """Otherwise reports would be acknowledged as durable that a restart counts again or does not know."""
    assert store_now(store, moment([1])) is None
    error = store_now(store, moment([1, 2], **changes))
    assert "refuses" in str(error)
    assert not store.health().ok
    assert rows(store.path, "SELECT seq FROM step_reports") == [(1,)]
    assert rows(store.path, "SELECT applied_seq FROM workers") == [(1,)]
    assert store_now(store, moment([1, 2])) is None, "the same reports, with a mark that can be kept"
    assert store.health().ok
