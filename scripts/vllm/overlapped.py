"""Check reports of vLLM's real overlapping scheduler, with neither model nor device. Runs in vLLM's environment.

    python scripts/vllm/overlapped.py

On CPUs vLLM does not overlap steps, so results are made up here. Requests come, end, are aborted, and are preempted where
memory is short; lengths and accepted tokens are drawn. Each report is compared with what the sequences did. Prints one JSON
line. Times are tested in tests/unit/test_vllm_timing.py.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ |= {"SPECLEN_CONTROLLER": "127.0.0.1:9"}  # nothing listens there: the lengths are drawn here

import torch
from vllm import SamplingParams, __version__
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from speclen.bench.gpu.vllm_engine import DRY, folder_of, write_config
from speclen.integrations.vllm import Scheduler
from speclen.records import Arm, StepFlag
from speclen.worker.arms import ArmChoice

MAX_LENGTH, MAX_BATCH, NUM_STEPS = 5, 8, 4000
NUM_BLOCKS = 32  # of 16 tokens: too few for the longest requests at once


@dataclass
class Step:
    output: Any
    in_prompt: set[str]
    unfinished: set[str]


def overlapping_scheduler(folder: Path, rows: int = MAX_BATCH, num_blocks: int = NUM_BLOCKS) -> Any:
    """Our scheduler, as an engine with overlapping steps makes it. rows: the most sequences of a step."""
    for name in (DRY.target, DRY.draft):
        write_config(name, DRY.dtype, folder_of(folder, name))
    speculative = {
        "method": "draft_model",
        "model": str(folder_of(folder, DRY.draft)),
        "num_speculative_tokens": MAX_LENGTH,
        "num_speculative_tokens_per_batch_size": [[1, rows, MAX_LENGTH]],
    }
    config = EngineArgs(
        model=str(folder_of(folder, DRY.target)),
        speculative_config=speculative,
        max_num_seqs=rows,
        max_num_batched_tokens=max(96, 8 * rows),
        max_model_len=256,
        enforce_eager=True,
        enable_prefix_caching=False,
    ).create_engine_config()
    config.scheduler_config.async_scheduling = True
    config.cache_config.num_gpu_blocks = num_blocks
    kind = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], kind)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
        hash_block_size=16,
        log_stats=False,
    )


def lengths(dice: random.Random) -> Iterator[int]:
    """Each held for 2 to 30 steps."""
    while True:
        length = dice.choice((0, 1, 3, 5))
        for _ in range(dice.randint(2, 30)):
            yield length


@dataclass
class Drive:
    """The engine core's loop: a step is scheduled, then the result of the one before it is taken."""

    scheduler: Any
    dice: random.Random
    in_flight: deque[Step] = field(default_factory=deque)
    reports: list[Any] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("steps", "over", "forbidden", "resumed"), 0))
    unfinished: set[str] = field(default_factory=set)  # sequences that are still in prefill

    def __post_init__(self) -> None:
        steering, drawn = self.scheduler.steering, lengths(self.dice)
        steering.control.choose = lambda rows, with_prefill=False: ArmChoice(Arm(next(drawn)))
        steering.lengths.choice = lambda rows, wanted, table: wanted
        steering.control.report = self.reports.append

    def run(self) -> None:
        for number in range(NUM_STEPS):
            if self.dice.random() < 0.06 and len(self.scheduler.requests) < MAX_BATCH:
                self.add(f"r{number}")
            self.maybe_abort()
            self.launch()
            if len(self.in_flight) == 2:
                self.take()

    def add(self, name: str) -> None:
        settings = SamplingParams(temperature=0, max_tokens=self.dice.randint(2, 100), ignore_eos=True)
        settings.update_from_generation_config({}, None)
        prompt = list(range(1, self.dice.randint(5, 150)))
        self.scheduler.add_request(Request(name, prompt, settings, None))

    def maybe_abort(self) -> None:
        if self.scheduler.requests and self.dice.random() < 0.01:
            name = self.dice.choice(list(self.scheduler.requests))
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def launch(self) -> None:
        output, requests = self.scheduler.schedule(), self.scheduler.requests
        names, resumed = output.num_scheduled_tokens.keys(), output.scheduled_cached_reqs.resumed_req_ids
        in_prompt = names & ({new.req_id for new in output.scheduled_new_reqs} | resumed | self.unfinished)
        unfinished = {name for name in names if requests[name].is_prefill_chunk}
        self.unfinished = self.unfinished - names | unfinished
        self.counts["resumed"] += len(resumed)
        self.in_flight.append(Step(output, in_prompt, unfinished))

    def take(self) -> None:
        """Process the oldest result, with a random number of accepted drafts, and compare the report with it."""
        step = self.in_flight.popleft()
        names, drafts = list(step.output.num_scheduled_tokens), step.output.scheduled_spec_decode_tokens
        self.maybe_abort()
        forbidden = {name for name in drafts if self.dice.random() < 0.01}
        step.output.num_invalid_spec_tokens = dict.fromkeys(forbidden, 1)
        rows = [
            [] if name in step.unfinished else [5] * (1 + self.dice.randint(0, len(drafts.get(name, []))))
            for name in names
        ]
        over = {name for name in names if name not in self.scheduler.requests}
        before = len(self.reports)
        result = ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, rows)
        self.scheduler.update_from_output(step.output, result)
        decoding = [name for name in names if name not in step.in_prompt]
        counted = [rows[names.index(name)] for name in decoding if name not in over | forbidden]
        assert (len(self.reports) > before) == bool(counted)
        self.counts["steps"] += bool(names)
        self.counts["over"] += len(over & set(decoding))
        self.counts["forbidden"] += len(forbidden)
        if counted:
            report = self.reports[-1]
            runs = sorted(len(row) - 1 for row in counted)  # as vLLM has cut them
            told = [run for run, number in enumerate(report.accepted_histogram) for _ in range(number)]
            assert (report.batch_size, told) == (len(decoding), runs)
            assert StepFlag.PREFILL in report.flags or not step.in_prompt & set(names)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        scheduler = overlapping_scheduler(Path(folder))
    assert isinstance(scheduler, AsyncScheduler)
    drive = Drive(scheduler, random.Random(3))
    drive.run()
    assert scheduler.steering is not None, "a hook failed"
    assert scheduler.steering.tracker.num_odd == 0
    assert drive.counts["resumed"] > 0
    usable = sum(not each.flags for each in drive.reports)
    print(json.dumps({"vllm": __version__, **drive.counts, "reports": len(drive.reports), "usable": usable}))
    scheduler.shutdown()


if __name__ == "__main__":
    main()
