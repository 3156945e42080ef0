"""The plugin takes those configurations of vLLM whose method drafts as many tokens as a step asks for, and their table."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from speclen.integrations.vllm.context import (
    check_config,
    configured_table,
    context_key,
    fast_lengths,
    limits_of,
    traits_of,
)
from speclen.integrations.vllm.lengths import FLAGGED, MIN_SAMPLES, CautiousLengths
from speclen.integrations.vllm.settings import as_variables, settings_from
from speclen.records import PLAIN, Arm, Choice, Limits, StepFlag, StepRecord
from speclen.worker.drafting.arm_chooser import ArmChoice
from speclen.worker.reporting.table import ArmTable
from tests.support import fake_vllm

BOTH = ("draft_model", "eagle", "eagle3", "mtp", "dflash", "ngram")
V2_ALONE = ("ngram_gpu", "dspark")
# Each asserts that it is asked for its one length, or has none: a choice would end vLLM.
NEITHER = ("medusa", "suffix", "mlp_speculator", "custom_class", "extract_hidden_states", "new")


@pytest.mark.parametrize("is_v2", [False, True])
@pytest.mark.parametrize("method", [*BOTH, *V2_ALONE, *NEITHER])
def test_methods_with_lengths_are_taken_and_those_of_one_length_refused(method, is_v2):
    config = fake_vllm.config(speculative_config__method=method, use_v2_model_runner=is_v2)
    if method in BOTH or (is_v2 and method in V2_ALONE):
        check_config(config)
        return
    with pytest.raises(ValueError, match=rf"the method '{method}' .*V{1 + is_v2}.*use one of draft_model, "):
        check_config(config)


def test_nothing_beside_the_plugin_may_choose_lengths():
    with pytest.raises(ValueError, match="enable_adaptive_verification"):
        check_config(fake_vllm.config(speculative_config__enable_adaptive_verification=True))


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
    traits = traits_of(fake_vllm.config(**changes))
    assert (traits.longest_context, traits.late_drafts) == (longest, late)


@pytest.mark.parametrize(
    ("is_v2", "mode", "fast"),
    [(True, "FULL_AND_PIECEWISE", {5, 2}), (True, "PIECEWISE", set()), (False, "FULL", set())],
)
def test_v2_captures_full_graphs_for_the_configured_lengths_alone(is_v2, mode, fast):
    config = fake_vllm.config(use_v2_model_runner=is_v2, compilation_config__cudagraph_mode=mode)
    assert fast_lengths(config, fake_vllm.lookup_of(config)) == fast


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


def test_the_configured_length_holds_until_a_size_or_one_near_it_has_samples():
    assert followed(noted(4, MIN_SAMPLES - 1)) == []
    assert followed(noted(4, MIN_SAMPLES)) == [2, 3, 4, 5, 6]
    assert followed(noted(1, MIN_SAMPLES)) == [1, 2]
    assert followed(noted(32, MIN_SAMPLES)) == [*range(16, 49)]
    assert followed(noted(64, MIN_SAMPLES)) == [*range(32, 65)]
    before = noted(4, MIN_SAMPLES).choice(9, WANTED)
    assert before == ArmChoice(Arm(3)), "of no table of the controller's"


def test_flagged_steps_count_for_less():
    assert followed(noted(4, int(MIN_SAMPLES / FLAGGED), StepFlag.PREFILL)) == []
    assert followed(noted(4, int(MIN_SAMPLES / FLAGGED) + 1, StepFlag.PREFILL)) == [2, 3, 4, 5, 6]


def test_probes_are_followed_from_the_first_step():
    probe = ArmChoice(Arm(1), 4, probe_id=7)
    assert CautiousLengths(CONFIGURED).choice(4, probe) == probe


def test_a_slow_length_gives_way_to_the_nearest_fast_one():
    lengths = CautiousLengths(CONFIGURED, fast={0, 3, 5})
    wanted = [lengths.choice(4, ArmChoice(Arm(length), 4, probe_id=7)) for length in range(9)]
    assert [each.arm.speculation_length for each in wanted] == [0, 0, 3, 3, 3, 5, 5, 5, 5]
    assert {each.probe_id for each in wanted} == {7}


def test_the_context_names_what_step_times_depend_on():
    settings = settings_from({"SPECLEN_CONTROLLER": "127.0.0.1:9"})
    key = context_key(fake_vllm.config(), settings, fake_vllm.PLATFORM, "0.32.0")
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
        other = context_key(fake_vllm.config(**change), settings, fake_vllm.PLATFORM, "0.32.0")
        assert other.engine_fingerprint != key.engine_fingerprint, change
    gpu = SimpleNamespace(is_cpu=lambda: False, device_type="cuda", get_device_name=lambda: "NVIDIA H100")
    several = fake_vllm.config(parallel_config__world_size=4)
    assert context_key(several, settings, gpu, "0.32.0").device == "cuda:NVIDIA H100 x4"
    named = settings_from({"SPECLEN_CONTROLLER": "127.0.0.1:9", "SPECLEN_WORKER_TARGET": "bundled:target"})
    assert context_key(fake_vllm.config(), named, fake_vllm.PLATFORM, "0.32.0").target.startswith("bundled:target#")


def test_the_configured_table_is_vllms_own():
    lookup = fake_vllm.lookup_of(fake_vllm.config())
    limits = limits_of(lookup, 5)
    assert limits == Limits(8, 5)
    assert configured_table(lookup, "adaptive", limits).arms[1:] == (*[Arm(5)] * 4, *[Arm(2)] * 4)
    assert configured_table(lookup, "none", limits).arms[1:] == (PLAIN,) * 8


def test_sentences_name_variables_for_our_flags_and_leave_vllms():
    sentence = as_variables("--controller-ca needs --policy and --speculative-config")
    assert sentence == "SPECLEN_WORKER_CONTROLLER_CA needs SPECLEN_WORKER_POLICY and --speculative-config"
