"""transformers' own generation on the same weights: what a user would run without speclen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from speclen.worker.models.loading import ModelPair

Prompts = Sequence[tuple[int, ...]]


class TransformersBaseline:
    """Runs `generate` (any batch size) and assisted generation (batch size 1) greedily, ignoring end tokens."""

    def __init__(self, pair: ModelPair) -> None:
        # The engine works on copies of its own, so these still have transformers' attention.
        self.target, self.draft = pair.target, pair.draft
        self.device = pair.device
        # A checkpoint's sampling defaults and end token would make the comparison one of different work.
        self.target.generation_config = GenerationConfig(pad_token_id=0)

    def generate(self, prompts: Prompts, new_tokens: int) -> float:
        """Seconds to generate new_tokens for each of the prompts, which have one length, in one batch."""
        return self._timed(prompts, new_tokens)

    def assisted(self, prompts: Prompts, new_tokens: int, length: int | None) -> float:
        """Seconds for one prompt after the other with the draft as assistant.

        length None: transformers' defaults (20 tokens, less where the draft is not confident); else always that many.
        """
        assert self.draft is not None
        fixed = {"num_assistant_tokens": length, "assistant_confidence_threshold": 0.0} if length is not None else {}
        self.draft.generation_config = GenerationConfig(pad_token_id=0, **fixed)
        return sum(self._timed([prompt], new_tokens, assistant_model=self.draft) for prompt in prompts)

    @torch.inference_mode()
    def _timed(self, prompts: Prompts, new_tokens: int, **options: Any) -> float:
        ids = torch.tensor(list(prompts), device=self.device)
        start = time.perf_counter()
        output = self.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            **options,
        )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elapsed = time.perf_counter() - start
        generated = output.shape[1] - ids.shape[1]
        if generated != new_tokens:
            raise RuntimeError(f"transformers generated {generated} tokens instead of {new_tokens}")
        return elapsed
