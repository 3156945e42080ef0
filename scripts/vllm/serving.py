"""Tokens per second of vLLM's CPU build under the plugin, and at fixed lengths without it: closed loops on one engine.

    python scripts/vllm/serving.py --seconds 300 --out RESULT.json

Runs in vLLM's environment, with a controller that has an empty database. `adaptive` learns first; then every policy serves
every number of requests at once, in turns, until the time is over. Results are written after each turn. Exits with 1 if the
greedy outputs of the policies differ.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speclen.bench.gpu.vllm_engine import DRY, ROWS, Loop, make_engine, set_environment
from speclen.bench.serving.prompts import PromptDrawer
from speclen.bench.serving.warm import free_address
from speclen.cli.support.machine import provenance
from speclen.cli.support.output import write_whole
from speclen.cli.support.processes import Child
from speclen.worker.models.loading import load_tokenizer

REQUESTS = (32, 4, 16, 1)  # the first are measured most often
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 96, 128, 192
PROMPTS_APART = 37  # between the first prompts of two turns
NUM_CHECKED, CHECKED_TOKENS = 8, 48
LEARN_SHARE = 0.3  # of the time that is left when the engine is up
BLOCK_S = 4.0
BETWEEN_S = 0.5  # two blocks: for what is under way to end
END_S = 5.0  # for the controller's last commit
POLICIES = {"adaptive": None} | {f"fixed:{length}" if length else "none": length for length in DRY.lengths}


@dataclass(frozen=True, slots=True)
class Block:
    """Tokens and time of one policy in a closed loop. seconds: since all of the first requests ended their prefill."""

    policy: str
    requests: int
    tokens: int
    seconds: float
    num_steps: int
    measured: bool


def main() -> int:
    """0 if the plugin chose lengths and reported to the end, and all outputs are equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True, help="for everything, the engine's start included")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write; database and log lie next to it")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds - END_S
    address, log = free_address(), options.out.with_suffix(".controller.log")
    arguments = ["controller", "--listen", address, "--db", str(options.out.with_suffix(".db"))]
    controller = Child("controller", arguments, address, log, takes_settings=False)
    try:
        controller.start()
        controller.wait_until_serving(60.0)
        set_environment(DRY, "v1", address)
        table = [(1, 4, 5), (5, ROWS - 3, 3), (ROWS - 2, ROWS - 2, 0), (ROWS - 1, ROWS - 1, 1), (ROWS, ROWS, 3)]
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(make_engine(DRY, Path(folder), table, {}))
        outputs = compare_outputs(bench)
        serve(bench, until, options.out, facts(bench.engine) | {"outputs": outputs})
    finally:
        controller.stop(END_S)
    return 1 if min(outputs.values()) < NUM_CHECKED else 0


def serve(bench: Bench, until: float, out: Path, document: dict[str, Any]) -> None:
    """until: by the clock time.monotonic."""
    blocks: list[Block] = []

    def note(turn: Sequence[Block]) -> None:
        blocks.extend(turn)
        rates = {block.policy: f"{block.tokens / block.seconds:.0f}" for block in turn}
        print(f"{turn[0].requests} at once, tokens/s: {rates}", flush=True)
        document["tokens_per_s"] = rates_of(blocks)
        document["steps_reported"], document["left_out"] = bench.steering.num_reported, bench.steering.tracker.num_odd
        document["cost_us"] = {str(share): bench.steering.cost.quantile(share) for share in (0.5, 0.99)}
        write_whole(out, json.dumps(document | {"blocks": [asdict(block) for block in blocks]}, indent=1))

    sizes, policies = (*REQUESTS, *reversed(REQUESTS)), [*POLICIES]
    learn_s = LEARN_SHARE * (until - time.monotonic()) / len(sizes)
    for turn, requests in enumerate(sizes):
        note([bench.block("adaptive", requests, learn_s, turn, measured=False)])
    for number in itertools.count():
        if until - time.monotonic() < len(policies) * (BLOCK_S + BETWEEN_S):
            break
        first = number % len(policies)
        order = (*policies[first:], *policies[:first])
        note([bench.block(policy, REQUESTS[number % len(REQUESTS)], BLOCK_S, len(sizes) + number) for policy in order])


def compare_outputs(bench: Bench) -> dict[str, int]:
    """Count greedy outputs equal to those at length 3, by policy."""
    found = {}
    for policy, length in (("", 3), *POLICIES.items()):
        bench.use(length)
        found[policy] = bench.outputs(bench.prompts[:NUM_CHECKED], CHECKED_TOKENS)
    expected = found.pop("")
    counts = {policy: sum(a == b for a, b in zip(mine, expected, strict=True)) for policy, mine in found.items()}
    print(f"greedy outputs equal to those at length 3, of {NUM_CHECKED}: {counts}", flush=True)
    return counts


def rates_of(blocks: Sequence[Block]) -> dict[str, dict[str, float]]:
    """Tokens per second by policy and requests, over all blocks that are measured: of all policies on the same prompts."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for block in blocks:
        if block.measured:
            sums = found.setdefault(block.policy, {}).setdefault(str(block.requests), np.zeros(2))
            sums += block.tokens, block.seconds
    return {policy: {size: float(a / b) for size, (a, b) in row.items()} for policy, row in found.items()}


class Bench(Loop):
    """Closed loops on one engine."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.drawer = PromptDrawer(load_tokenizer(DRY.target))
        self.prompts = [self.drawer.draw("code", PROMPT_TOKENS, seed) for seed in range(NUM_PROMPTS)]
        if self.steering is None:
            raise RuntimeError("the plugin is off from the start: the log above says why")

    def block(self, policy: str, requests: int, seconds: float, turn: int, measured: bool = True) -> Block:
        """Keep this many requests running, half of them greedy; what is under way at the end is aborted.

        turn: its number, which selects the prompts: the same few are no sample of acceptance.
        """
        self.use(POLICIES[policy])
        # The first request, which takes most of a turn at 1, is greedy in every other turn of that size.
        numbers = itertools.count(PROMPTS_APART * turn + turn // len(REQUESTS))

        def another(num_tokens: int = NEW_TOKENS) -> str:
            number = next(numbers)
            return self.add(self.prompts[number % NUM_PROMPTS], num_tokens, temperature=0.7 if number % 2 else 0.0)

        # Of different lengths, so that not all of the first end at once.
        running = {another(max(16, NEW_TOKENS * (place + 1) // requests)) for place in range(requests)}
        begun = counting_since = time.perf_counter()
        fresh, tokens, num_steps = set(running), 0, 0
        while (now := time.perf_counter()) - begun < seconds:
            outputs = self.engine.step()
            if fresh:
                fresh -= {output.request_id for output in outputs}
                counting_since = time.perf_counter()
            else:
                tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
                num_steps += bool(outputs)
            running -= {output.request_id for output in outputs if output.finished}
            running |= {another() for _ in range(requests - len(running))}
        self.engine.abort_request(list(running), internal=False)
        self.drain()
        return Block(policy, requests, tokens, max(now - counting_since, 1e-9), num_steps, measured)

    def drain(self) -> None:
        """Finish what is under way. Raises RuntimeError if the plugin has turned itself off."""
        super().drain()
        if self.length is None and self.scheduler.steering is None:
            raise RuntimeError("the plugin has failed: the log above says why")


def facts(engine: Any) -> dict[str, Any]:
    """Versions and settings that figures depend on."""
    import torch
    import vllm

    config = engine.vllm_config
    return {
        **provenance(f"scripts/vllm/{Path(sys.argv[0]).name}"),
        "device": "cpu",
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "overlapped": config.scheduler_config.async_scheduling,
        "graphs": str(config.compilation_config.cudagraph_mode),
    }


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # an engine takes long to end
