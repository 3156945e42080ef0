"""The configured lengths hold until a controller's rest on evidence, and slow lengths are not chosen."""

from __future__ import annotations

from speclen.integrations.vllm.lengths import MIN_SAMPLES, CautiousLengths
from speclen.records import Arm, Choice, Limits, StepFlag, StepRecord
from speclen.worker.drafting.arm_chooser import ArmChoice
from speclen.worker.reporting.table import ArmTable

CONFIGURED = ArmTable.of([Choice(1, 8, Arm(5)), Choice(9, 64, Arm(3))], Limits(64, 8), "configured")
WANTED = ArmChoice(Arm(1), decision_version=4)


def noted(batch_size: int, num_steps: int, *flags: StepFlag) -> CautiousLengths:
    lengths = CautiousLengths(CONFIGURED)
    for _ in range(num_steps):
        lengths.note(StepRecord(0, batch_size, Arm(5), 0.01, (batch_size, 0, 0, 0, 0, 0), flags=frozenset(flags)))
    return lengths


def followed(lengths: CautiousLengths) -> list[int]:
    """Batch sizes at which the controller's choice is used."""
    return [size for size in range(1, 65) if lengths.choice(size, WANTED) == WANTED]


def test_the_configured_length_holds_until_a_size_or_its_neighbour_has_samples():
    assert followed(noted(4, MIN_SAMPLES - 1)) == []
    assert followed(noted(4, MIN_SAMPLES)) == [3, 4, 5]
    assert followed(noted(1, MIN_SAMPLES)) == [1, 2]
    assert followed(noted(32, MIN_SAMPLES)) == [*range(28, 37)]
    assert followed(noted(64, MIN_SAMPLES)) == [*range(56, 65)]
    before = noted(4, MIN_SAMPLES).choice(9, WANTED)
    assert before == ArmChoice(Arm(3)), "of no table of the controller's"


def test_flagged_steps_are_no_evidence():
    assert followed(noted(4, 100, StepFlag.OVERLAP)) == []


def test_probes_are_followed_from_the_first_step():
    probe = ArmChoice(Arm(1), 4, probe_id=7)
    assert CautiousLengths(CONFIGURED).choice(4, probe) == probe


def test_a_slow_length_gives_way_to_the_nearest_fast_one():
    lengths = CautiousLengths(CONFIGURED, fast={0, 3, 5})
    wanted = [lengths.choice(4, ArmChoice(Arm(length), 4, probe_id=7)) for length in range(9)]
    assert [each.arm.speculation_length for each in wanted] == [0, 0, 3, 3, 3, 5, 5, 5, 5]
    assert {each.probe_id for each in wanted} == {7}
