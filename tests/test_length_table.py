"""A table answers for every batch size, and the paper's table takes the length with the least time per token."""

import pytest

from speclen.worker.reporting.length_table import BucketLength, LengthTable, ProfiledStep, table_from_profile


def test_every_batch_size_has_the_length_of_its_bucket():
    buckets = [BucketLength(1, 1, 7), BucketLength(2, 4, 3), BucketLength(5, 16, 0)]
    table = LengthTable.from_buckets(buckets, max_batch_size=8, max_length=5, version=4, source="controller")
    assert table.lengths[1:] == (5, 3, 3, 3, 0, 0, 0, 0)  # 7 is over the worker's limit of 5
    assert table.decision_version == 4


def test_a_table_with_a_hole_is_refused():
    with pytest.raises(ValueError, match="batch size 2"):
        LengthTable.from_buckets([BucketLength(1, 1, 1), BucketLength(3, 8, 1)], 8, 8, 1, "controller")


def test_constant_table():
    assert LengthTable.constant(4, 3, "policy").lengths[1:] == (4, 4, 4)


def test_profile_table_minimises_time_per_token():
    # Two positions survive with 0.8 and 0.6: lengths 0, 1, 2 yield 1.0, 1.8 and 2.4 tokens.
    survival = [0.8, 0.6]
    flat = [ProfiledStep(1, length, 0.010 + 0.001 * length) for length in range(3)]  # 10, 6.1, 5.0 ms a token
    steep = [ProfiledStep(8, length, 0.010 + 0.010 * length) for length in range(3)]  # 10, 11.1, 12.5 ms a token
    table = table_from_profile(flat + steep, survival, max_batch_size=16, max_length=8)
    assert table.lengths[1] == 2
    assert set(table.lengths[2:]) == {0}


def test_profile_lengths_without_survival_are_not_used():
    steps = [ProfiledStep(1, 0, 1.0), ProfiledStep(1, 5, 0.1)]
    assert table_from_profile(steps, [0.5], 4, 8).lengths[1] == 0


def test_empty_profile_is_refused():
    with pytest.raises(ValueError, match="no cells"):
        table_from_profile([], [], 4, 8)
