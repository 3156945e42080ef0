"""transformers' generate() behind a chat server: static batches, assisted generation, prompt lookup.

A batch is what waits when the one before has ended. Assisted generation and prompt lookup take one request at a time.
"""

from __future__ import annotations

import argparse
import queue
from typing import Any

import torch
from chat_server import ROWS, Asked, serve, take
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList

LARGEST_NGRAM = 3  # that prompt lookup searches for


class Temperatures(LogitsProcessor):
    """Divide the logits of each row by its own temperature; at 0 only the largest is left."""

    def __init__(self, batch: list[Asked]) -> None:
        self._temperatures = torch.tensor([[max(asked.temperature, 1e-4)] for asked in batch])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.float() / self._temperatures


def speculation(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of generate()."""
    if options.lookup:
        return {"prompt_lookup_num_tokens": options.lookup, "max_matching_ngram_size": LARGEST_NGRAM}
    if not options.draft:
        return {}
    draft = AutoModelForCausalLM.from_pretrained(options.folder / "draft", dtype="auto").eval()
    draft.generation_config.num_assistant_tokens = options.draft
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return {"assistant_model": draft}


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, batch: list[Asked], arguments: dict[str, Any]) -> None:
    """Rows end with their end token; a row that asked for fewer tokens is cut."""
    texts = [tokenizer.apply_chat_template(a.messages, add_generation_prompt=True, tokenize=False) for a in batch]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    torch.manual_seed(batch[0].seed)
    output = model.generate(
        **inputs,
        **arguments,
        max_new_tokens=max(asked.max_tokens for asked in batch),
        do_sample=any(asked.temperature for asked in batch),
        logits_processor=LogitsProcessorList([Temperatures(batch)]),
    )
    for asked, row in zip(batch, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
        end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        tokens = row[: min(end, asked.max_tokens)]
        asked.done.set_result((tokenizer.decode(tokens), len(tokens)))


def run(options: argparse.Namespace, waiting: queue.Queue[Asked]) -> None:
    model = AutoModelForCausalLM.from_pretrained(options.folder / "target", dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(options.folder / "target", padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model.generation_config.top_k = 0
    arguments = speculation(options)
    while True:
        answer(model, tokenizer, take(waiting, 1 if arguments else ROWS, wait=True), arguments)


if __name__ == "__main__":
    serve(run)
