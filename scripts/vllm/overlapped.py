"""vLLM's real overlapping scheduler under ours, without a model: on CPUs vLLM never overlaps steps. Runs in its environment.

    python scripts/vllm/overlapped.py WEIGHTS

Steps are scheduled one ahead, as the engine does with two batches under way; rows accept at random; lengths change at
random; requests come, are aborted and end. What is reported is held against what the rows did. Prints one JSON line.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import deque
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
os.environ |= {"SPECLEN_CONTROLLER": "127.0.0.1:9"}  # nobody: the lengths are drawn here

from vllm import LLM, SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from speclen.integrations.vllm import Scheduler
from speclen.records import Arm, StepFlag
from speclen.worker.drafting.arm_chooser import ArmChoice

MAX_LENGTH, MAX_BATCH, NUM_STEPS = 5, 8, 400


def overlapping_scheduler(weights: Path) -> Any:
    """Ours, made from the configuration of a real engine as if its device could overlap steps."""
    table = [[1, MAX_BATCH, MAX_LENGTH]]
    speculative = {"method": "draft_model", "model": str(weights / "draft"), "num_speculative_tokens": MAX_LENGTH}
    engine = LLM(
        str(weights / "target"),
        speculative_config=speculative | {"num_speculative_tokens_per_batch_size": table},
        max_num_seqs=MAX_BATCH,
        max_num_batched_tokens=96,
        max_model_len=256,
        enforce_eager=True,
        enable_prefix_caching=False,
    )
    core = engine.llm_engine.engine_core.engine_core
    core.vllm_config.scheduler_config.async_scheduling = True
    return Scheduler(
        vllm_config=core.vllm_config,
        kv_cache_config=core.scheduler.kv_cache_config,
        structured_output_manager=core.structured_output_manager,
        block_size=core.scheduler.block_size,
        hash_block_size=core.scheduler.hash_block_size,
        log_stats=False,
    )


def drive(scheduler: Any, dice: random.Random) -> dict[str, int]:
    """Steps one ahead of their results. Raises AssertionError where a report and the rows differ."""
    control = scheduler._steering.control
    control.choose = lambda rows, with_prefill=False: ArmChoice(
        Arm(dice.randint(0, MAX_LENGTH) if dice.random() < 0.2 else 3)
    )
    reports: list[Any] = []
    control.report = reports.append
    under_way: deque[tuple[Any, set[str], set[str]]] = deque()
    counts = {"steps": 0, "reports": 0, "teaching": 0}
    for number in range(NUM_STEPS):
        if dice.random() < 0.1 and len(scheduler.requests) < MAX_BATCH:
            settings = SamplingParams(temperature=0, max_tokens=dice.randint(2, 60), ignore_eos=True)
            settings.update_from_generation_config({}, None)
            scheduler.add_request(Request(f"r{number}", list(range(1, dice.randint(5, 150))), settings, None))
        if scheduler.requests and dice.random() < 0.03:
            scheduler.finish_requests(dice.choice(list(scheduler.requests)), RequestStatus.FINISHED_ABORTED)
        in_prompt = {
            name for name, each in scheduler.requests.items() if each.num_computed_tokens < each.num_prompt_tokens
        }
        output = scheduler.schedule()
        unfinished = {name for name in output.num_scheduled_tokens if scheduler.requests[name].is_prefill_chunk}
        under_way.append((output, in_prompt, unfinished))
        if len(under_way) == 2:
            check_step(scheduler, *under_way.popleft(), dice, reports, counts)
    return counts | {"left_out": scheduler._steering.tracker.num_odd}


def check_step(
    scheduler: Any,
    output: Any,
    in_prompt: set[str],
    unfinished: set[str],
    dice: random.Random,
    reports: list[Any],
    counts: dict[str, int],
) -> None:
    """End a step with random acceptance, and hold its report against it."""
    names = list(output.num_scheduled_tokens)
    if not names:
        scheduler.update_from_output(output, ModelRunnerOutput([], {}))
        return
    rows = []
    for name in names:
        drafts = output.scheduled_spec_decode_tokens.get(name, [])
        rows.append([] if name in unfinished else [5] * (1 + dice.randint(0, len(drafts))))
    before = len(reports)
    scheduler.update_from_output(output, ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, rows))
    decoding = [i for i, name in enumerate(names) if name not in in_prompt]
    counts["steps"] += 1
    reported = len(reports) > before
    assert reported == bool(decoding), f"step {counts['steps']}: {reported=}, {decoding=}, {names=}, {in_prompt=}"
    if decoding:
        result = reports[-1]
        accepted = sum(run * number for run, number in enumerate(result.accepted_histogram))
        assert result.batch_size == len(decoding)
        assert accepted == sum(max(len(rows[i]) - 1, 0) for i in decoding), "rows as vLLM left them"
        assert (StepFlag.PREFILL in result.flags) == (len(decoding) < len(names))
        counts["reports"] += 1
        counts["teaching"] += not result.flags


def main() -> None:
    scheduler = overlapping_scheduler(Path(sys.argv[1]))
    assert isinstance(scheduler, AsyncScheduler)
    counts = drive(scheduler, random.Random(3))
    assert scheduler._steering is not None, "a hook failed"
    assert counts["left_out"] == 0
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
