"""Write the pair that speclen serves, in the dtype it is served in, and requests, for scripts/vllm to use.

Runs in the project's environment.
"""

from __future__ import annotations

import json
from pathlib import Path

import typer

from speclen.bench.serving.prompts import PromptDrawer
from speclen.worker.models.loading import load_pair


def main(
    folder: Path,
    target: str = "bundled:target-60m",
    draft: str = "bundled:draft",
    num_prompts: int = 64,
    prompt_tokens: int = 64,
    num_tokens: int = 64,
) -> None:
    """Write folder/target, folder/draft (safetensors and tokenizer) and folder/requests.json."""
    pair = load_pair(target, draft, device="cpu")
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        model.save_pretrained(folder / name)
        pair.tokenizer.save_pretrained(folder / name)
    drawer = PromptDrawer(pair.tokenizer)
    prompts = [drawer.draw("code", prompt_tokens, seed) for seed in range(num_prompts)]
    content = {"prompts": prompts, "num_tokens": num_tokens, "target": target, "draft": draft, "dtype": str(pair.dtype)}
    (folder / "requests.json").write_text(json.dumps(content) + "\n", "utf-8")
    print(f"{target} and {draft} in {pair.dtype}, {num_prompts} requests: {folder}")


if __name__ == "__main__":
    typer.run(main)
