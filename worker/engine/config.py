"""Settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from speclen.records import NGRAM_MAX_TOKENS
from speclen.worker.backends.passes import padded_width


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every default works. backend: one of `naming.BACKENDS`."""

    max_batch_size: int = 32  # sequences, decoding and prefilling
    max_speculation_length: int = 8  # draft tokens per row and step, at most
    ngram: bool = False  # arms may have n-grams
    max_context_length: int | None = None  # tokens of prompt and output; None: the models' limit, or what fits on a GPU
    max_kv_tokens: int | None = None  # tokens of KV over all rows; None: what fits into half of the free memory
    max_cached_tokens: int = 8192  # of the prefix cache; OpenVINO only
    prefill_chunk: int = 256  # prompt tokens per step: bounds the delay of decoding sequences
    seed: int | None = None  # of requests without a seed; None: random
    backend: str = "auto"  # OpenVINO where it is installed and runs the models exactly, else torch
    check_models: bool = True  # compare each model with its plain forward before serving
    max_recordings: int = 256  # CUDA graphs kept on a GPU, the least recently used is evicted; 0: none
    record_ahead_s: float = 30.0  # for capturing graphs at the start, at most

    @property
    def max_proposed_tokens(self) -> int:
        """Tokens per row and step that may be rejected: places that a row needs beyond its own."""
        if not self.ngram:
            return self.max_speculation_length
        return padded_width(max(self.max_speculation_length, NGRAM_MAX_TOKENS))
