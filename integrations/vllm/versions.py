"""The parts of vLLM that are used. Its scheduler is no public interface, so a version is judged by whether it has them."""

from __future__ import annotations

from collections.abc import Mapping, Set

TRIED = ("0.30", "0.31", "0.32", "0.33")  # docs/guides/vllm.md says how

NEEDED = {
    "Scheduler": "schedule _update_after_schedule update_from_output shutdown vllm_config requests running waiting "
    "max_num_running_reqs num_spec_tokens dynamic_sd_lookup",
    "SchedulerOutput": "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens scheduled_spec_decode_tokens "
    "num_spec_tokens_to_schedule num_invalid_spec_tokens",
    "CachedRequestData": "resumed_req_ids num_computed_tokens",
    "ModelRunnerOutput": "sampled_token_ids req_id_to_index",
    "Request": "num_tokens is_finished",
}


def check_parts(version: str, names: Mapping[str, Set[str]]) -> None:
    """Raises ValueError if vLLM lacks something. names: attributes of the classes in NEEDED."""
    missing = [
        f"{part}.{name}" for part, wanted in NEEDED.items() for name in wanted.split() if name not in names[part]
    ]
    if missing:
        raise ValueError(f"vLLM {version} has no {', '.join(missing)}: install one of {', '.join(TRIED)}")


def was_tried(version: str) -> bool:
    """True for a version of vLLM with which the plugin was tried, whatever its build ("0.32.0+cpu")."""
    return any(version == tried or version.startswith(f"{tried}.") for tried in TRIED)
