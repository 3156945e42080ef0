"""Accepted draft tokens of a pair, by position, as a Markdown table.

    python scripts/measure_pair.py                                                 # the bundled pair
    python scripts/measure_pair.py build/smollm2/target build/smollm2/draft        # a chat model with its draft

Prompts are pieces of held-out files, or held-out prompts of every kind for a chat model; the real engine decodes them at
the largest length. The first table is part of worker/bundled/README.md, the second of docs/results/chat/acceptance.md.
"""

from __future__ import annotations

import numpy as np
import torch
import typer

from speclen.bench.generate import generate
from speclen.bench.serving.prompts import ChatPrompts
from speclen.bench.serving.traffic import CHAT_KINDS
from speclen.records import Arm, StepRecord
from speclen.worker.arms import FixedArm
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.models.loading import ModelPair, load_pair
from speclen.worker.profiling.prompts import PromptSource, held_out_texts
from speclen.worker.requests.request import SamplingParams

LENGTH = 8
Prompts = list[tuple[int, ...]]


def accepted_counts(pair: ModelPair, prompts: Prompts, max_tokens: int, sampling: SamplingParams) -> np.ndarray:
    """Steps by the tokens that the engine accepts at length 8 while it continues the prompts, 16 at a time."""
    arm, counts = Arm(LENGTH), np.zeros(LENGTH + 1, dtype=np.int64)
    engine = Engine(pair, EngineConfig(max_batch_size=16, max_speculation_length=LENGTH), FixedArm(arm))

    def count(record: StepRecord) -> None:
        if record.arm == arm:
            counts[:] += record.accepted_histogram

    generate(engine, prompts, [max_tokens] * len(prompts), count, sampling)
    return counts


def prompts_of(pair: ModelPair, number: int) -> dict[str, Prompts]:
    """This many prompts of every kind."""
    if pair.tokenizer.chat_template:
        chat = ChatPrompts(pair.tokenizer)
        return {kind: [chat.draw(kind, seed) for seed in range(number)] for kind in CHAT_KINDS}
    files = PromptSource(pair.tokenizer, held_out_texts(), seed=0)
    return {"files": [files.draw(64) for _ in range(number)]}


def main(
    target: str = typer.Argument("bundled:target"),
    draft: str = typer.Argument("bundled:draft"),
    num_prompts: int = typer.Option(256, help="Of every kind and temperature."),
    max_tokens: int = typer.Option(64, help="Of an answer."),
    threads: int = 2,
) -> None:
    """Print the share of steps whose draft tokens up to a position were all accepted, and the tokens accepted a step."""
    torch.set_num_threads(threads)
    pair = load_pair(target, draft, device="cpu")
    on = not pair.tokenizer.chat_template  # a chat model ends its answers itself
    print(f"| prompts | temperature | {' | '.join(str(at + 1) for at in range(LENGTH))} | accepted |")
    print("|---" * (LENGTH + 3) + "|")
    for kind, prompts in prompts_of(pair, num_prompts).items():
        for temperature in (0.0, 0.7, 1.0):
            sampling = SamplingParams(ignore_eos=on, temperature=temperature, seed=0)
            counts = accepted_counts(pair, prompts, max_tokens, sampling)
            survival = counts[::-1].cumsum()[::-1][1:] / counts.sum()
            shares = " | ".join(f"{share:.3f}" for share in survival)
            print(f"| {kind} | {temperature:g} | {shares} | {survival.sum():.2f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
