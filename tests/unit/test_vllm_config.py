"""What of vLLM's configurations the plugin takes: methods that draft as many tokens as a step asks for."""

from __future__ import annotations

import fake_vllm
import pytest

from speclen.integrations.vllm.context import check_config


@pytest.mark.parametrize("is_v2", [False, True])
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp", "dflash", "ngram"])
def test_methods_with_lengths_are_taken(method, is_v2):
    check_config(fake_vllm.config(speculative_config__method=method, use_v2_model_runner=is_v2))


# Each asserts that it is asked for its one length, or has none: a choice would end vLLM.
@pytest.mark.parametrize("is_v2", [False, True])
@pytest.mark.parametrize(
    "method", ["medusa", "suffix", "mlp_speculator", "custom_class", "extract_hidden_states", "new"]
)
def test_methods_of_one_length_are_refused(method, is_v2):
    with pytest.raises(ValueError, match=rf"the method '{method}' .*V{1 + is_v2}.*use one of draft_model, "):
        check_config(fake_vllm.config(speculative_config__method=method, use_v2_model_runner=is_v2))


@pytest.mark.parametrize("method", ["ngram_gpu", "dspark"])
def test_some_methods_have_lengths_under_v2_alone(method):
    check_config(fake_vllm.config(speculative_config__method=method, use_v2_model_runner=True))
    with pytest.raises(ValueError, match=f"'{method}'"):
        check_config(fake_vllm.config(speculative_config__method=method))


def test_nothing_beside_the_plugin_may_choose_lengths():
    with pytest.raises(ValueError, match="enable_adaptive_verification"):
        check_config(fake_vllm.config(speculative_config__enable_adaptive_verification=True))


def test_micro_batches_of_a_pipeline_are_not_told_apart():
    with pytest.raises(ValueError, match=r"pipeline_parallel_size is 2.*tensor_parallel_size"):
        check_config(fake_vllm.config(parallel_config__pipeline_parallel_size=2))
