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
def test_a_draft_model_drafts_what_is_chosen(runner, caplog, chosen, num_passes):
    v2_runner.register()
    v2_runner.register()  # vLLM may call it again
    assert not caplog.records
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


@pytest.mark.parametrize("are_apart", [True, False])
@pytest.mark.parametrize("is_moe", [True, False])
def test_replicas_keep_their_table_if_none_waits_for_another(runner, monkeypatch, is_moe, are_apart):
    found = sys.modules["vllm.config"]
    if not are_apart:
        monkeypatch.delattr(found.ParallelConfig, "reconfigure_for_independent_dp_rank")
    v2_runner.register()
    config = found.VllmConfig(is_moe)
    config._maybe_disable_dynamic_sd_for_data_parallel()  # noqa: SLF001
    assert bool(config.table) is (are_apart and not is_moe)


def fail(name):
    raise OSError("libcuda.so.1 is missing")


SPECULATOR = "StandaloneARSpeculator"
MISSING = {  # how to take something away, and the words that name it; none where no controller is configured
    "controller": (lambda patch, modules: patch.delenv("SPECLEN_CONTROLLER"), ""),
    "class": (lambda patch, modules: patch.delattr(modules[v2_runner.DRAFTING], SPECULATOR), SPECULATOR),
    "lookup": (
        lambda patch, modules: patch.delattr(modules[v2_runner.CAPTURING[1]], v2_runner.LOOKUP),
        v2_runner.LOOKUP,
    ),
    "library": (lambda patch, modules: patch.setattr(v2_runner, "import_module", fail), "libcuda.so.1"),
    "length": (
        lambda patch, modules: patch.setattr(
            getattr(modules[v2_runner.DRAFTING], SPECULATOR), "propose", lambda self: 0
        ),
        "not told a length",
    ),
}


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_one_line_and_vllm_stays_as_it_is(runner, monkeypatch, caplog, name):
    take, words = MISSING[name]
    take(monkeypatch, runner)
    propose = getattr(getattr(runner[v2_runner.DRAFTING], SPECULATOR, None), "propose", None)
    with caplog.at_level(logging.INFO, logger=logs.LOGGER):
        v2_runner.register()
    assert [words in record.getMessage() for record in caplog.records] == ([True] if words else [])
    assert getattr(getattr(runner[v2_runner.DRAFTING], SPECULATOR, None), "propose", None) is propose
    assert getattr(runner[v2_runner.CAPTURING[0]], v2_runner.LOOKUP) is build_lookup


@pytest.mark.parametrize(
    ("registered", "v2", "method", "graphs", "words"),
    [
        (True, False, "draft_model", "CUDAGraphMode.PIECEWISE", "no full graphs"),
        (True, True, "draft_model", "CUDAGraphMode.FULL_AND_PIECEWISE", "one pass of the draft"),
        (True, True, "eagle", "CUDAGraphMode.FULL_AND_PIECEWISE", "one pass of the draft"),
        (True, True, "dflash", "CUDAGraphMode.FULL_AND_PIECEWISE", "only shorten verification"),
        (False, True, "draft_model", "CUDAGraphMode.FULL_AND_PIECEWISE", "install speclen here"),
        (False, False, "draft_model", "NONE", None),
    ],
)
def test_what_cannot_be_had_is_said(runner, registered, v2, method, graphs, words):
    if registered:
        v2_runner.register()
    changes = {"speculative_config__method": method, "compilation_config__cudagraph_mode": graphs}
    found = v2_runner.remark(fake_vllm.config(use_v2_model_runner=v2, **changes))
    assert words in found if words else found == ""
