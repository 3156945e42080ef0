"""vLLM under the plugin, beside fixed lengths of its own: closed loops on one engine, whose lengths take turns.

A controller with an empty database runs beside it. `adaptive` learns first; then every policy serves every number of
requests at once, in turns, until the time is over. What there is of the results is written after each turn.
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

from speclen.cli.support.machine import provenance
from speclen.cli.support.output import write_whole

REQUESTS = (32, 4, 16, 1)  # the first are measured most often
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 96, 128, 192
PROMPTS_APART = 37  # between the first prompts of two turns
NUM_CHECKED, CHECKED_TOKENS = 8, 48
LEARN_SHARE = 0.3  # of the time that is left when the engine is up
BETWEEN_S = 0.5  # two blocks: for what is under way to end
END_S = 5.0  # for the controller's last commit
MAX_IN_FLIGHT = 4  # steps that vLLM may have launched when nobody asks for anything any more


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
    """0 if the plugin chose lengths and reported to the end, and in float32 all outputs are equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runner", choices=("v1", "v2"), required=True, help="vLLM's model runner")
    parser.add_argument("--seconds", type=float, required=True, help="for everything, the engine's start included")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write; database and log lie beside it")
    parser.add_argument("--dry-run", action="store_true", help="with small models, on vLLM's build for CPUs")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds - END_S
    from speclen.bench.gpu.vllm_engine import DRY, FULL, make_engine, set_environment  # here, since they take seconds
    from speclen.bench.serving.warm import free_address
    from speclen.cli.support.processes import Child

    models, address, log = DRY if options.dry_run else FULL, free_address(), options.out.with_suffix(".controller.log")
    arguments = ["controller", "--listen", address, "--db", str(options.out.with_suffix(".db"))]
    controller = Child("controller", arguments, address, log, takes_settings=False)
    try:
        controller.start()
        controller.wait_until_serving(60.0)
        set_environment(models, options.runner, address)
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(make_engine(models, Path(folder)), models.target)
        policies = ["adaptive", *(f"fixed:{length}" if length else "none" for length in models.lengths)]
        outputs = compare_outputs(bench, policies)
        serve(bench, policies, models.block_s, until, options.out, bench.facts() | {"outputs": outputs})
    finally:
        controller.stop(END_S)
    return 1 if models.dtype == "float32" and min(outputs.values()) < NUM_CHECKED else 0


def serve(
    bench: Bench, policies: Sequence[str], block_s: float, until: float, out: Path, document: dict[str, Any]
) -> None:
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

    sizes = (*REQUESTS, *reversed(REQUESTS))
    learn_s = LEARN_SHARE * (until - time.monotonic()) / len(sizes)
    for turn, requests in enumerate(sizes):
        note([bench.block("adaptive", requests, learn_s, turn, measured=False)])
    for number in itertools.count():
        if until - time.monotonic() < len(policies) * (block_s + BETWEEN_S):
            break
        first = number % len(policies)
        order = (*policies[first:], *policies[:first])
        note([bench.block(policy, REQUESTS[number % len(REQUESTS)], block_s, len(sizes) + number) for policy in order])


def compare_outputs(bench: Bench, policies: Sequence[str]) -> dict[str, int]:
    """Count greedy outputs equal to those at length 3, by policy; in 16 bits, lengths break ties differently."""
    expected = bench.outputs("fixed:3")
    found = {policy: sum(a == b for a, b in zip(bench.outputs(policy), expected, strict=True)) for policy in policies}
    print(f"greedy outputs equal to those at length 3, of {NUM_CHECKED}: {found}", flush=True)
    return found


def rates_of(blocks: Sequence[Block]) -> dict[str, dict[str, float]]:
    """Tokens per second by policy and requests, over all blocks that are measured: of all policies on the same prompts."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for block in blocks:
        if block.measured:
            sums = found.setdefault(block.policy, {}).setdefault(str(block.requests), np.zeros(2))
            sums += block.tokens, block.seconds
    return {policy: {size: float(a / b) for size, (a, b) in row.items()} for policy, row in found.items()}


class Bench:
    """Closed loops on one engine. engine: a vllm.LLMEngine in this process."""

    def __init__(self, engine: Any, target: str) -> None:
        from speclen.bench.serving.prompts import PromptDrawer
        from speclen.worker.models.loading import load_tokenizer

        drawer = PromptDrawer(load_tokenizer(target))
        self.prompts = [drawer.draw("code", PROMPT_TOKENS, seed) for seed in range(NUM_PROMPTS)]
        self.engine = engine
        self.core = engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.steering = self.scheduler.steering
        self.configured = list(self.scheduler.dynamic_sd_lookup)
        self.numbers, self.adaptive = itertools.count(), True
        if self.steering is None:
            raise RuntimeError("the plugin is off from the start: the log above says why")

    def use(self, policy: str) -> None:
        """adaptive: the plugin chooses. Others: vLLM alone, with a table of one length."""
        self.adaptive = policy == "adaptive"
        length = int(policy.removeprefix("fixed:")) if policy.startswith("fixed:") else 0
        self.scheduler.steering = self.steering if self.adaptive else None
        self.scheduler.dynamic_sd_lookup[:] = self.configured if self.adaptive else [length] * len(self.configured)

    def add(self, number: int, num_tokens: int, temperature: float) -> str:
        """Hand in prompt `number`, a request of its own name."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        name = f"r{next(self.numbers)}"
        sampling = SamplingParams(
            max_tokens=num_tokens,
            temperature=temperature,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = list(self.prompts[number % NUM_PROMPTS])
        self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name

    def block(self, policy: str, requests: int, seconds: float, turn: int, measured: bool = True) -> Block:
        """So many requests at once, half of them greedy, for so many seconds; what is under way at the end is aborted.

        turn: its number, which selects the prompts: the same few are no sample of acceptance.
        """
        self.use(policy)
        # The first request, which takes most of a turn at 1, is greedy in every other turn of that size.
        numbers = itertools.count(PROMPTS_APART * turn + turn // len(REQUESTS))

        def another(num_tokens: int = NEW_TOKENS) -> str:
            number = next(numbers)
            return self.add(number, num_tokens, 0.7 if number % 2 else 0.0)

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

    def outputs(self, policy: str) -> list[list[int]]:
        """Greedy outputs of the first prompts, all at once."""
        self.use(policy)
        found: dict[str, list[int]] = {self.add(number, CHECKED_TOKENS, 0.0): [] for number in range(NUM_CHECKED)}
        while any(len(tokens) < CHECKED_TOKENS for tokens in found.values()):
            for output in self.engine.step():
                found[output.request_id] += output.outputs[0].token_ids
        self.drain()
        return list(found.values())

    def drain(self) -> None:
        """Finish what is under way. Raises RuntimeError if the plugin has given up since it was to choose."""
        while self.engine.has_unfinished_requests():
            self.engine.step()
        for _ in range(MAX_IN_FLIGHT):
            if self.core.batch_queue:
                self.engine.step()
        if self.adaptive and self.scheduler.steering is None:
            raise RuntimeError("the plugin has failed: the log above says why")

    def facts(self) -> dict[str, Any]:
        """Versions and settings that figures depend on."""
        import torch
        import vllm

        config = self.engine.vllm_config
        return {
            **provenance("scripts/gpu_check"),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "torch": torch.__version__,
            "vllm": vllm.__version__,
            "v2": config.use_v2_model_runner,
            "overlapped": config.scheduler_config.async_scheduling,
            "graphs": str(config.compilation_config.cudagraph_mode),
        }


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # an engine takes long to end, and minutes are few
