"""Questions about the engine on a GPU: a start with nothing compiled, the cost of sampling, and outputs of captured steps.

    python -m speclen.bench.gpu.own_engine cold|sampling|engine --out RESULT.json [--dry-run]

Needs torch, transformers, numpy and this project's source, but not its environment. For cold and sampling the
models have random weights in the shape of an 8B Llama's layers. The last line begins with pass, fail or skipped.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

if "--dry-run" not in sys.argv:
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()  # before Triton is imported: nothing is compiled yet

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from speclen.bench.generate import GREEDY, generate
from speclen.bench.gpu.answers import Answer
from speclen.cli.support.machine import machine
from speclen.records import Arm, StepRecord
from speclen.worker.arms import ArmChoice, FixedArm
from speclen.worker.backends.kv_cache import KVPool, LayerShape
from speclen.worker.backends.torch.captured_model import CapturedModel, Recorder, RerunRecorder
from speclen.worker.engine.engine import Engine
from speclen.worker.engine.preparation import SAMPLING_BYTES, EngineConfig, prepare
from speclen.worker.engine.speculative import LaunchedStep
from speclen.worker.engine.step_plan import StepPlan
from speclen.worker.models.loading import ModelPair, load_pair, load_tokenizer
from speclen.worker.profiling.prompts import PromptSource, held_out_texts
from speclen.worker.requests.request import SamplingParams

ROWS, LENGTH = 32, 5
CLOSE = {torch.bfloat16: 0.02, torch.float32: 1e-4}  # largest difference of attention's outputs, which are of size 1
MORE_HOST_S = 1e-3  # that launching a sampled step may take beyond a greedy one
# Two tokens whose float32 logits lie closer are a tie, which any shape of a product may break its own way.
TIE = 1e-3
MAX_GROWTH = 0.01  # of the device's memory over requests that must not make it grow
Prompt = tuple[int, ...]


def main() -> int:
    """Exit code 0 unless a check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", choices=ANSWERS)
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--dry-run", action="store_true", help="with tiny models, on the CPU")
    options = parser.parse_args()
    answer = Answer(options.question, options.out)
    ANSWERS[options.question](answer, options.dry_run)
    return answer.end()


def make_pair(dry: bool) -> ModelPair:
    device, dtype = (torch.device("cpu"), torch.float32) if dry else (torch.device("cuda:0"), torch.bfloat16)
    vocab_size = 4096 if dry else 128_256
    sizes = ((64, 4, 2, 2), (32, 2, 2, 1)) if dry else ((4096, 32, 8, 8), (1024, 8, 4, 2))
    target, draft = (random_model(*each, 16 if dry else 128, vocab_size, device, dtype) for each in sizes)
    names = "random target", "random draft"
    return ModelPair(target, draft, load_tokenizer("bundled:target"), *names, device, dtype, (), 24_576, vocab_size)


def random_model(
    hidden: int,
    heads: int,
    kv_heads: int,
    layers: int,
    head_dim: int,
    vocab_size: int,
    device: torch.device,
    dtype: Any,
) -> Any:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=7 * hidden // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=24_576,
    )
    torch.manual_seed(1)
    with device:
        return LlamaForCausalLM(config).to(dtype).eval()


def make_engine(pair: ModelPair, dry: bool) -> Engine:
    config = EngineConfig(
        max_batch_size=2 if dry else ROWS,
        max_speculation_length=LENGTH,
        max_context_length=512,
        seed=1,
        backend="torch",
    )
    return Engine(pair, config, FixedArm(Arm(LENGTH)), prepare(pair, config, RerunRecorder() if dry else None))


def prompts_of(num: int, length: int) -> list[list[int]]:
    return [[7 + (31 * row + at) % 2000 for at in range(length + row)] for row in range(num)]


def answer_cold(answer: Answer, dry: bool) -> None:
    """Seconds until ready with nothing compiled, captures while serving, and attention compared with torch's."""
    pair = make_pair(dry)
    begun = time.monotonic()
    engine = make_engine(pair, dry)
    models = [model for model in (engine.target, engine.draft) if isinstance(model, CapturedModel)]
    captured = sum(model.num_first_uses for model in models)
    answer.note(seconds_to_ready=round(time.monotonic() - begun, 1), captured=captured)
    answer.check("steps are captured", len(models) == 2 and captured > 0)
    answer.check("kernels of our own run", dry or all(model.has_kernels for model in models))
    for num_rows in (1, engine.limits.max_batch_size):
        generate(engine, prompts_of(num_rows, 40), [24] * num_rows)
    later = sum(model.num_first_uses for model in models) - captured
    answer.note(captured_while_serving=later)
    answer.check("nothing is captured while serving", later == 0)
    del engine
    differences = attention_differences(pair.device, pair.dtype, dry)
    answer.note(attention=differences)
    answer.check("attention is torch's", all(value <= CLOSE[pair.dtype] for value in differences.values()))


@torch.inference_mode()
def attention_differences(device: torch.device, dtype: torch.dtype, dry: bool) -> dict[str, float]:
    """Largest difference from torch's attention in float32, by rows and tokens."""
    os.environ.setdefault("TRITON_INTERPRET", "1" if dry else "0")
    from speclen.worker.backends.torch import fused

    (heads, kv_heads, head_dim), queries, found = (4, 2, 16) if dry else (32, 8, 128), LENGTH + 1, {}
    for num_rows in (1, 2 if dry else ROWS):
        for num_tokens in (30, 70) if dry else (300, 3_000, 20_000):
            pool = KVPool([LayerShape(kv_heads, head_dim)], num_rows, num_tokens + 8, dtype, device)
            layer = pool.layers[0].normal_()
            query = torch.randn(num_rows, heads, queries, head_dim, device=device, dtype=dtype)
            starts = num_tokens - queries - torch.arange(num_rows, device=device)
            positions = starts[:, None] + torch.arange(queries, device=device)
            rows = torch.arange(num_rows, device=device)
            ours = fused.attend(query, rows, positions, layer, head_dim**-0.5, None, num_tokens)
            worst = 0.0
            for row in range(num_rows):
                keys, values = (
                    part.float().repeat_interleave(heads // kv_heads, dim=0) for part in layer[row].unbind(0)
                )
                seen = torch.arange(keys.shape[1], device=device) <= positions[row, :, None]
                wanted = torch.nn.functional.scaled_dot_product_attention(
                    query[row].float(), keys, values, attn_mask=seen
                )
                worst = max(worst, float((ours[row].float().transpose(0, 1) - wanted).abs().max()))
            found[f"{num_rows} rows of {num_tokens}"] = worst
    return found


def answer_sampling(answer: Answer, dry: bool) -> None:
    """Milliseconds of the host and of whole steps, and memory, at temperature 0.7 and top-p 0.9 and greedy."""
    pair = make_pair(dry)
    engine = make_engine(pair, dry)
    num_rows, num_tokens = engine.limits.max_batch_size, 12 if dry else 120
    kinds = {"greedy": GREEDY, "sampled": SamplingParams(temperature=0.7, top_p=0.9, ignore_eos=True)}
    found: dict[str, dict[str, float]] = {}
    for name, sampling in (*kinds.items(), *kinds.items()):  # the first round is not counted
        found[name] = measured(engine, sampling, num_rows, num_tokens)
    answer.note(**found)
    more_s = (found["sampled"]["host_ms"] - found["greedy"]["host_ms"]) / 1e3
    answer.check(f"launching takes at most {MORE_HOST_S * 1e3:.0f} ms more", dry or more_s <= MORE_HOST_S)
    reserve = SAMPLING_BYTES * num_rows * (LENGTH + 1) * pair.vocab_size
    answer.note(reserve_mib=reserve >> 20)
    answer.check("memory is within the reserve", found["sampled"]["peak_mib"] <= max(reserve >> 20, 1))


def measured(engine: Engine, sampling: SamplingParams, num_rows: int, num_tokens: int) -> dict[str, float]:
    """Medians over the steps of all rows. peak_mib: beyond what is held between steps."""
    launch, host_s, step_s, device = engine.runner.launch, list[float](), list[float](), engine.pair.device
    held = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)

    def timed(plan: Any) -> Any:
        begun = time.perf_counter()
        step = launch(plan)
        if len(plan.rows) == num_rows:
            host_s.append(time.perf_counter() - begun)
        return step

    def note(record: StepRecord) -> None:
        if record.batch_size == num_rows:
            step_s.append(record.latency_s)

    engine.runner.launch = timed  # type: ignore[method-assign]
    generate(engine, prompts_of(num_rows, 40), [num_tokens] * num_rows, note, sampling)
    engine.runner.launch = launch  # type: ignore[method-assign]
    peak = torch.cuda.max_memory_allocated(device) - held if device.type == "cuda" else 0
    median = statistics.median
    return {"host_ms": median(host_s) * 1e3, "step_ms": median(step_s) * 1e3, "peak_mib": peak >> 20}


class VaryingLengths:
    """A random length at every step, 0 included, by seed."""

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


def answer_engine(answer: Answer, dry: bool) -> None:
    """Captured steps compared with plain ones, and both with the target alone."""
    device = torch.device("cpu" if dry else "cuda:0")
    answer.note(machine=machine(device))
    pair = load_pair("bundled:target", "bundled:draft", str(device), "float32")
    check_outputs(answer, pair, *((6, RerunRecorder()) if dry else (24, None)))


def check_outputs(answer: Answer, pair: ModelPair, num_requests: int, recorder: Recorder | None) -> None:
    """Check outputs, waits and memory on a float32 pair, where tokens can be compared exactly."""
    prompts, max_tokens = ragged(PromptSource(pair.tokenizer, held_out_texts(), 1), num_requests)
    config = EngineConfig(max_batch_size=12, max_speculation_length=6, seed=1, backend="torch")
    plain = Engine(pair, replace(config, max_recordings=0), VaryingLengths(2, 6))
    recorded = Engine(pair, config, VaryingLengths(2, 6), prepare(pair, config, recorder))
    expected = generate(plain, prompts, max_tokens)
    found = generate(recorded, prompts, max_tokens)
    num_different = sum(a != b for a, b in zip(expected, found, strict=True))
    is_captured = isinstance(recorded.target, CapturedModel) and recorded.target.recorder is not None
    answer.check("steps are captured", is_captured, f"{recorded.target.num_first_uses} passes of the target")
    # A tie that two shapes of a product break differently changes a whole output.
    few = num_different <= num_requests // 20
    answer.check("captured steps give the tokens of plain ones", few, f"{num_different} of {num_requests} differ")
    for name, outputs in (("plain", expected), ("captured", found)):
        miss = max(widest_miss(pair.target, p, o, pair.device) for p, o in zip(prompts, outputs, strict=True))
        is_own = miss < TIE
        answer.check(f"{name} steps generate what the target alone would", is_own, f"logits at most {miss:.1e} below")
    check_launches(answer, recorded, prompts, max_tokens)
    check_memory(answer, recorded, prompts)


def check_launches(answer: Answer, engine: Engine, prompts: Sequence[Prompt], max_tokens: Sequence[int]) -> None:
    """Serve requests again and count how often the host waits for the device before a step's passes are all launched."""
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
    answer.check("steps are launched without waiting", not num_waits, f"{num_waits} operations waited")


def check_memory(answer: Answer, engine: Engine, prompts: Sequence[Prompt], rounds: int = 3) -> None:
    """Serve more requests of the same shapes; the device's memory must not grow."""
    before = allocated(engine.pair.device)
    for _ in range(rounds):
        generate(engine, prompts, [8] * len(prompts))
    after = allocated(engine.pair.device)
    growth = (after - before) / max(before, 1)
    detail = f"{rounds * len(prompts)} requests: {before >> 20} to {after >> 20} MiB"
    answer.check("memory is flat", growth <= MAX_GROWTH, detail)


def allocated(device: torch.device) -> int:
    """Bytes of tensors on the device; 0 on a CPU, where they are unknown."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


ANSWERS = {"cold": answer_cold, "sampling": answer_sampling, "engine": answer_engine}

if __name__ == "__main__":
    sys.exit(main())
