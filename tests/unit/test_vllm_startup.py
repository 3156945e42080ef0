"""Changes to vLLM's configuration before an engine starts, which reach every rank.

The classes are shaped like vLLM 0.32's; scripts/vllm/drafting.py runs the real ones.
"""

import logging
import sys
import types

import pytest
import structlog
import torch

import speclen.integrations.vllm as plugin
from speclen.integrations.vllm import startup
from tests.support import fake_vllm

OURS = "speclen.integrations.vllm.Scheduler"
TABLE = [(1, 4, 5), (5, 8, 2)]
V2 = {"use_v2_model_runner": True, "compilation_config__cudagraph_mode": "CUDAGraphMode.FULL_AND_PIECEWISE"}
HYBRID = {"model_config__is_hybrid": True}


@pytest.fixture
def arguments(monkeypatch):
    """vLLM's EngineArgs, with the plugin registered and an unreachable controller configured."""
    fake_vllm.install(monkeypatch)
    monkeypatch.setenv("SPECLEN_CONTROLLER", "127.0.0.1:9")
    monkeypatch.setattr(startup, "learned_by", lambda config: {})
    structlog.reset_defaults()
    found = sys.modules["vllm.engine.arg_utils"].EngineArgs
    plugin.register()
    plugin.register()  # vLLM may call it again
    yield found
    structlog.reset_defaults()


def lengths_of(config):
    """By batch size, as vLLM looks them up."""
    return fake_vllm.lookup_of(config)[1:]


def created(arguments, table=TABLE, **changes):
    return arguments(OURS, {startup.TABLE: table} if table else {}, **changes).create_engine_config()


@pytest.mark.parametrize("scheduler", [None, "vllm.v1.core.sched.scheduler.Scheduler", dict])
def test_another_scheduler_changes_nothing(arguments, monkeypatch, scheduler):
    monkeypatch.delitem(sys.modules, startup.__name__)
    made = arguments(scheduler, {startup.TABLE: TABLE}, **V2)
    config = made.create_engine_config()
    assert made.num_created == 1
    assert (config.additional_config, config.parallel_config.worker_extension_cls) == ({}, "")
    assert config.speculative_config.num_speculative_tokens_per_batch_size == TABLE
    assert startup.__name__ not in sys.modules
    assert not structlog.is_configured()


@pytest.mark.parametrize(
    "variables", [{"SPECLEN_CONTROLLER": "off"}, {"SPECLEN_CONTROLLER": "nowhere"}, {"SPECLEN_WORKER_POLICY": "clever"}]
)
def test_settings_that_cannot_work_change_nothing(arguments, monkeypatch, variables):
    monkeypatch.delenv("SPECLEN_CONTROLLER")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert created(arguments, **V2).additional_config == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"speculative_config__parallel_drafting": True},
        {"speculative_config__method": "medusa"},
        {"parallel_config__pipeline_parallel_size": 2},
        {"parallel_config__data_parallel_size": 2, "model_config__is_moe": True},
        {**V2, "speculative_config__enable_adaptive_verification": True},
        {**V2, "parallel_config__nnodes": 2},  # each node makes its own configuration
        {**V2, "parallel_config__distributed_executor_backend": "external_launcher", "parallel_config__world_size": 2},
    ],
)
def test_a_configuration_that_is_refused_stays_as_it_is(arguments, changes):
    config, alone = created(arguments, **changes), arguments(None, {startup.TABLE: TABLE}, **changes)
    expected = alone.create_engine_config()
    assert (config.additional_config, config.parallel_config.worker_extension_cls) == ({}, "")
    assert vars(config.speculative_config)[startup.TABLE] == vars(expected.speculative_config)[startup.TABLE]


@pytest.mark.parametrize(
    ("controller", "changes", "num_started"),
    [("embedded", {}, 1), ("127.0.0.1:9", {}, 0), ("embedded", {"parallel_config__pipeline_parallel_size": 2}, 0)],
)
def test_an_embedded_controller_starts_while_vllm_loads(arguments, monkeypatch, controller, changes, num_started):
    started = []
    monkeypatch.setenv("SPECLEN_CONTROLLER", controller)
    monkeypatch.setattr(startup, "start_controller", started.append)
    created(arguments, **changes)
    assert len(started) == num_started


def test_one_length_is_a_table_of_it(arguments):
    config = created(arguments, table=None, speculative_config__num_speculative_tokens_per_batch_size=None)
    assert lengths_of(config) == [5] * 8
    assert startup.users_lookup(config) == [0, *[5] * 8]


@pytest.mark.parametrize(
    ("learned", "table", "captured"),
    [
        ({}, TABLE, {5, 4, 2, 1, 3}),
        ({}, [(1, 8, 5)], {5, 4}),
        (dict.fromkeys(range(1, 9), 1), [(1, 8, 5)], {5, 1, 0, 2}),  # what was learned has the neighbours
        ({size: 5 if size < 8 else 2 for size in range(1, 9)}, TABLE, {5, 2, 4, 1, 3}),
        ({}, [(1, 8, 0)], {0, 1}),
        (dict.fromkeys(range(1, 8), 9) | {8: 1}, [(1, 8, 5)], {5, 4, 1, 0, 2}),  # learned with a larger number
    ],
)
def test_graphs_are_for_the_lengths_in_use_and_their_neighbours(arguments, monkeypatch, learned, table, captured):
    monkeypatch.setattr(startup, "learned_by", lambda config: learned)
    config = created(arguments, table, **V2)
    assert set(lengths_of(config)) == captured
    assert startup.users_lookup(config)[1:] == [length for low, high, length in table for _ in range(low, high + 1)], (
        "the scheduler's"
    )
    if learned:
        assert lengths_of(config)[-1] == learned[8], "captured for the batch sizes that use it"


@pytest.mark.parametrize(
    ("policy", "captured"), [("profile", {5, 2}), ("fixed:3", {5, 2, 3}), ("none", {5, 2, 0}), ("fixed:9", {5, 2})]
)
def test_a_policy_of_the_workers_own_needs_no_neighbours(arguments, monkeypatch, policy, captured):
    monkeypatch.setenv("SPECLEN_WORKER_POLICY", policy)
    assert set(lengths_of(created(arguments, **V2))) == captured


def test_recurrent_models_keep_the_table_since_their_builders_capture_no_other_length(arguments):
    assert lengths_of(created(arguments, **V2, **HYBRID)) == [5, 5, 5, 5, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("changes", "extension"),
    [
        (V2, startup.EXTENSION),
        ({**V2, "parallel_config__distributed_executor_backend": "mp"}, startup.EXTENSION),
        ({**V2, "parallel_config__distributed_executor_backend": "ray"}, ""),  # a node may lack the package
        ({**V2, "speculative_config__method": "eagle"}, ""),
        ({}, ""),
    ],
)
def test_the_draft_model_of_v2_follows_lengths_where_all_ranks_can(arguments, changes, extension):
    config = created(arguments, **changes)
    assert config.parallel_config.worker_extension_cls == extension
    assert startup.drafts_chosen(config) == bool(extension)


def test_an_extension_of_the_users_own_is_kept(arguments):
    made = arguments(OURS, {startup.TABLE: TABLE}, **V2)
    made.worker_extension_cls = "mine.Extension"
    assert made.create_engine_config().parallel_config.worker_extension_cls == "mine.Extension"


def test_replicas_of_a_dense_model_keep_their_table_and_vllm_its_switch(arguments):
    config = created(arguments, parallel_config__data_parallel_size=2)
    assert config.speculative_config.num_speculative_tokens_per_batch_size == TABLE
    alone = arguments(None, {startup.TABLE: TABLE}, parallel_config__data_parallel_size=2).create_engine_config()
    assert alone.speculative_config.num_speculative_tokens_per_batch_size is None


@pytest.mark.parametrize("name", ["parallel_drafting", "enable_adaptive_verification", "method"])
def test_a_newer_vllm_without_a_setting_stays_as_it_is(arguments, monkeypatch, caplog, name):
    made = fake_vllm.config

    def without(**changes):
        config = made(**changes)
        delattr(config.speculative_config, name)
        return config

    monkeypatch.setattr(fake_vllm, "config", without)
    assert created(arguments, **V2).additional_config == {}
    assert not caplog.records, "the scheduler logs the reason"


def fail(*_):
    raise RuntimeError("a fault of ours")


def test_an_internal_error_is_logged_and_vllm_starts(arguments, monkeypatch, caplog):
    monkeypatch.setattr(startup, "changes_to", fail)
    config = created(arguments, **V2)
    assert (config.additional_config, lengths_of(config)) == ({}, [5, 5, 5, 5, 2, 2, 2, 2])
    assert "a fault of ours" in caplog.text


@pytest.mark.parametrize("missing", ["arg_utils", "EngineArgs", "create_engine_config"])
def test_a_vllm_without_the_name_stays_as_it_is(monkeypatch, missing):
    fake_vllm.install(monkeypatch)
    module = sys.modules["vllm.engine.arg_utils"]
    if missing == "arg_utils":
        monkeypatch.delitem(sys.modules, "vllm.engine.arg_utils")
    else:
        monkeypatch.delattr(*((module, missing) if missing == "EngineArgs" else (module.EngineArgs, missing)))
    plugin.register()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            startup.subprocess.CalledProcessError(1, "python", stderr="a warning\nUNAVAILABLE: nobody listens\n"),
            "UNAVAILABLE: nobody listens",
        ),
        (startup.subprocess.TimeoutExpired("python", 5.0), "timed out after 5.0 seconds"),  # it died meanwhile
        (OSError("no more processes"), "no more processes"),
    ],
)
def test_without_an_answer_vllm_starts_and_one_line_is_logged(monkeypatch, caplog, error, words):
    def fail_to_answer(command, **_):
        raise error

    fake_vllm.install(monkeypatch)
    monkeypatch.setenv("SPECLEN_CONTROLLER", "127.0.0.1:9")
    monkeypatch.setattr(startup.subprocess, "run", fail_to_answer)
    with caplog.at_level(logging.INFO, logger="vllm.speclen"):
        assert startup.learned_by(fake_vllm.config()) == {}
    assert words in caplog.text


# In the workers of V2.

LARGEST, ROWS = 5, 3


class StandaloneARSpeculator:
    """Drafts position by position, and returns a single column where it drafts one token, as vLLM's does."""

    def __init__(self, extension=startup.EXTENSION):
        self.vllm_config = fake_vllm.config(parallel_config__worker_extension_cls=extension)
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


@pytest.fixture
def drafting(monkeypatch):
    """vLLM's module of the speculator."""
    module = types.ModuleType(startup.DRAFTING)
    members = {name: vars(StandaloneARSpeculator)[name] for name in ("__init__", "propose")}
    module.StandaloneARSpeculator = type("StandaloneARSpeculator", (), members)
    monkeypatch.setitem(sys.modules, startup.DRAFTING, module)
    return module


@pytest.mark.parametrize(("chosen", "num_passes"), [(0, 1), (1, 1), (2, 2), (5, 5), (9, 5), (None, 5)])
def test_a_draft_model_drafts_what_is_chosen(drafting, caplog, chosen, num_passes):
    for _ in range(2):  # two engines of one process
        assert plugin.DraftsChosenLength is startup.DraftsChosenLength
    assert not caplog.records
    speculator = drafting.StandaloneARSpeculator()
    drafts = speculator.propose(ROWS, 7, num_speculative_tokens=chosen)
    assert speculator.num_passes == num_passes
    assert speculator.num_speculative_steps == LARGEST
    assert drafts.shape == (ROWS, LARGEST), "the caller fills and copies all columns"
    assert drafts[0, :num_passes].tolist() == list(range(7, 7 + num_passes))
    drafts[:, 0] = -1
    assert speculator.draft_tokens[0, 0] == -1, "a view, as before"


def test_another_engine_of_the_process_drafts_as_vllm_does(drafting):
    startup.follow_lengths()
    speculator = drafting.StandaloneARSpeculator(extension="")
    speculator.propose(ROWS, 7, num_speculative_tokens=2)
    assert speculator.num_passes == LARGEST


def test_a_step_that_fails_leaves_the_largest_length_as_it_was(drafting):
    startup.follow_lengths()
    speculator = drafting.StandaloneARSpeculator()
    speculator.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        speculator.propose(ROWS, 7, num_speculative_tokens=2)
    assert speculator.num_speculative_steps == LARGEST


@pytest.mark.parametrize("name", ["vllm_config", "draft_tokens", "num_speculative_steps"])
def test_a_speculator_without_a_name_drafts_as_vllm_does(drafting, name):
    drafting.StandaloneARSpeculator.propose = lambda self, num_speculative_tokens=None: "all"
    startup.follow_lengths()
    speculator = drafting.StandaloneARSpeculator()
    delattr(speculator, name)
    assert speculator.propose(num_speculative_tokens=2) == "all"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda patch, module: patch.delattr(module, "StandaloneARSpeculator"), "StandaloneARSpeculator"),
        (lambda patch, module: patch.setattr(startup, "import_module", fail), "a fault of ours"),
        (
            lambda patch, module: patch.setattr(module.StandaloneARSpeculator, "propose", lambda self: 0),
            "no argument num_speculative_tokens",
        ),
    ],
)
def test_a_missing_part_is_one_line_and_vllm_is_unchanged(drafting, monkeypatch, caplog, change, words):
    change(monkeypatch, drafting)
    before = vars(getattr(drafting, "StandaloneARSpeculator", object)).get("propose")
    startup.follow_lengths()
    assert [words in record.getMessage() for record in caplog.records] == [True]
    assert vars(getattr(drafting, "StandaloneARSpeculator", object)).get("propose") is before
