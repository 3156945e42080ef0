"""Record steps of vLLM's real scheduler for tests/unit/test_vllm_steps.py. Runs in vLLM's environment.

    python scripts/vllm/record.py WEIGHTS draft_model | grep "^{" >> tests/data/vllm_steps.jsonl

One method a call. WEIGHTS is what scripts/peers/export.py wrote. Requests come and go, prompts are fed in chunks, and
lengths change at random.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

from vllm import LLM, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

MAX_LENGTH, MAX_BATCH = 5, 8
STEPS: list[dict[str, Any]] = []
NAMES: dict[str, str] = {}


class RecordingScheduler(Scheduler):
    """vLLM's own, with a random length at every step, and a note of all that a report is read from."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dice = random.Random(5)
        self.length = MAX_LENGTH
        self.notes: dict[int, dict[str, Any]] = {}

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.started = time.perf_counter()
        return super().schedule(*args, **kwargs)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        if self.dice.random() < 0.1:
            self.length = self.dice.randint(0, MAX_LENGTH)
        scheduler_output.num_spec_tokens_to_schedule = self.length
        requests = {name: self.requests[name] for name in scheduler_output.num_scheduled_tokens}
        before = {
            name: {
                "num_computed_tokens": each.num_computed_tokens,
                "num_tokens": each.num_tokens,
                "num_output_placeholders": each.num_output_placeholders,
            }
            for name, each in requests.items()
        }
        self.notes[id(scheduler_output)] = {
            "new": [each.req_id for each in scheduler_output.scheduled_new_reqs],
            "resumed": sorted(scheduler_output.scheduled_cached_reqs.resumed_req_ids),
            "contexts": list(scheduler_output.scheduled_cached_reqs.num_computed_tokens),
            "tokens": dict(scheduler_output.num_scheduled_tokens),
            "drafts": {name: len(each) for name, each in scheduler_output.scheduled_spec_decode_tokens.items()},
            "requests": before,
            # Said by the requests themselves, and not by what the tracker makes of them.
            "in_prompt": [name for name, each in requests.items() if each.num_computed_tokens < each.num_prompt_tokens],
            "drafting": self.length,
            "started": round(self.started, 6),
        }
        super()._update_after_schedule(scheduler_output)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        ended = time.perf_counter()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        rows, index = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        note = self.notes.pop(id(scheduler_output))
        note["sampled"] = {name: len(rows[i]) for name, i in index.items()} if rows else {}
        STEPS.append(note | {"ended": round(ended, 6), "busy": bool(self.running)})
        return outputs


def record(weights: Path, method: str) -> None:
    """Serve some requests with a method; print the steps as JSON lines."""
    speculative = {"method": method, "num_speculative_tokens": MAX_LENGTH}
    speculative["num_speculative_tokens_per_batch_size"] = [[1, MAX_BATCH, MAX_LENGTH]]
    if method == "ngram":
        speculative |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    else:
        speculative["model"] = str(weights / "draft")
    engine = LLM(
        str(weights / "target"),
        speculative_config=speculative,
        scheduler_cls=RecordingScheduler,
        max_num_seqs=MAX_BATCH,
        max_num_batched_tokens=96,  # prompts are fed in chunks
        max_model_len=256,
        enforce_eager=True,
        enable_prefix_caching=False,
    )
    prompts = json.loads((weights / "requests.json").read_text())["prompts"][:20]
    dice = random.Random(7)
    settings = [SamplingParams(temperature=0, max_tokens=dice.randint(4, 120), ignore_eos=True) for _ in prompts]
    STEPS.clear()
    engine.generate(prompts, settings, use_tqdm=False)
    for step in STEPS[:120]:
        print(json.dumps({"run": method} | with_short_names(step), separators=(",", ":")), flush=True)


def with_short_names(step: dict[str, Any]) -> dict[str, Any]:
    """The step with r0, r1, … for requests, as they appear."""
    names = {name: NAMES.setdefault(name, f"r{len(NAMES)}") for name in step["tokens"]}
    lists = {key: [names[name] for name in step[key]] for key in ("new", "resumed", "in_prompt")}
    by_name = {
        key: {names[name]: value for name, value in step[key].items()}
        for key in ("tokens", "drafts", "requests", "sampled")
    }
    return step | lists | by_name


if __name__ == "__main__":
    for each in sys.argv[2:]:
        record(Path(sys.argv[1]), each)
