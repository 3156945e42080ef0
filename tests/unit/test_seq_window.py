"""Each report of a worker's newest incarnation counts once, in whatever order and however often it arrives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speclen.controller.service.registry import GAP_PATIENCE_S, MAX_RANGES, FullError, Registration, Registry, SeqWindow
from speclen.controller.wire.messages import InvalidMessageError
from speclen.records import ContextKey, Limits

arrivals = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=20), max_size=20)


def admitted(window: SeqWindow, seqs: list[int]) -> list[int]:
    return [seq for seq in seqs if window.admit(seq)]


@given(arrivals)
def test_every_number_counts_once(groups):
    window, seen = SeqWindow(), []
    for seqs in groups:
        seen += admitted(window, seqs)
    sent = [seq for seqs in groups for seq in seqs]
    assert sorted(seen) == sorted(set(sent))
    assert window.applied_seq == max(sent, default=0)
    assert window.num_repeated == len(sent) - len(set(sent))
    assert window.num_missing == window.applied_seq - len(set(sent))


@given(arrivals, arrivals)
def test_a_restored_window_continues_where_it_was(before, after):
    window = SeqWindow()
    for seqs in before:
        admitted(window, seqs)
    restored = SeqWindow(window.applied_seq, window.missing_ranges, window.num_missing, window.num_repeated)
    for seqs in after:
        assert admitted(window, seqs) == admitted(restored, seqs)
    assert window.missing_ranges == restored.missing_ranges


@given(arrivals)
def test_settled_seq_only_grows_and_skips_no_open_gap(groups):
    window, seen, before = SeqWindow(), set(), 0
    for seqs in groups:
        seen.update(seqs)
        admitted(window, seqs)
        assert before <= window.settled_seq <= window.applied_seq
        assert set(range(1, window.settled_seq + 1)) <= seen
        before = window.settled_seq


def test_a_gap_is_closed_after_a_while_and_late_reports_are_dropped():
    window = SeqWindow()
    admitted(window, [1, 5])
    assert not window.close_gaps(100.0)
    assert not window.close_gaps(100.0 + GAP_PATIENCE_S - 0.1)
    assert window.settled_seq == 1
    window.admit(9)  # a younger gap
    assert window.close_gaps(100.0 + GAP_PATIENCE_S)
    assert window.settled_seq == 5
    assert admitted(window, [3, 7]) == [7]
    assert window.close_gaps(100.0 + 2 * GAP_PATIENCE_S)
    assert (window.settled_seq, window.missing_ranges) == (9, "[]")


def test_a_clock_that_is_set_back_does_not_keep_gaps_open():
    window = SeqWindow()
    admitted(window, [1, 5])
    window.close_gaps(1e9)
    assert window.close_gaps(100.0)
    assert window.settled_seq == 5


def test_gaps_beyond_the_bound_are_forgotten_oldest_first():
    window = SeqWindow()
    for number in range(MAX_RANGES + 10):
        window.admit(3 * number + 3)  # each skips two
    assert len(window.missing) == MAX_RANGES
    assert not window.admit(1), "forgotten: taken for a repetition rather than counted twice"
    assert window.admit(window.applied_seq - 1)


KEY = ContextKey("t", "d", "cpu:test", "float32")
OTHER = ContextKey("t", "d", "cuda:test", "float32")
LIMITS = Limits(32, 4)


def registry(max_workers: int = 10, max_contexts: int = 10) -> Registry:
    return Registry(lambda: 100.0, max_workers, max_contexts)


def registration(worker_id="w", epoch=7, key=KEY, limits=LIMITS) -> Registration:
    return Registration(worker_id, epoch, key, limits)


def test_a_new_incarnation_starts_over_but_keeps_its_key_and_counts():
    known = registry()
    worker = known.register(registration())
    for seq in (1, 5, 5):
        worker.seqs.admit(seq)
    worker.durable_seq, worker.num_reports = 5, 2
    key = worker.worker_key
    again = known.register(registration(epoch=8, key=OTHER))
    assert (again.worker_key, again.epoch, again.context.key) == (key, 8, OTHER)
    assert (again.seqs.applied_seq, again.durable_seq, again.seqs.missing) == (0, 0, [])
    assert (again.num_reports, again.seqs.num_missing, again.seqs.num_repeated) == (2, 3, 1)


def test_one_incarnation_has_one_context():
    known = registry()
    known.register(registration())
    with pytest.raises(InvalidMessageError, match="another context"):
        known.register(registration(key=OTHER))
    assert OTHER not in known.contexts


def test_numbers_are_bounded_and_the_flag_is_named():
    known = registry(max_workers=1)
    known.register(registration("a"))
    known.register(registration("a", epoch=8))
    with pytest.raises(FullError, match="--max-workers"):
        known.register(registration("b"))
    known = registry(max_contexts=1)
    known.register(registration("a"))
    with pytest.raises(FullError, match="--max-contexts"):
        known.register(registration("b", key=OTHER))
