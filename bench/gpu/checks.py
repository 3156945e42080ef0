"""Outputs of the engine on this device: captured steps compared with plain ones, both with the target alone; and memory.

Needs torch, transformers and numpy, and nothing of this project's environment but its source.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from speclen.bench.engine.run import generate
from speclen.bench.gpu.answers import Answer
from speclen.cli.support.machine import machine
from speclen.records import Arm, StepRecord
from speclen.worker.backends.torch.captured_model import CapturedModel
from speclen.worker.backends.torch.recording import Recorder, RerunRecorder
from speclen.worker.drafting.arm_chooser import ArmChoice
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.engine.preparation import prepare
from speclen.worker.engine.speculative import LaunchedStep
from speclen.worker.engine.step_plan import StepPlan
from speclen.worker.models.loading import ModelPair, load_pair
from speclen.worker.profiling.prompts import PromptSource, held_out_texts

Prompt = tuple[int, ...]
# Two tokens whose float32 logits lie closer are a tie, which any shape of a product may break its own way.
TIE = 1e-3
# Allowed growth of the device's memory over the requests that must not make it grow.
MAX_GROWTH = 0.01


@dataclass(frozen=True, slots=True)
class Check:
    """One question and its answer."""

    name: str
    passed: bool
    detail: str


def main() -> int:
    """0 if every check passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="fewer requests, on the CPU")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    options = parser.parse_args()
    device = torch.device("cpu" if options.dry_run else "cuda:0")
    pair = load_pair("bundled:target", "bundled:draft", str(device), "float32")
    answer = Answer("engine", options.out)
    answer.note(machine=machine(device))
    for check in run_checks(pair, *((6, RerunRecorder()) if options.dry_run else (24, None))):
        answer.check(check.name, check.passed, check.detail)
    return answer.end()


class VaryingLengths:
    """Another length at every step, 0 included; the same ones for the same seed."""

    wants_evaluations = False

    def __init__(self, seed: int, longest: int) -> None:
        self.random = random.Random(seed)
        self.longest = longest

    def choose(self, batch_size: int, with_prefill: bool = False) -> ArmChoice:
        return ArmChoice(Arm(self.random.randint(0, self.longest)))

    def report(self, record: StepRecord) -> None:
        pass


def ragged(source: PromptSource, num: int) -> tuple[list[Prompt], list[int]]:
    """Prompts and output lengths of all sizes."""
    dice = random.Random(7)
    return [source.draw(dice.randint(2, 100)) for _ in range(num)], [dice.randint(4, 40) for _ in range(num)]


@torch.inference_mode()
def widest_miss(model: object, prompt: Prompt, output: Sequence[int], device: torch.device) -> float:
    """Largest gap in logits between the target's own choice and a token of the output."""
    ids = torch.tensor([[*prompt, *output]], device=device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()  # type: ignore[operator]
    chosen = logits.gather(1, torch.tensor(output, device=device)[:, None])[:, 0]
    return float((logits.max(dim=-1).values - chosen).max())


def run_checks(pair: ModelPair, num_requests: int, recorder: Recorder | None) -> list[Check]:
    """All checks on a float32 pair, where tokens can be compared exactly."""
    prompts, max_tokens = ragged(PromptSource(pair.tokenizer, held_out_texts(), 1), num_requests)
    config = EngineConfig(max_batch_size=12, max_speculation_length=6, seed=1, backend="torch")
    plain = Engine(pair, replace(config, max_recordings=0), VaryingLengths(2, 6))
    recorded = Engine(pair, config, VaryingLengths(2, 6), prepare(pair, config, recorder))
    expected = generate(plain, prompts, max_tokens)
    found = generate(recorded, prompts, max_tokens)
    num_different = sum(a != b for a, b in zip(expected, found, strict=True))
    checks = [
        Check(
            "steps are captured",
            isinstance(recorded.target, CapturedModel) and recorded.target.recorder is not None,
            f"{recorded.target.num_first_uses} passes of the target were captured",
        ),
        # A tie that two shapes of a product break differently changes a whole output.
        Check(
            "captured steps give the tokens of plain ones",
            num_different <= num_requests // 20,
            f"{num_different} of {num_requests} outputs differ",
        ),
    ]
    for name, outputs in (("plain", expected), ("captured", found)):
        miss = max(widest_miss(pair.target, p, o, pair.device) for p, o in zip(prompts, outputs, strict=True))
        checks.append(
            Check(
                f"{name} steps generate what the target alone would",
                miss < TIE,
                f"logits at most {miss:.1e} below its own",
            )
        )
    checks.append(check_launches(recorded, prompts, max_tokens))
    checks.append(check_memory(recorded, prompts))
    return checks


def check_launches(engine: Engine, prompts: Sequence[Prompt], max_tokens: Sequence[int]) -> Check:
    """Serve requests again, and count how often the host waits for the device before all passes of a step are launched."""
    launch, num_waits, device = engine.runner.launch, 0, engine.pair.device

    def watched(plan: StepPlan) -> LaunchedStep:
        nonlocal num_waits
        num_recorded = engine.target.num_first_uses, engine.draft and engine.draft.num_first_uses
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                step = launch(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        if num_recorded == (engine.target.num_first_uses, engine.draft and engine.draft.num_first_uses):
            num_waits += sum("synchronizing CUDA operation" in str(one.message) for one in told)
        return step

    if device.type == "cuda":
        engine.runner.launch = watched  # type: ignore[method-assign]
    generate(engine, prompts, max_tokens)
    engine.runner.launch = launch  # type: ignore[method-assign]
    return Check("steps are launched without waiting", not num_waits, f"{num_waits} operations waited")


def check_memory(engine: Engine, prompts: Sequence[Prompt], rounds: int = 3) -> Check:
    """Serve more requests of the same shapes; the device's memory and the recordings must stay."""
    before = allocated(engine.pair.device)
    for _ in range(rounds):
        generate(engine, prompts, [8] * len(prompts))
    after = allocated(engine.pair.device)
    growth = (after - before) / max(before, 1)
    return Check(
        "memory is flat", growth <= MAX_GROWTH, f"{rounds * len(prompts)} requests: {before >> 20} to {after >> 20} MiB"
    )


def allocated(device: torch.device) -> int:
    """Bytes of tensors on the device; 0 on a CPU, which does not tell."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


if __name__ == "__main__":
    sys.exit(main())
