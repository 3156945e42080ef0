"""Microseconds that the plugin takes of a step, at 1, 32 and 256 sequences: on vLLM's real scheduler, with made-up results.

    python scripts/vllm/cost.py

Runs in vLLM's environment, with neither model nor device. Prints one JSON line: by sequences, the median of our hooks, and
of vLLM's `schedule` and `update_from_output` without them.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from overlapped import overlapping_scheduler
from vllm import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

SIZES, NUM_STEPS, WARM_STEPS = (1, 32, 256), 400, 50
PROMPT_TOKENS, NEW_TOKENS = 8, 240
DICE = random.Random(3)


def add(scheduler: Any, name: str) -> None:
    settings = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    settings.update_from_generation_config({}, None)
    scheduler.add_request(Request(name, list(range(1, PROMPT_TOKENS)), settings, None))


def result(output: Any) -> ModelRunnerOutput:
    """Each sequence accepts as many drafts as are drawn."""
    names, drafts = list(output.num_scheduled_tokens), output.scheduled_spec_decode_tokens
    rows = [[5] * (1 + DICE.randint(0, len(drafts.get(name, ())))) for name in names]
    return ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, rows)


def step_us(scheduler: Any, rows: int) -> float:
    """Median microseconds of scheduling a step and taking its result, while as many sequences as `rows` decode."""
    in_flight: deque[Any] = deque()
    times, numbers = [], iter(range(10**6))
    for number in range(WARM_STEPS + NUM_STEPS):
        while len(scheduler.requests) < rows:
            add(scheduler, f"r{next(numbers)}")
        begin = time.perf_counter()
        in_flight.append(scheduler.schedule())
        took = time.perf_counter() - begin
        if len(in_flight) == 2:
            output = in_flight.popleft()
            given = result(output)
            begin = time.perf_counter()
            scheduler.update_from_output(output, given)
            took += time.perf_counter() - begin
        if number >= WARM_STEPS:
            times.append(took)
    while in_flight:
        scheduler.update_from_output(in_flight[0], result(in_flight.popleft()))
    return 1e6 * median(times)


def main() -> None:
    found = {}
    for rows in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            scheduler = overlapping_scheduler(Path(folder), rows, num_blocks=20 * rows + 8)
        steering = scheduler.steering
        step_us(scheduler, rows)
        assert scheduler.steering is steering, "a hook failed"
        scheduler.steering = None
        found[str(rows)] = {"hooks_us": steering.cost.quantile(0.5), "vllm_us": round(step_us(scheduler, rows))}
        steering.stop()
    print(json.dumps({"us_per_step": found}))


if __name__ == "__main__":
    main()
