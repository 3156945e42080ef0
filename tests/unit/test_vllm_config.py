"""The plugin accepts configurations of vLLM whose method drafts the requested number of tokens, and their table."""

from types import SimpleNamespace

import pytest

from speclen.integrations.vllm import engine
from speclen.integrations.vllm.settings import as_variables, settings_from
from speclen.integrations.vllm.steering import MIN_SAMPLES, CautiousLengths
from speclen.records import PLAIN, Arm, Choice, Limits, StepFlag, StepRecord
from speclen.worker.arms import ArmChoice, ArmTable
from tests.support import fake_vllm

BOTH = ("draft_model", "eagle", "eagle3", "mtp", "dflash", "ngram")
V2_ALONE = ("ngram_gpu", "dspark")
# Each asserts that it is asked for its one length, or has none: a choice would end vLLM.
NEITHER = ("medusa", "suffix", "mlp_speculator", "custom_class", "extract_hidden_states", "new")


@pytest.mark.parametrize("is_v2", [False, True])
@pytest.mark.parametrize("method", [*BOTH, *V2_ALONE, *NEITHER])
def test_methods_with_variable_lengths_are_accepted_and_others_refused(method, is_v2):
    config = fake_vllm.config(speculative_config__method=method, use_v2_model_runner=is_v2)
    if method in BOTH or (is_v2 and method in V2_ALONE):
        engine.check_config(config)
        return
    with pytest.raises(ValueError, match=rf"the method '{method}' .*V{1 + is_v2}.*use one of draft_model, "):
        engine.check_config(config)


LAUNCHER = {"parallel_config__distributed_executor_backend": "external_launcher"}


@pytest.mark.parametrize(
    ("changes", "named", "way_out"),
    [
        ({"speculative_config": None}, "no speculative config", "give --speculative-config"),
        ({"speculative_config__parallel_drafting": True}, "parallel_drafting is true", "use a draft without it"),
        ({"speculative_config__enable_adaptive_verification": True}, "enable_adaptive_verification", "leave it out"),
        ({**LAUNCHER, "parallel_config__world_size": 2}, "external_launcher with 2 ranks", "use mp"),
        ({**LAUNCHER, "parallel_config__data_parallel_size": 2}, "external_launcher with 2 ranks", "use mp"),
        ({"parallel_config__data_parallel_size": 2}, "data_parallel_size is 2", "start 2 servers"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size is 2", "use tensor_parallel_size"),
        ({"speculative_config__num_speculative_tokens": 65}, "num_speculative_tokens is 65", "give less"),
    ],
)
def test_unsupported_configurations_are_refused_with_advice(changes, named, way_out):
    with pytest.raises(ValueError, match=rf"{named}.*: {way_out}"):
        engine.check_config(fake_vllm.config(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"speculative_config__parallel_drafting": True, "speculative_config__method": "dflash"},
        {"speculative_config__parallel_drafting": True, "use_v2_model_runner": True},
        LAUNCHER,  # with a single rank
        {"parallel_config__distributed_executor_backend": "ray", "parallel_config__world_size": 8},
    ],
)
def test_similar_but_supported_configurations_are_accepted(changes):
    engine.check_config(fake_vllm.config(**changes))


def test_only_dense_replicas_that_vllm_splits_are_accepted():
    engine.check_config(fake_vllm.config(parallel_config__data_parallel_size=2), is_whole=True)
    with pytest.raises(ValueError, match="start 2 servers"):
        engine.check_config(
            fake_vllm.config(parallel_config__data_parallel_size=2, model_config__is_moe=True), is_whole=True
        )


PARTS = {
    "Scheduler": {*dir(fake_vllm.Scheduler), *vars(fake_vllm.Scheduler(fake_vllm.config()))},
    **{
        part.__name__: engine.names_of(part)
        for part in (
            fake_vllm.SchedulerOutput,
            fake_vllm.NewRequestData,
            fake_vllm.CachedRequestData,
            fake_vllm.ModelRunnerOutput,
            fake_vllm.Request,
        )
    },
}


@pytest.mark.parametrize(
    ("version", "part", "name"),
    [
        ("0.40.0", "Request", "num_computed_tokens"),
        ("0.40.0", "Request", "num_output_placeholders"),
        ("0.40.0", "NewRequestData", "req_id"),
        ("0.40.0", "Scheduler", "_build_kv_connector_meta"),
        ("0.32.0", "SchedulerOutput", "num_spec_tokens_to_schedule"),
    ],
)
def test_a_version_without_a_part_is_refused_by_the_parts_name(version, part, name):
    engine.check_parts(version, PARTS)
    with pytest.raises(ValueError, match=rf"vLLM {version} has no {part}.{name}: install one of 0.32"):
        engine.check_parts(version, {**PARTS, part: PARTS[part] - {name}})


@pytest.mark.parametrize(
    ("version", "is_taken"), [("0.31.2", False), ("0.32.0+cpu", True), ("1.0", True), ("dev", True)]
)
def test_versions_before_lengths_were_followed_are_refused(version, is_taken):
    if is_taken:
        engine.check_parts(version, PARTS)
        return
    with pytest.raises(ValueError, match=rf"vLLM is {version}: upgrade it to 0.33"):
        engine.check_parts(version, PARTS)


def test_a_part_is_known_by_what_its_constructor_sets():
    class Request:
        def __init__(self):
            self.num_computed_tokens = 0

    assert "num_computed_tokens" in engine.names_of(Request)


@pytest.mark.parametrize(
    ("changes", "longest", "late"),
    [
        ({}, 4096 - 5, False),
        ({"speculative_config__draft_model_config": None, "model_config__max_model_len": 1000}, 1000 - 5, False),
        ({"speculative_config__method": "dflash"}, 4096 - 5 - 1, False),  # it drafts one token more
        ({"use_v2_model_runner": True}, None, True),
    ],
)
def test_v1_drafts_nothing_near_the_draft_models_limit_and_v2_takes_results_before_it_drafts(changes, longest, late):
    traits = engine.traits_of(fake_vllm.config(**changes))
    assert (traits.longest_context, traits.late_drafts) == (longest, late)


CONFIGURED = ArmTable.of([Choice(1, 8, Arm(5)), Choice(9, 64, Arm(3))], Limits(64, 8), "configured")
WANTED = ArmChoice(Arm(1), decision_version=4)
LEARNED = ArmTable.of([Choice(1, 64, Arm(1))], Limits(64, 8), "controller", 4)


def noted(batch_size: int, num_steps: int, *flags: StepFlag) -> CautiousLengths:
    lengths = CautiousLengths(CONFIGURED)
    for _ in range(num_steps):
        lengths.note(StepRecord(0, batch_size, Arm(5), 0.01, (batch_size, 0, 0, 0, 0, 0), flags=frozenset(flags)))
    return lengths


def followed(lengths: CautiousLengths) -> list[int]:
    """Batch sizes at which the controller's choice is used."""
    return [size for size in range(1, 65) if lengths.choice(size, WANTED, LEARNED) == WANTED]


def test_the_configured_length_holds_until_a_size_or_one_near_it_has_samples():
    assert followed(noted(4, MIN_SAMPLES - 1)) == []
    assert followed(noted(4, MIN_SAMPLES)) == [2, 3, 4, 5, 6]
    assert followed(noted(1, MIN_SAMPLES)) == [1, 2]
    assert followed(noted(32, MIN_SAMPLES)) == [*range(16, 49)]
    assert followed(noted(64, MIN_SAMPLES)) == [*range(32, 65)]
    before = noted(4, MIN_SAMPLES).choice(9, WANTED, LEARNED)
    assert before == ArmChoice(Arm(3)), "of no table of the controller's"


def test_probes_are_followed_from_the_first_step():
    probe = ArmChoice(Arm(1), 4, probe_id=7)
    assert CautiousLengths(CONFIGURED).choice(4, probe, LEARNED) == probe


def with_samples(**options) -> CautiousLengths:
    lengths = CautiousLengths(CONFIGURED, **options)
    for _ in range(MIN_SAMPLES):
        lengths.note(StepRecord(0, 4, Arm(5), 0.01, (4, 0, 0, 0, 0, 0)))
    return lengths


def test_a_length_without_graphs_gives_way_to_the_nearest_with_some():
    lengths = with_samples(captured={0, 3, 5}, max_captured=100)
    wanted = [lengths.choice(4, ArmChoice(Arm(length), 4), LEARNED).arm.speculation_length for length in range(9)]
    assert wanted == [0, 0, 3, 3, 3, 5, 5, 5, 5]


def test_a_length_without_graphs_is_used_where_no_length_has_any():
    lengths = with_samples(captured={0, 3, 5}, max_captured=19)
    assert lengths.choice(4, ArmChoice(Arm(4), 4), LEARNED).arm == Arm(4), "20 tokens, over the largest graph"
    assert lengths.choice(4, ArmChoice(Arm(2), 4), LEARNED).arm == Arm(3)


@pytest.mark.parametrize("options", [{"captured": {0, 3}, "max_captured": 100}, {"least": 2}])
def test_no_other_length_answers_for_a_probe_that_cannot_run(options):
    probe = ArmChoice(Arm(1), 4, probe_id=7)
    before, after = CautiousLengths(CONFIGURED, **options), with_samples(**options)
    assert before.choice(4, probe, LEARNED) == ArmChoice(Arm(5)), "the configured length, not probed"
    assert after.choice(4, probe, LEARNED).probe_id == 0


def test_recurrent_models_never_get_length_0():
    lengths = with_samples(least=1)
    assert lengths.choice(4, ArmChoice(PLAIN, 4), LEARNED) == ArmChoice(Arm(1), 4)
    assert with_samples(least=1, captured={0, 3}, max_captured=100).choice(4, WANTED, LEARNED).arm == Arm(3)


def test_the_context_names_what_step_times_depend_on():
    settings = settings_from({"SPECLEN_CONTROLLER": "127.0.0.1:9"})
    key = engine.context_key(fake_vllm.config(), settings, fake_vllm.PLATFORM, "0.32.0")
    assert key.target.startswith("target#")
    assert key.draft.startswith("draft#")
    assert key.dtype == "bfloat16"
    assert key.device.startswith("cpu:")
    for change in (
        {"parallel_config__tensor_parallel_size": 2},
        {"speculative_config__method": "ngram"},
        {"model_config__enforce_eager": False},
        {"cache_config__cache_dtype": "fp8"},
    ):
        other = engine.context_key(fake_vllm.config(**change), settings, fake_vllm.PLATFORM, "0.32.0")
        assert other.engine_fingerprint != key.engine_fingerprint, change
    gpu = SimpleNamespace(is_cpu=lambda: False, device_type="cuda", get_device_name=lambda: "NVIDIA H100")
    several = fake_vllm.config(parallel_config__world_size=4)
    assert engine.context_key(several, settings, gpu, "0.32.0").device == "cuda:NVIDIA H100 x4"
    named = settings_from({"SPECLEN_CONTROLLER": "127.0.0.1:9", "SPECLEN_WORKER_TARGET": "bundled:target"})
    assert engine.context_key(fake_vllm.config(), named, fake_vllm.PLATFORM, "0.32.0").target.startswith(
        "bundled:target#"
    )


def test_the_configured_table_is_vllms_own():
    lookup = fake_vllm.lookup_of(fake_vllm.config())
    limits = engine.limits_of(lookup, 5)
    assert limits == Limits(8, 5)
    assert engine.configured_table(lookup, "adaptive", limits).arms[1:] == (*[Arm(5)] * 4, *[Arm(2)] * 4)
    assert engine.configured_table(lookup, "none", limits).arms[1:] == (PLAIN,) * 8


def test_sentences_name_variables_for_our_flags_and_leave_vllms():
    sentence = as_variables("--controller-ca needs --policy and --speculative-config")
    assert sentence == "SPECLEN_WORKER_CONTROLLER_CA needs SPECLEN_WORKER_POLICY and --speculative-config"
