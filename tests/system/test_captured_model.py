"""Captured passes give the same tokens as plain ones; all but the graph itself is the same here as on a GPU."""

import logging
from collections.abc import Callable

import pytest
import torch

from speclen.records import StepFlag, StepRecord
from speclen.worker.backends.torch.captured_model import SIZES, CapturedModel, Recording, RerunRecorder, reach
from speclen.worker.engine.engine import Engine
from tests.support import engines
from tests.support.engines import RandomLengths, check_greedy
from tests.support.traffic import Traffic


class CountingRecorder(RerunRecorder):
    """Counts recordings."""

    def __init__(self) -> None:
        self.num_recordings = 0

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        self.num_recordings += 1
        return super().record(run)


class BrokenRecorder:
    """A driver without graphs, or a device without memory for them."""

    def __init__(self, error: Exception, after: int = 0) -> None:
        self.error = error
        self.left = after

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return RerunRecorder().record(run)


class PickyRecorder(CountingRecorder):
    """A device without memory for passes of more than `most` logits."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        if run().shape[:-1].numel() > self.most:
            raise torch.OutOfMemoryError("full")
        return super().record(run)


def captured(model: object) -> CapturedModel:
    assert isinstance(model, CapturedModel)
    return model


def num_kept(model: object) -> int:
    """Recordings that a model keeps; none is made."""
    return captured(model).record_ahead(until=0.0)


def texts(engine: Engine, num: int = 9) -> list[list[int]]:
    """Outputs of a few ragged requests, more than there are slots."""
    requests = [engines.request(str(n), list(range(1, 3 + 5 * n)), max_tokens=12 + n) for n in range(num)]
    collected = engines.generate(engine, *requests)
    return [collected.ids(one.request_id) for one in requests]


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gpt2"])
def test_ragged_schedules_generate_what_the_target_alone_would(family):
    """Sequences join, leave and prefill next to padding rows, while captures are evicted and made again."""
    recorder = CountingRecorder()
    requests, collected, chooser = Traffic(family, seed=3, recorder=recorder, num_requests=80).run()
    target, _ = engines.models(family)
    assert sum(check_greedy(target, one, collected.ids(one.request_id)) for one in requests) <= 1
    assert recorder.num_recordings > 20
    recorded = [result for result in chooser.records if StepFlag.COMPILATION in result.flags]
    assert 0 < len(recorded) < len(chooser.records)


SHORT = {"max_speculation_length": 3, "max_context_length": 100}


def test_passes_are_captured_before_the_first_request():
    """Every pass of these batch sizes and lengths is captured, those over short sequences first; outputs stay the same."""
    recorder, chooser = CountingRecorder(), RandomLengths(1, longest=3)
    engine = engines.make_engine(chooser=chooser, recorder=recorder, record_ahead_s=60, **SHORT)
    # 1, 2 and 4 rows of up to 128 tokens: of the target 1 to 4 queries each, of the draft one or two.
    num_recorded = 3 * 4 + 3 * 2 + num_blocks_recorded(engine)
    assert recorder.num_recordings == num_recorded
    assert texts(engine) == texts(engines.make_engine(chooser=RandomLengths(1, longest=3), **SHORT))
    assert not any(StepFlag.COMPILATION in result.flags for result in chooser.records if not catches_up(result))
    assert recorder.num_recordings <= num_recorded + sum(map(catches_up, chooser.records))


def num_blocks_recorded(engine: Engine) -> int:
    """Passes of prompts that both models record: where there are kernels."""
    return 2 * len(SIZES) if captured(engine.target).has_kernels else 0


def catches_up(result: StepRecord) -> bool:
    return StepFlag.CATCH_UP in result.flags


def test_passes_too_large_for_memory_do_not_prevent_other_captures(caplog):
    """The largest passes are tried first: they are logged once and run without capture."""
    recorder, chooser = PickyRecorder(8), RandomLengths(1, longest=3)
    with caplog.at_level(logging.WARNING):
        engine = engines.make_engine(chooser=chooser, recorder=recorder, record_ahead_s=60, **SHORT)
        assert num_kept(engine.target) == 2 * 4 + 2, "1 and 2 rows of up to 4 queries, 4 rows of up to 2"
        before = recorder.num_recordings
        found = texts(engine)
    assert found == texts(engines.make_engine(chooser=RandomLengths(1, longest=3), **SHORT))
    assert recorder.num_recordings <= before + sum(map(catches_up, chooser.records))
    told = [record.getMessage() for record in caplog.records if "capture PassShape" in record.getMessage()]
    assert len(told) == 2, "each once: 4 rows of 3 and of 4 queries"


def test_without_graphs_nothing_is_captured_and_one_warning_is_logged(caplog):
    with caplog.at_level(logging.WARNING):
        engine = engines.make_engine(recorder=BrokenRecorder(RuntimeError("no graphs here\nat all")))
        assert texts(engine) == texts(engines.make_engine())
    told = [record.getMessage() for record in caplog.records]
    told = [message for message in told if "kernels are not used" not in message]  # first, where there are any
    assert len(told) == 2, "one for the target, one for the draft"
    assert all(message.endswith("one kernel at a time: RuntimeError: no graphs here") for message in told)


def test_later_passes_do_not_overwrite_the_logits_that_sequences_start_from():
    """The prompt's logits are kept until all three sequences have a slot, while passes of the same shape run."""
    outputs = []
    for recorder in (None, RerunRecorder()):
        engine = engines.make_engine(chooser=0, recorder=recorder, max_batch_size=2)
        one = engines.request("one", [5], n=3, max_tokens=6, temperature=1.0, seed=3)
        collected = engines.generate(engine, one)
        outputs.append([collected.ids("one", index) for index in range(3)])
    assert outputs[0] == outputs[1]


def test_values_written_by_padding_rows_are_never_read():
    """Such values may be NaN, and masking multiplies them by 0, which is NaN: they would spoil the slot's next sequence."""
    engine = engines.make_engine(engines.make_pair(), 3, RerunRecorder(), max_context_length=200)
    spare = captured(engine.target).pool.max_length - captured(engine.target).max_queries
    assert spare < engine.target.pool.max_length == reach(129, engine.target.pool.max_length)
    for model in (engine.target, engine.draft):
        for layer in captured(model).pool.layers:
            with torch.inference_mode():
                layer[:, :, :, spare:] = torch.nan
    requests = [engines.request(str(n), [1 + n] * (185 + n), max_tokens=14, ignore_eos=True) for n in range(3)]
    collected = engines.generate(engine, *requests)
    target, _ = engines.models("llama")
    assert sum(check_greedy(target, one, collected.ids(one.request_id)) for one in requests) <= 1
