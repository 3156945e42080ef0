"""vLLM is unchanged where the plugin is not used, and serves where the plugin refuses. Runs in vLLM's environment.

    python scripts/vllm/untouched.py

A bundled pair is served three times: by another scheduler than ours, with drafts in parallel (PARD, of any quality) that the
plugin refuses, and with the same drafts without the plugin. Prints one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from speclen.bench.gpu.vllm_engine import DRY, folder_of, register_loader, set_environment, write_config

UNREACHABLE = "127.0.0.1:9"  # nothing listens there
PARD = {"parallel_drafting": True}
PROMPTS = [list(range(7, 7 + 20 * number)) for number in range(1, 4)]
OURS = "speclen.integrations.vllm.Scheduler"
OF_THE_PACKAGE = {"speclen", "speclen.integrations", "speclen.integrations.vllm"}


def served(folder: Path, scheduler: str | None, **speculative: Any) -> tuple[list[list[int]], Any]:
    """Greedy outputs, and the engine's core."""
    from vllm import EngineArgs, LLMEngine, SamplingParams

    draft = folder_of(folder, DRY.draft)
    arguments = EngineArgs(
        model=str(folder_of(folder, DRY.target)),
        load_format="speclen",
        dtype=DRY.dtype,
        seed=0,
        max_num_seqs=8,
        max_model_len=256,
        enforce_eager=True,
        generation_config="vllm",
        scheduler_cls=scheduler,
        speculative_config={"method": "draft_model", "model": str(draft), "num_speculative_tokens": 5, **speculative},
    )
    engine = LLMEngine.from_engine_args(arguments)
    for number, prompt in enumerate(PROMPTS):
        settings = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
        engine.add_request(str(number), {"prompt_token_ids": prompt}, settings)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {each.request_id: list(each.outputs[0].token_ids) for each in engine.step() if each.finished}
    return [outputs[str(number)] for number in range(len(PROMPTS))], engine.engine_core.engine_core


def main() -> None:
    set_environment(DRY, "v1", UNREACHABLE)
    register_loader(DRY)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in (DRY.target, DRY.draft):
            write_config(model, DRY.dtype, folder_of(folder, model))
        config = folder_of(folder, DRY.draft) / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"pard_token": 3}))
        before = {each for each in sys.modules if each.startswith("speclen.integrations")}
        plain, core = served(folder, None)
        loaded = {each for each in sys.modules if each.startswith("speclen.integrations")} - before
        assert loaded <= OF_THE_PACKAGE, f"loaded for another scheduler: {loaded}"
        assert core.vllm_config.additional_config == {}
        assert core.vllm_config.parallel_config.worker_extension_cls == ""
        from vllm.v1.outputs import ModelRunnerOutput

        # The reason for which the plugin refuses adaptive verification.
        assert not any("admitted" in name for name in ModelRunnerOutput.__dataclass_fields__)
        refused, core = served(folder, OURS, **PARD)
        assert type(core.scheduler).__module__.startswith("speclen.")
        assert core.scheduler.steering is None, "drafts in parallel are not refused"
        assert core.vllm_config.additional_config == {}
        alone, _ = served(folder, None, **PARD)
    assert refused == alone
    print(
        json.dumps(
            {"PARD": "refused, vLLM serves", "outputs": "as without the plugin", "equal to plain": alone == plain}
        )
    )


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # engines take long to end
