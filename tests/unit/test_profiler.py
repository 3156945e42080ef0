"""A profile holds what was measured and nothing else, whatever interrupts it and however little memory there is."""

import functools
import logging
from typing import Any

import numpy as np
import pytest

import speclen.worker.profiling.profiler
from speclen.worker.backends.passes import StepRows
from speclen.worker.engine.engine import Engine
from speclen.worker.models.loading import ModelPair, load_pair
from speclen.worker.profiling.profiler import Profiler, ProfileSettings, fit_settings, measured_cell, quick_settings
from speclen.worker.profiling.prompts import PromptSource

TEXTS = ["The target verifies what the draft proposes. " * 20, "def step(self, batch):\n    return batch\n" * 20]
GRID = ProfileSettings(batch_sizes=(1, 2, 4), lengths=(0, 1, 3), budget_s=1.5, prompt_tokens=(8, 24))


@pytest.fixture
def pair(folders):
    return load_pair(*folders, "cpu", "float32")


def profiler(pair: ModelPair, settings: ProfileSettings = GRID, **options: Any) -> Profiler:
    return Profiler(pair, settings, PromptSource(pair.tokenizer, TEXTS, settings.seed), **options)


def test_running_out_of_memory_inside_a_step_lowers_the_batch_size(pair, caplog, monkeypatch):
    """The engine ends the sequences of a failed step; the profile continues with half as many."""
    caplog.set_level(logging.CRITICAL)
    made: list[Engine] = []
    monkeypatch.setattr(
        speclen.worker.profiling.profiler, "Engine", lambda *args: made.append(Engine(*args)) or made[-1]
    )

    running = profiler(pair)
    target = made[-1].target
    honest = {name: getattr(target, name) for name in ("forward", "host_logits") if hasattr(target, name)}

    def short_of_memory(name: str, what: Any, *others: Any) -> Any:
        rows = what if isinstance(what, StepRows) else what[0].rows
        if rows.num_rows > 2:
            raise MemoryError("out of memory")
        return honest[name](what, *others)

    for name in honest:
        setattr(target, name, functools.partial(short_of_memory, name))
    samples = running.run()
    assert samples.largest_batch_size == 2
    assert {cell.batch_size for cell in samples.result().cells} == {1, 2}


def test_without_draft_only_plain_decoding_is_profiled(folders):
    pair = load_pair(folders[0], None, "cpu", "float32")
    result = profiler(pair, quick_settings(2, 0, budget_s=1.0)).run().result()
    assert {cell.speculation_length for cell in result.cells} == {0}
    assert result.survival == ()
    with pytest.raises(ValueError, match="need a draft"):
        fit_settings(pair, GRID)


def test_pauses_of_the_machine_do_not_move_the_time():
    """Every fourth step stalled 10 to 100 times when another process took the core of a waiting thread."""
    rng = np.random.default_rng(0)
    steps = [(0.03 * (1 + 0.03 * rng.standard_normal()) * (30 if n % 4 == 0 else 1), 50.0, n // 3) for n in range(60)]
    cell = measured_cell((4, 2), steps)
    assert cell[:2] == (4, 2)
    assert cell.step_s == pytest.approx(0.03, rel=0.03)
    assert 0 < cell.step_s_stderr < 0.03 * 0.05
    assert (cell.num_steps, cell.mean_context_length) == (60, 50.0)
