"""vLLM's V2 model runner drafts as many tokens as are chosen, and captures graphs for all of them, once speclen is there.

The classes are shaped like vLLM 0.32's; scripts/vllm/drafting.py runs the real ones.
"""

import logging
import sys
import types

import pytest
import structlog
import torch

from speclen.integrations.vllm import logs, v2_runner
from tests.support import fake_vllm

LARGEST, ROWS = 5, 3


class StandaloneARSpeculator:
    """Drafts position by position, and returns a single column where it drafts one token, as vLLM's does."""

    def __init__(self):
        self.num_speculative_steps = LARGEST
        self.draft_tokens = torch.zeros(8, LARGEST, dtype=torch.int64)
        self.num_passes = 0
        self.fails = False

    def propose(self, input_batch, last_sampled, dummy_run=False, num_speculative_tokens=None):
        for step in range(self.num_speculative_steps):
            self.num_passes += 1
            self.draft_tokens[:input_batch, step] = last_sampled + step
        if self.fails:
            raise RuntimeError("out of memory")
        if self.num_speculative_steps == 1:
            return self.draft_tokens[:input_batch, :1]
        return self.draft_tokens[:input_batch]


def build_lookup(table, vllm_max_batch_size, vllm_num_speculative_tokens):
    return [0, *(min(length, vllm_num_speculative_tokens) for low, high, length in table for _ in range(low, high + 1))]


@pytest.fixture
def runner(monkeypatch):
    """Modules of vLLM's V2 runner, with a controller configured: speculator class, then what captures graphs."""
    fake_vllm.install(monkeypatch)
    monkeypatch.setenv("SPECLEN_CONTROLLER", "127.0.0.1:9")
    structlog.reset_defaults()
    modules = {name: types.ModuleType(name) for name in (v2_runner.DRAFTING, *v2_runner.CAPTURING)}
    modules[v2_runner.DRAFTING].StandaloneARSpeculator = type(
        "StandaloneARSpeculator", (StandaloneARSpeculator,), {"propose": StandaloneARSpeculator.propose}
    )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in v2_runner.CAPTURING:
        setattr(modules[name], v2_runner.LOOKUP, build_lookup)
    yield modules
    structlog.reset_defaults()


@pytest.mark.parametrize(("chosen", "num_passes"), [(0, 1), (1, 1), (2, 2), (5, 5), (9, 5), (None, 5)])
def test_a_draft_model_drafts_what_is_chosen(runner, chosen, num_passes):
    v2_runner.register()
    v2_runner.register()  # vLLM may call it again
    speculator = runner[v2_runner.DRAFTING].StandaloneARSpeculator()
    drafts = speculator.propose(ROWS, 7, num_speculative_tokens=chosen)
    assert speculator.num_passes == num_passes
    assert speculator.num_speculative_steps == LARGEST
    assert drafts.shape == (ROWS, LARGEST), "the caller fills and copies all columns"
    assert drafts[0, :num_passes].tolist() == list(range(7, 7 + num_passes))
    drafts[:, 0] = -1
    assert speculator.draft_tokens[0, 0] == -1, "a view, as before"


def test_a_step_that_fails_leaves_the_largest_length_as_it_was(runner):
    v2_runner.register()
    speculator = runner[v2_runner.DRAFTING].StandaloneARSpeculator()
    speculator.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        speculator.propose(ROWS, 7, num_speculative_tokens=2)
    assert speculator.num_speculative_steps == LARGEST


def test_graphs_are_captured_for_lengths_that_the_table_does_not_list(runner):
    table = [(1, 4, 5), (5, 8, 2)]
    v2_runner.register()
    for name in v2_runner.CAPTURING:
        lookup = getattr(runner[name], v2_runner.LOOKUP)(
            table, vllm_max_batch_size=8, vllm_num_speculative_tokens=LARGEST
        )
        assert lookup[: 8 + 1] == [0, 5, 5, 5, 5, 2, 2, 2, 2], "looked up by batch size as before"
        assert set(lookup) == set(range(LARGEST + 1))


def without_a_controller(runner, monkeypatch):
    monkeypatch.delenv("SPECLEN_CONTROLLER")
    return ""


def without_the_class(runner, monkeypatch):
    monkeypatch.setitem(sys.modules, v2_runner.DRAFTING, None)
    return v2_runner.DRAFTING


def without_a_lookup(runner, monkeypatch):
    monkeypatch.delattr(runner[v2_runner.CAPTURING[1]], v2_runner.LOOKUP)
    return v2_runner.LOOKUP


def with_a_library_that_does_not_load(runner, monkeypatch):
    def fail(name):
        raise OSError("libcuda.so.1 is missing")

    monkeypatch.setattr(v2_runner, "import_module", fail)
    return "libcuda.so.1"


def without_a_chosen_length(runner, monkeypatch):
    monkeypatch.setattr(runner[v2_runner.DRAFTING].StandaloneARSpeculator, "propose", lambda self, input_batch: None)
    return "not told a length"


@pytest.mark.parametrize(
    "missing",
    [
        without_a_controller,
        without_the_class,
        without_a_lookup,
        with_a_library_that_does_not_load,
        without_a_chosen_length,
    ],
)
def test_what_is_missing_is_one_line_and_vllm_stays_as_it_is(runner, monkeypatch, caplog, missing):
    named = missing(runner, monkeypatch)
    propose = runner[v2_runner.DRAFTING].StandaloneARSpeculator.propose
    with caplog.at_level(logging.INFO, logger=logs.LOGGER):
        v2_runner.register()
    assert [named in record.getMessage() for record in caplog.records] == ([True] if named else [])
    assert runner[v2_runner.DRAFTING].StandaloneARSpeculator.propose is propose
    assert getattr(runner[v2_runner.CAPTURING[0]], v2_runner.LOOKUP) is build_lookup


@pytest.mark.parametrize(
    ("v2", "method", "graphs", "words"),
    [
        (False, "draft_model", "CUDAGraphMode.PIECEWISE", "no full graphs"),
        (True, "draft_model", "CUDAGraphMode.FULL_AND_PIECEWISE", "one pass of the draft"),
        (True, "eagle", "CUDAGraphMode.FULL_AND_PIECEWISE", "one pass of the draft"),
        (True, "dflash", "CUDAGraphMode.FULL_AND_PIECEWISE", "only shorten verification"),
    ],
)
def test_what_cannot_be_had_is_said(runner, v2, method, graphs, words):
    v2_runner.register()
    changes = {"speculative_config__method": method, "compilation_config__cudagraph_mode": graphs}
    assert words in v2_runner.remark(fake_vllm.config(use_v2_model_runner=v2, **changes))


def test_a_draft_model_that_does_not_follow_is_told_of(runner):
    config = fake_vllm.config(use_v2_model_runner=True)
    assert "no package here" in v2_runner.remark(config)
    v2_runner.register()
    assert "no package here" not in v2_runner.remark(config)


def test_where_nothing_is_missing_nothing_is_said():
    assert v2_runner.remark(fake_vllm.config(use_v2_model_runner=False)) == ""
