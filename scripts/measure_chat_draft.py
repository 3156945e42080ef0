"""Acceptance of the chat model's draft on held-out prompts, by position, kind and temperature, as a Markdown table.

python scripts/measure_chat_draft.py >docs/results/chat/acceptance.md
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
import typer
from measure_pair import LENGTH, CountingChooser, accepted_counts

from speclen.bench.serving.chat import KINDS, ChatPrompts
from speclen.worker.models.loading import load_pair
from speclen.worker.requests.request import SamplingParams


def main(
    target: Path = Path("build/smollm2/target"),
    draft: Path = Path("build/smollm2/draft"),
    num_prompts: int = typer.Option(32, help="Of every kind and temperature."),
    max_tokens: int = typer.Option(64, help="Of an answer."),
    threads: int = 2,
) -> None:
    """Print the share of steps whose draft tokens up to a position were all accepted."""
    torch.set_num_threads(threads)
    pair = load_pair(str(target), str(draft), device="cpu")
    prompts = ChatPrompts(pair.tokenizer)
    print(f"| kind | temperature | {' | '.join(str(at + 1) for at in range(LENGTH))} | accepted |")
    print("|---" * (LENGTH + 3) + "|")
    for kind, temperature in itertools.product(KINDS, (0.0, 0.7, 1.0)):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
        found = accepted_counts(pair, [prompts.draw(kind, seed) for seed in range(num_prompts)], sampling)
        print(f"| {kind} | {temperature:g} | {in_cells(found)} |", flush=True)


def in_cells(found: CountingChooser) -> str:
    """Survival by position, and tokens accepted a step on average."""
    return " | ".join(f"{share:.2f}" for share in found.survival()) + f" | {found.mean_accepted():.2f}"


if __name__ == "__main__":
    typer.run(main)
