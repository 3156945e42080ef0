"""A table has an arm for every batch size within the limits, and drafting does not stop and resume all the time."""

from speclen.records import PLAIN, Arm, Choice, Limits
from speclen.worker.arms import CONTRARY_STEPS, ArmTable, SteadyDrafts

LIMITS = Limits(16, 8)


def test_every_batch_size_has_the_arm_of_its_range_within_the_limits():
    choices = [Choice(1, 1, Arm(7, True)), Choice(2, 4, Arm(3, True)), Choice(5, 16, PLAIN)]
    table = ArmTable.of(choices, Limits(8, 5, ngram=True), "controller", 4)
    assert table.arms[1:] == (Arm(5, True), *[Arm(3, True)] * 3, *[PLAIN] * 4)
    assert table.version == 4
    assert ArmTable.of(choices, Limits(8, 5), "controller").arms[1:3] == (Arm(5), Arm(3))


def table_of(*lengths: int) -> ArmTable:
    return ArmTable.of(
        [Choice(size, size, Arm(length)) for size, length in enumerate(lengths, 1)], LIMITS, "controller"
    )


def test_drafting_does_not_stop_and_resume_where_neighbouring_sizes_disagree():
    table, steady = table_of(*[3] * 8, *[0] * 8), SteadyDrafts()
    lengths = [steady.arm_for(table, (8, 9)[at % 2]).speculation_length for at in range(100)]
    assert set(lengths) == {3}


def test_drafting_stops_at_another_load_and_resumes_after_some_steps():
    table, steady = table_of(*[3] * 8, *[0] * 8), SteadyDrafts()
    assert {steady.arm_for(table, 14) for _ in range(20)} == {PLAIN}
    lengths = [steady.arm_for(table, 2).speculation_length for _ in range(20)]
    assert lengths == [0] + [3] * 19
    lengths = [steady.arm_for(table, 9).speculation_length for _ in range(2 * CONTRARY_STEPS)]
    assert lengths == [3] * (CONTRARY_STEPS - 1) + [0] * (CONTRARY_STEPS + 1)
