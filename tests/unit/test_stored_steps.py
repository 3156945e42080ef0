"""Whatever may arrive comes back from the database as it was: a replay makes the same calls."""

from hypothesis import given
from hypothesis import strategies as st

from speclen.controller.wire.stored import record_of, row_of
from speclen.records import Arm, OutputEvaluation, StepFlag, StepRecord
from speclen.store.records import ReportRow

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
def test_a_row_is_the_step_again(step):
    row = ReportRow(*row_of(step, 5, 3, 2, 7, 11.0))
    assert record_of(row) == step
    assert (row.group_id, row.context_id, row.worker_key, row.epoch, row.received_at) == (5, 3, 2, 7, 11.0)
    assert row.num_accepted_tokens == sum(run * count for run, count in enumerate(step.accepted_histogram))
