"""The step benchmark times full batches alone."""

import pytest

from speclen.bench import step as step_benchmark
from speclen.bench.figures import ratio, spread
from speclen.bench.generate import generate
from speclen.records import Arm
from speclen.worker.arms import FixedArm
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.models.loading import load_pair
from tests.support import tiny_models
from tests.support.engines import check_greedy, request


@pytest.fixture
def pair(folders):
    return load_pair(*folders, "cpu", "float32")


PROMPTS = [tuple(range(5, 17)), tuple(range(40, 52)), tuple(range(90, 102))]


@pytest.mark.parametrize("length", [0, 1, 4])
def test_a_run_generates_what_the_target_generates_and_keeps_full_steps_only(pair, length):
    engine = Engine(pair, EngineConfig(3, 4, backend="torch"), FixedArm(Arm(length)))
    for prompt, ids in zip(PROMPTS, generate(engine, PROMPTS, [20] * 3), strict=True):
        assert len(ids) == 20
        check_greedy(tiny_models.build("llama"), request("x", prompt), ids)
    host_times = step_benchmark.watch_host(engine)
    seconds, steps = step_benchmark.run(engine, PROMPTS, 20, length)
    assert len(host_times) >= len(steps) > 0
    assert 0 < sum(host_times) < seconds
    assert seconds > max(record.latency_s for record in steps)
    for record in steps:
        assert (record.batch_size, record.arm.speculation_length) == (3, length)
        assert not record.flags


def test_ratios_are_taken_repeat_by_repeat():
    """A repeat in which the machine was half as fast leaves each ratio as it was."""
    assert ratio([200, 100], [100, 50]) == spread([2.0, 2.0])
    figures = spread([3.0, 1.0, 2.0])
    assert (figures.median, figures.low, figures.high, figures.repeats) == (2.0, 1.0, 3.0, 3)
