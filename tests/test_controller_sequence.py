"""The law: whatever order reports come in and however often, each number counts once."""

from hypothesis import given
from hypothesis import strategies as st

from speclen.controller.service.sequence import MAX_RANGES, SeqWindow

arrivals = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=20), max_size=20)


def admitted(window: SeqWindow, seqs: list[int]) -> list[int]:
    new = window.admit(seqs)
    return seqs if new is None else [seq for seq, is_new in zip(seqs, new, strict=True) if is_new]


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
        window.admit(seqs)
    restored = SeqWindow(window.applied_seq, window.missing_json(), window.num_missing, window.num_repeated)
    for seqs in after:
        assert admitted(window, seqs) == admitted(restored, seqs)
    assert window.missing_json() == restored.missing_json()


def test_a_gap_is_accepted_and_counted_and_can_still_be_filled():
    window = SeqWindow()
    assert window.admit([1, 2, 6]) == [True, True, True]
    assert (window.applied_seq, window.num_missing, window.missing_json()) == (6, 3, "[[3, 5]]")
    assert window.admit([4, 4]) == [True, False]
    assert (window.num_missing, window.missing_json()) == (2, "[[3, 3], [5, 5]]")


def test_a_report_that_fills_a_gap_is_late_until_it_is_on_disk():
    window = SeqWindow()
    window.admit([1, 5])
    window.admit([3])
    assert window.late == {3}


def test_gaps_beyond_the_bound_are_forgotten_oldest_first():
    window = SeqWindow()
    for number in range(MAX_RANGES + 10):
        window.admit([3 * number + 3])  # each skips two
    assert len(window.missing) == MAX_RANGES
    assert window.admit([1]) == [False], "forgotten: taken for a repetition rather than counted twice"
    assert window.admit([window.applied_seq - 1]) == [True]


def test_numbers_that_no_worker_gives_are_left_to_be_refused():
    window = SeqWindow()
    assert window.admit([0, 2**64 - 1]) == [True, True]
    assert window.applied_seq == 0
