"""Usable times of vLLM's overlapping steps equal the time of a step of that length.

The steps run in a model of vLLM's queue: a host that launches step N + 1, then waits for step N, and a device that
computes them in order. The true time of a length is the interval between results when nothing else runs.
"""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from speclen.integrations.vllm.steering import OVERLAPPED_PROBE_STEPS, PROBE_STEPS
from speclen.integrations.vllm.steps import Traits
from speclen.integrations.vllm.timing import DeviceClock
from speclen.records import Arm, StepFlag, StepRecord
from speclen.worker.arms import ArmChoice
from tests.support import fake_vllm
from tests.support.vllm_steps import Steps

LENGTHS = (0, 1, 3, 5)
ROWS = 8


@dataclass(frozen=True)
class Machine:
    """Milliseconds that host and device need for a step; one draft pass each for `draft`, one token each for `verify`.

    late: a result is there before the drafts of its step are made, as in the model runner V2.
    """

    host: float
    host_draft: float
    device: float
    device_draft: float
    device_verify: float
    late: bool = False


MACHINES = {
    "host-bound": Machine(7.0, 4.0, 3.0, 0.8, 0.2),
    "mixed": Machine(4.0, 3.4, 13.0, 0.8, 0.5),
    "device-bound": Machine(1.0, 0.3, 10.0, 2.3, 0.4),
}
MACHINES |= {f"{name}, late drafts": replace(machine, late=True) for name, machine in MACHINES.items()}
MACHINES["crossing"] = Machine(7.0, 0.4, 3.0, 3.0, 0.4)


class Queue(Steps):
    """vLLM's loop on one machine. Every sequence accepts what it drafted. timed: by the device's clock."""

    def __init__(self, machine: Machine, timed: bool = False, jitter: float = 0.0) -> None:
        self.machine, self.jitter, self.dice = machine, jitter, random.Random(7)
        clock = DeviceClock(lambda: Event(self)) if timed else None
        traits = Traits(overlapped=True, late_drafts=machine.late)
        super().__init__(map(str, range(ROWS)), 10, ArmChoice(Arm(0)), traits, clock)
        self.device_free_s, self.verified = 0.0, 0
        self.in_flight: deque[tuple[Any, float]] = deque()
        self.records: list[StepRecord] = []

    def start(self, choice: ArmChoice, new: tuple[str, ...] = ()) -> None:
        """Schedule a step and launch its passes; `new` sequences compute their prompts."""
        names, machine, drafted = [*self.requests], self.machine, choice.arm.speculation_length
        tokens = {name: 60 if name in new else 1 + self.verified for name in names}
        drafts = {name: [1] * self.verified for name in names if name not in new}
        output = self.launch(fake_vllm.scheduled(tokens, drafts, [50] * (len(names) - len(new)), new), choice)
        begin = max(self.now_s, self.device_free_s)
        self.now_s += self.about(machine.host)
        verify_s = self.about(machine.device + machine.device_verify * self.verified + 30 * len(new))
        verified_at = max(begin + verify_s, self.now_s)
        self.now_s += self.about(machine.host_draft * drafted)
        self.device_free_s = max(verified_at + self.about(machine.device_draft * drafted), self.now_s)
        self.in_flight.append((output, verified_at if machine.late else self.device_free_s))
        self.verified = drafted

    def about(self, ms: float) -> float:
        """Seconds with this mean."""
        return 1e-3 * ms * max(0.2, self.dice.gauss(1.0, self.jitter)) if self.jitter else 1e-3 * ms

    def wait(self) -> None:
        """Wait for the oldest result."""
        output, result_at = self.in_flight.popleft()
        self.now_s = max(self.now_s, result_at)
        drafts = output.scheduled_spec_decode_tokens
        if (record := self.take(output, {name: len(ids) for name, ids in drafts.items()})) is not None:
            self.records.append(record)

    def run(self, choices: Iterator[ArmChoice] | list[ArmChoice]) -> list[StepRecord]:
        for choice in choices:
            self.start(choice)
            if len(self.in_flight) == 2:
                self.wait()
        return self.records


class Event:
    """As torch.cuda.Event: the device reaches it behind all work that was launched before."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def record(self) -> None:
        self.reached_s = max(self.queue.now_s, self.queue.device_free_s)

    def query(self) -> bool:
        return self.queue.now_s >= self.reached_s

    def elapsed_time(self, end_event) -> float:
        assert end_event.query(), "nobody waits for a device"
        return 1e3 * (end_event.reached_s - self.reached_s)


def true_ms(machine: Machine, length: int, jitter: float = 0.0) -> float:
    """Milliseconds of a step, when only this length is used."""
    queue, num_steps = Queue(machine, jitter=jitter), 800 if jitter else 40
    queue.run([ArmChoice(Arm(length))] * 40)
    before = queue.now_s
    queue.run([ArmChoice(Arm(length))] * num_steps)
    return 1e3 * (queue.now_s - before) / num_steps


def changing(seed: int, num_holds: int) -> Iterator[ArmChoice]:
    """Lengths held for 2 to 30 steps, with a probe now and then."""
    dice = random.Random(seed)
    for at in range(num_holds):
        yield from [ArmChoice(Arm(dice.choice(LENGTHS)))] * dice.randint(2, 30)
        if at % 4 == 0:
            yield from [ArmChoice(Arm(dice.choice(LENGTHS)), probe_id=at + 1)] * OVERLAPPED_PROBE_STEPS


def errors(machine: Machine, records: list[StepRecord]) -> list[float]:
    truth = {length: true_ms(machine, length) for length in LENGTHS}
    return [abs(1e3 * each.latency_s / truth[each.arm.speculation_length] - 1.0) for each in records]


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("name", MACHINES)
def test_usable_times_are_those_of_their_length(name, timed):
    machine = MACHINES[name]
    records = Queue(machine, timed).run(changing(1, 200))
    usable = [each for each in records if not each.flags]
    assert len(usable) > 0.75 * len(records)
    for length in LENGTHS:
        mine = [each.latency_s for each in usable if each.arm.speculation_length == length]
        assert 1e3 * sum(mine) / len(mine) == pytest.approx(true_ms(machine, length), rel=0.01)
    # Where one length is bound by the host and the next by the device, the queue takes some steps to fill: their results
    # do come as fast as the host launches them.
    wrong = sorted(errors(machine, usable))
    assert wrong[int(0.97 * len(wrong))] < 0.03
    # With the device's clock, that is seen in the second such step.
    assert wrong[-1] < ((0.08 if timed else 0.2) if name.startswith(("mixed", "crossing")) else 0.01)


@pytest.mark.parametrize(("jitter", "most"), [(0.02, 0.01), (0.10, 0.01), (0.30, 0.07)])
@pytest.mark.parametrize("name", ["host-bound", "device-bound", "mixed", "crossing"])
def test_the_devices_times_are_true_where_host_and_device_jitter(name, jitter, most):
    """The longer of the device's and the host's would be up to 1, 5 and 15% too long."""
    machine = MACHINES[name]
    records = Queue(machine, timed=True, jitter=jitter).run(changing(1, 180))
    usable = [each for each in records if not each.flags]
    assert len(usable) > (0.5 if jitter <= 0.1 else 0.2) * len(records)
    for length in LENGTHS:
        mine = [each.latency_s for each in usable if each.arm.speculation_length == length]
        assert 1e3 * sum(mine) / len(mine) == pytest.approx(true_ms(machine, length, jitter), rel=most)


@pytest.mark.parametrize(("timed", "num_steps"), [(False, OVERLAPPED_PROBE_STEPS), (True, PROBE_STEPS - 1)])
@pytest.mark.parametrize("name", MACHINES)
def test_a_probe_is_long_enough_for_a_usable_time_and_no_longer(name, timed, num_steps):
    for length in range(2, num_steps + 1):
        queue = Queue(MACHINES[name], timed)
        queue.run([ArmChoice(Arm(3))] * 20 + [ArmChoice(Arm(5))] * 20 + [ArmChoice(Arm(3))] * 20)  # shapes are known
        queue.records.clear()
        queue.run([ArmChoice(Arm(5), probe_id=9)] * length + [ArmChoice(Arm(3))] * 20)
        usable = [each for each in queue.records if each.probe_id and not each.flags]
        assert len(usable) == (length == num_steps)
        assert all(error < (0.08 if timed else 0.03) for error in errors(MACHINES[name], usable))


@pytest.mark.parametrize(
    ("name", "timed", "usable"),
    [("host-bound", False, "---++++++++-" + "-++"), ("device-bound", True, "--+++++++++-" + "-+")],
)
def test_the_first_and_the_last_step_of_a_full_queue_are_not_usable(name, timed, usable):
    """With the device's clock a record comes with the next result."""
    queue = Queue(MACHINES[name], timed)
    queue.run([ArmChoice(Arm(3))] * 12)
    while queue.in_flight:
        queue.wait()
    queue.now_s += 0.5  # there are no requests
    queue.run([ArmChoice(Arm(3))] * 4)
    assert "".join("-+"[not each.flags] for each in queue.records) == usable
    assert max(each.latency_s for each in queue.records if not each.flags) < 0.1, "the wait is not step time"


@pytest.mark.parametrize(
    ("name", "timed", "expected"),
    [
        ("host-bound", False, "PP..."),
        ("host-bound, late drafts", False, "PPP.."),
        ("host-bound", True, "..PP.."),  # records come a step later, and those before the prompt do not know of it
        ("host-bound, late drafts", True, "..PP.."),
    ],
)
def test_steps_whose_time_includes_prefill_are_excluded(name, timed, expected):
    queue = Queue(MACHINES[name], timed)
    queue.run([ArmChoice(Arm(3))] * 20)
    queue.records.clear()
    queue.requests["new"] = fake_vllm.Request("new", 60)
    queue.start(ArmChoice(Arm(3)), new=("new",))
    queue.wait()
    queue.requests["new"].num_computed_tokens = 60
    queue.run([ArmChoice(Arm(3))] * (4 + timed))
    assert "".join("P" if StepFlag.PREFILL in each.flags else "." for each in queue.records) == expected
    assert max(errors(queue.machine, [each for each in queue.records if not each.flags])) < 0.03
