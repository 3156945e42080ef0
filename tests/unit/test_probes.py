"""A probe is used once, for as long as it holds; the buffer of reports is bounded and sampled."""

import sys
import threading
from dataclasses import replace

import pytest

from speclen.records import Arm, Limits
from speclen.worker.arms import ArmChoice
from speclen.worker.reporting.control_client import BLOCK, ControlClient, ReportBuffer
from tests.support.control_parts import client, probe, step


def test_reports_are_read_while_steps_append_more():
    """Story: iterating over a deque while it grew raised an error, once in tens of thousands of messages."""
    buffer, number, interval = ReportBuffer(50_000), 50_000, sys.getswitchinterval()

    def append() -> None:
        for _ in range(number):
            buffer.append(step())

    sys.setswitchinterval(1e-6)
    engine = threading.Thread(target=append)
    try:
        engine.start()
        seqs: list[int] = []
        while len(seqs) < number:
            seqs += [record.seq for record in buffer.after(len(seqs), 256)]
            buffer.forget_until(len(seqs) - 100)
    finally:
        sys.setswitchinterval(interval)
        engine.join()
    assert seqs == list(range(1, number + 1))
    assert len(buffer) == 100


def arms_and_probes(control: ControlClient, *steps: tuple[int, bool]) -> list[tuple[int, int]]:
    made = [control.choose(batch_size, with_prefill) for batch_size, with_prefill in steps]
    return [(choice.arm.speculation_length, choice.probe_id) for choice in made]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([(4, False)] * 3, [(1, 9), (1, 9), (2, 0)]),
        ([(2, False), (3, False), (4, False), (4, False)], [(2, 0), (1, 9), (1, 9), (2, 0)]),
        ([(4, False), (5, False), (4, False)], [(1, 9), (2, 0), (2, 0)]),  # the batch grew: it ends
        ([(4, False), (4, True), (4, False)], [(1, 9), (2, 0), (2, 0)]),  # a prompt came along: it ends
        ([(4, True), (4, True), (4, False), (4, False)], [(2, 0), (2, 0), (1, 9), (1, 9)]),  # it waits
    ],
)
def test_all_steps_of_a_probe_quote_it(steps, expected):
    control = client()
    control.use_probes([probe(3, 4, num_steps=2)])
    assert arms_and_probes(control, *steps) == expected
    assert arms_and_probes(control, (4, False)) == [(2, 0)], "it is never repeated"


@pytest.mark.parametrize(("evaluates", "expected"), [(True, (0, 0)), (False, (1, 9))])
def test_a_probe_starts_during_prefill_only_if_acceptance_needs_it(evaluates, expected):
    control = client(first=Arm(0))
    control.card = replace(control.card, evaluates=evaluates)
    control.use_probes([probe()])
    assert arms_and_probes(control, (2, True)) == [expected]


def test_an_old_probe_is_forgotten_and_one_beyond_the_limits_is_not_used():
    now = [0.0]
    control = client(clock=lambda: now[0])
    control.use_probes([probe(valid_for_s=1.0), probe(arm=Arm(5))])
    now[0] = 2.0
    assert control.choose(1).probe_id == 0


def test_blocks_of_steps_are_sampled_and_only_reported_steps_have_a_seq():
    buffer = ReportBuffer(10**6, sample_every=3)
    for number in range(6 * BLOCK):
        buffer.append(step(decision_version=number))
    kept = buffer.after(0, 10**6)
    assert [record.seq for record in kept] == list(range(1, 2 * BLOCK + 1))
    assert [record.decision_version for record in kept] == [*range(BLOCK), *range(3 * BLOCK, 4 * BLOCK)]


@pytest.mark.parametrize(("told", "used"), [(0, 1), (1, 1), (7, 7), (10**6, 1)])
def test_sampling_is_the_controllers_within_bounds(told, used):
    control = client()
    control.use_sampling(told)
    assert control.buffer.sample_every == used
