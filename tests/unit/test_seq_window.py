"""The law: whatever order reports come in and however often, each number counts once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speclen.controller.service.sequence import GAP_PATIENCE_S, MAX_RANGES, SeqWindow

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
def test_a_restored_window_goes_on_as_if_nothing_had_happened(before, after):
    window = SeqWindow()
    for seqs in before:
        admitted(window, seqs)
    restored = SeqWindow(window.applied_seq, window.missing_ranges, window.num_missing, window.num_repeated)
    for seqs in after:
        assert admitted(window, seqs) == admitted(restored, seqs)
    assert window.missing_ranges == restored.missing_ranges


@given(arrivals)
def test_settled_only_grows_and_passes_over_no_number_that_may_still_count(groups):
    window, seen, before = SeqWindow(), set(), 0
    for seqs in groups:
        seen.update(seqs)
        admitted(window, seqs)
        assert before <= window.settled_seq <= window.applied_seq
        assert set(range(1, window.settled_seq + 1)) <= seen
        before = window.settled_seq


def test_a_gap_is_given_up_after_a_while_and_then_nothing_counts_for_it():
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


def test_numbers_that_no_worker_gives_are_left_to_be_refused():
    window = SeqWindow(applied_seq=2**63 - 2)
    assert window.admit(2**63 - 1)
    assert admitted(window, [0, 2**63, 2**64 - 1]) == [0, 2**63, 2**64 - 1]
    assert window.applied_seq == 2**63 - 1


@pytest.mark.parametrize(
    "text", ["{}", "[[1]]", "[[3, 2]]", "[[1, 2], [2, 3]]", "[[8, 10]]", '[["1", 2]]', "[[-1, 2]]"]
)
def test_ranges_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="ranges"):
        SeqWindow(10, text)


def test_gaps_beyond_the_bound_are_forgotten_oldest_first():
    window = SeqWindow()
    for number in range(MAX_RANGES + 10):
        window.admit(3 * number + 3)  # each skips two
    assert len(window.missing) == MAX_RANGES
    assert not window.admit(1), "forgotten: taken for a repetition rather than counted twice"
    assert window.admit(window.applied_seq - 1)
